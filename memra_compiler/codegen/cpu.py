"""The CPU code generator: TIR kernels to object files, and one entry function a program.

A kernel is a plain C function; a program is a C function that calls its kernels on fixed arena
offsets; a sequence calls programs. Programs and sequences are exported for `tvm_ffi` to load.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memra_compiler.codegen.toolchain import Linker
from memra_compiler.ir.graph import Module, Program
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.base import Op
from memra_runtime.artifact import BATCH_ROWS, slot
from memra_runtime.errors import fail

#: Field of a DLTensor that holds its data pointer, in TVM's struct access intrinsics.
_DLTENSOR_DATA = 1


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to compile: an op and the types of its operands and outputs."""

    symbol: str
    op: Op
    types: tuple[TensorType, ...]
    scratch_floats: int


def canonical(type: TensorType) -> TensorType:
    """The type with every row bound alike: kernels take any number of rows."""
    shape = tuple(Sym("T", BATCH_ROWS) if isinstance(d, Sym) else d for d in type.shape)
    return replace(type, shape=shape)


def kernel_tir(spec: KernelSpec) -> Any:
    """The kernel as a TIR function."""
    from memra_compiler.ops.emit import build_kernel

    return build_kernel(spec.symbol, spec.types, spec.scratch_floats, spec.op.lower_cpu)


def tvm_target(cpu: str) -> Any:
    """TVM's target for a processor, by LLVM's name of it."""
    import tvm

    return tvm.target.Target({"kind": "llvm", "mcpu": cpu})


def compile_kernel(spec: KernelSpec, cpu: str) -> tuple[bytes, str]:
    """Compile a kernel; returns the object file and its readable TIR.

    The pass list is explicit: a kernel is called by our own entry functions, so it needs no packed
    calling convention, and its buffers are flat and typed already.
    """
    import tvm
    from tvm.tirx import transform

    function = kernel_tir(spec)
    text = function.script()
    target = tvm_target(cpu)
    module = tvm.IRModule({spec.symbol: function.with_attr("target", target)})
    passes = [
        transform.StmtSimplify(),
        transform.FlattenBuffer(),
        transform.VectorizeLoop(True),
        transform.UnrollLoop(),
        transform.LowerIntrin(),
    ]
    module = tvm.ir.transform.Sequential(passes)(module)
    return object_bytes(tvm.get_global_func("target.build.llvm")(module, target)), text


def object_bytes(built: Any) -> bytes:
    """The object file of a compiled TVM module."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        built.write_to_file(str(path), "o")
        return path.read_bytes()


def compile_entries(
    module: Module, symbols: Mapping[str, str], weights: Sequence[str], cpu: str
) -> tuple[bytes, str]:
    """Compile the programs and sequences of a planned module.

    `symbols` maps a node's kernel id to its C symbol; `weights` is the order of the table.
    """
    import tvm

    table = {name: i for i, name in enumerate(weights)}
    functions: dict[str, Any] = {}
    for program in module.programs.values():
        functions[f"run_{program.name}"] = _program_entry(module, program, symbols, table)
    for sequence in module.sequences.values():
        functions[sequence.name] = _sequence_entry(module, sequence.name, table, symbols)
    text = "\n\n".join(f.script() for f in functions.values())
    built = tvm.tirx.build(tvm.IRModule(functions), tvm_target(cpu))
    return object_bytes(built), text


def _entry(symbol: str, emit: Any) -> Any:
    """An exported function `symbol(arena, weights)`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script import builder as T  # noqa: N812

    with IRBuilder() as builder, T.prim_func():
        T.func_name(symbol)
        T.func_attr({"global_symbol": symbol})
        arena, weights = T.arg("arena", T.handle()), T.arg("weights", T.handle())
        emit(T, arena, weights)
    return builder.get()


def _counter_buffer(T: Any, module: Module, arena: Any, name: str) -> Any:
    """A counter of the device block, as a buffer of one element."""
    from tvm import ir, tirx

    offset = module.arena["@state"] + 4 * slot(name)
    pointer = T.Bind(
        ir.Call(
            "tirx.reinterpret",
            [tirx.call_intrin("handle", "tirx.handle_add_byte_offset", arena, offset)],
            ret_ty=ir.PointerType(ir.PrimType("int32")),
        )
    )
    return T.decl_buffer((1,), "int32", data=pointer)


def _counter(T: Any, module: Module, arena: Any, name: str) -> Any:
    """The value of a counter of the device block, read when the entry runs."""
    from tvm import tirx

    return T.Bind(tirx.BufferLoad(_counter_buffer(T, module, arena, name), [0]))


def _emit_program(
    T: Any,
    module: Module,
    program: Program,
    symbols: Mapping[str, str],
    table: Mapping[str, int],
    arena: Any,
    weights: Any,
) -> None:
    from tvm import tirx

    rows = tirx.const(1, "int32")
    if program.rows_from:
        rows = _counter(T, module, arena, program.rows_from)

    def pointer(operand: str) -> Any:
        if operand.startswith("$"):
            return tirx.call_intrin(
                "handle", "tirx.tvm_struct_get", weights, table[operand[1:]], _DLTENSOR_DATA
            )
        place = operand if operand.startswith("@") else f"{program.name}/{operand}"
        offset = tirx.const(module.arena[place], "int64")
        return tirx.call_intrin("handle", "tirx.handle_add_byte_offset", arena, offset)

    for node in program.nodes:
        operands = [*node.inputs, *(f"%{name}" for name in node.outputs)]
        if node.op.scratch_floats(*module.operand_types(program, node)):
            operands.append("%")
        arguments = [pointer(operand) for operand in operands]
        T.evaluate(tirx.call_extern("void", symbols[node.kernel], rows, *arguments))


def _program_entry(
    module: Module, program: Program, symbols: Mapping[str, str], table: Mapping[str, int]
) -> Any:
    def emit(T: Any, arena: Any, weights: Any) -> None:
        _emit_program(T, module, program, symbols, table, arena, weights)

    return _entry(f"run_{program.name}", emit)


def _sequence_entry(
    module: Module, name: str, table: Mapping[str, int], symbols: Mapping[str, str]
) -> Any:
    from tvm import tirx

    sequence = module.sequences[name]

    def once(T: Any, arena: Any, weights: Any) -> None:
        for call in sequence.calls:
            program = module.programs[call.program]
            if not call.repeat:
                _emit_program(T, module, program, symbols, table, arena, weights)
            elif not call.live:
                with T.serial(_counter(T, module, arena, call.repeat)):
                    _emit_program(T, module, program, symbols, table, arena, weights)
            else:
                done, most = (_counter_buffer(T, module, arena, n) for n in ("step", call.repeat))
                with T.While(tirx.BufferLoad(done, [0]) < tirx.BufferLoad(most, [0])):
                    _emit_program(T, module, program, symbols, table, arena, weights)

    def emit(T: Any, arena: Any, weights: Any) -> None:
        if not sequence.loop:
            once(T, arena, weights)
            return
        more = _counter_buffer(T, module, arena, sequence.loop)
        T.buffer_store(more, tirx.const(1, "int32"), [0])
        with T.While(tirx.BufferLoad(more, [0]) != 0):
            once(T, arena, weights)

    return _entry(name, emit)


def link(linker: Linker, objects: Sequence[Path], output: Path) -> None:
    """Link object files into a shared library."""
    command = [*linker.command, "-shared", "-o", str(output), *map(str, objects), *linker.libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(
            "linker",
            f"`{linker.command[0]}` failed with exit code {done.returncode}",
            linker.command[0],
            notes=tuple(done.stderr.strip().splitlines()[:6]),
            hints=("check the installation: it must be able to link a shared library",),
        )

"""CUDA kernels that TVM schedules: from an op's tensor expression to a launch.

An op says once what it computes (`Op.compute`, in tensor expressions); a rule of `memra_schedules`
spreads that over blocks and threads. What the expression sees are plain rows of float32: partial
planes of a matrix product are added here, and weights stored in 16 bits are widened.

Rows are a variable of the function. Only the launch knows their bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Op, expect
from memra_compiler.ops.cuda import Argument, CudaArch, Scheduled
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.cuda_params import C_TYPES, ID_TYPES, whole_tiles
from memra_compiler.ops.emit import Lazy

ir, s_tir, te, tirx = (Lazy(f"tvm.{name}") for name in ("ir", "s_tir", "te", "tirx"))

_TVM_DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64",
}  # fmt: skip
_C_TYPES = C_TYPES | ID_TYPES


@dataclass
class TeOperand:
    """An operand as an expression takes it. `rows` is the variable that counts rows."""

    name: str
    type: TensorType
    rows: Any
    is_weight: bool
    #: What the function is called with; known once the expression has taken the operand.
    placeholder: Any = field(default=None)

    def tensor(self, *shape: int) -> Any:
        """The values as a float32 (or int32) tensor: `[rows, *shape]`, of a weight `shape`.

        By default the shape is that of the type. Another may divide a row's columns into axes
        (heads, halves); it may be taken once.
        """
        if self.type.dtype in FORMATS and self.type.dtype not in _TVM_DTYPES:
            return self._decoded()
        stored = self.type.max_shape if self.is_weight else self.type.max_shape[1:]
        shape = shape or stored
        if math.prod(shape) != math.prod(stored) or self.placeholder is not None:
            raise ValueError(f"{self.name} is {self.type}: it is taken once, as {stored}")
        planes, dtype = self.type.planes, _TVM_DTYPES[self.type.dtype]
        if self.is_weight:
            self.placeholder = te.placeholder(shape, dtype, self.name)
            value = "int32" if self.type.dtype in ID_TYPES else "float32"
            wide = lambda *at: self.placeholder[at].astype(value)  # noqa: E731
            return te.compute(shape, wide, f"{self.name}_value")
        if planes == 1:
            self.placeholder = te.placeholder((self.rows, *shape), dtype, self.name)
            read = lambda *at: self.placeholder[at]  # noqa: E731
            return te.compute((self.rows, *shape), read, f"{self.name}_load")
        tall = whole_tiles(self.type.max_shape[0])
        self.placeholder = te.placeholder((planes, tall, *shape), dtype, self.name)
        parts = te.compute(
            (planes, self.rows, *shape), lambda *at: self.placeholder[at], f"{self.name}_load"
        )

        def total(*at: Any) -> Any:
            value = parts[(0, *at)]
            for plane in range(1, planes):
                value = value + parts[(plane, *at)]
            return value

        return te.compute((self.rows, *shape), total, f"{self.name}_value")

    def _decoded(self) -> Any:
        """A matrix in blocks, decoded by the function of `dequant.cuh`; the CPU has none such."""
        outputs, inputs = self.type.max_shape
        self.placeholder = te.placeholder((outputs, self.type.row_bytes), "uint8", self.name)
        decode = f"dequant::column<dequant::{FORMATS[self.type.dtype].struct}>"

        def value(n: Any, k: Any) -> Any:
            byte = self.placeholder[n, 0].asobject()
            row = ir.Call("tirx.address_of", [byte], ret_ty=ir.PointerType(ir.PrimType("uint8")))
            return tirx.call_pure_extern("float32", decode, row, k)

        return te.compute((outputs, inputs), value, f"{self.name}_value")

    @property
    def argument(self) -> Argument:
        """How the kernel declares it. Only weights may be read before the predecessor is done."""
        shape = [str(n) for n in self.type.max_shape]
        if self.type.planes > 1:
            shape = [str(self.type.planes), str(whole_tiles(self.type.max_shape[0])), *shape[1:]]
        elif not self.is_weight:
            shape[0] = "rows"
        pointer = "* __restrict__" if self.is_weight else "*"
        extents = "".join(f"[{n}]" for n in shape)
        if self.type.dtype in _C_TYPES:
            c_type = f"const {_C_TYPES[self.type.dtype]}{pointer}"
            return Argument(c_type, self.name, extents)
        header = FORMATS[self.type.dtype].header
        shape_text = f"{extents} as {self.type.dtype}"
        return Argument(f"const unsigned char{pointer}", self.name, shape_text, header)


@dataclass(frozen=True)
class TeFunction:
    """An output of an op as a function of its operands, that output, and `rows`."""

    function: Any
    output: int
    arguments: tuple[Argument, ...]


def te_functions(op: Op, *types: TensorType) -> list[TeFunction]:
    """A function for each output of `op`, given the types of operands and outputs.

    Raises: OpError where an operand's format has no place in an expression.
    """
    outputs = op.outputs_of(len(types))
    inputs, made = types[:-outputs], types[-outputs:]
    for i, type in enumerate(types):
        weight = i < len(inputs) and op.operand(i).sigil == "$"
        known = type.dtype in _TVM_DTYPES or (weight and type.dtype in FORMATS)
        expect(known, op, f"expressions know no {type.dtype}: {type}")
        expect(type.layout != "tiles16", op, f"expressions read weights as stored, got {type}")
        expect(type.elements < 1 << 31, op, f"expressions index with 32 bits, got {type}")
    found = []
    for index, type in enumerate(made):
        rows = te.var("rows", "int32")
        operands = [
            TeOperand(_name(op, i), t, rows, op.operand(i).sigil == "$")
            for i, t in enumerate(inputs)
        ]
        results = op.compute(*operands)
        results = results if isinstance(results, tuple) else (results,)
        for operand in operands:
            if operand.placeholder is None:
                operand.tensor()
        result = results[index]
        whole = math.prod(int(n) for n in result.shape[1:]) == math.prod(type.max_shape[1:])
        expect(whole and len(results) == outputs, op, f"computes {result.shape} for {type}")
        function = te.create_prim_func([*(o.placeholder for o in operands), result, rows])
        declared = [o.argument for o in operands]
        for k, other in enumerate(results):
            shape = "[rows]" + "".join(f"[{n}]" for n in made[k].max_shape[1:])
            declared.append(Argument(f"{_C_TYPES[made[k].dtype]}*", str(other.op.name), shape))
        found.append(TeFunction(function, index, tuple(declared)))
    return found


@cache
def scheduled_launches(op: Op, arch: CudaArch, *types: TensorType) -> tuple[Scheduled, ...]:
    """The launches of an op that only says what it computes: one for each output."""
    from memra_schedules.rules import schedule

    bound = types[0].max_shape[0]
    launches = []
    for made in te_functions(op, *types):
        rule, scheduled = schedule(made.function, arch)
        function = scheduled.mod["main"]
        fixed = function.specialize({function.params[-1]: bound})
        extents = dict(thread_extents(fixed.body))
        grid = [int(extents.get(f"blockIdx.{axis}", 1)) for axis in "xyz"]
        block = [int(extents.get(f"threadIdx.{axis}", 1)) for axis in "xyz"]
        launches.append(
            Scheduled(
                rule, function, made.arguments, summary(op),
                (grid[0], grid[1], grid[2]), math.prod(block), early=arch.dependent_launch,
            )
        )  # fmt: skip
    return tuple(launches)


def thread_extents(statement: Any) -> list[tuple[str, Any]]:
    """Every loop that is bound to a block or thread axis: the axis, and how often it turns."""
    found: list[tuple[str, Any]] = []
    if isinstance(statement, tirx.For):
        if statement.thread_binding is not None:
            found = [(str(statement.thread_binding.thread_tag), statement.extent)]
        found += thread_extents(statement.body)
    elif isinstance(statement, s_tir.SBlockRealize):
        found = thread_extents(statement.block.body)
    elif isinstance(statement, tirx.SeqStmt):
        found = [one for part in statement.seq for one in thread_extents(part)]
    elif isinstance(statement, tirx.IfThenElse):
        found = thread_extents(statement.then_case)
    return found


def summary(op: Op) -> str:
    """The first line of what an op says of itself."""
    return (op.__doc__ or op.name).strip().splitlines()[0]


def _name(op: Op, index: int) -> str:
    """The name of an operand; further ones of the last kind are numbered."""
    own = op.operand(index).name
    past = index - len(op.operands) + 1
    return own if past <= 0 else f"{own}{past + 1}"

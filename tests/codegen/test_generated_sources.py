"""The generated entry functions as a reader finds them in the artifact."""

from __future__ import annotations

from collections.abc import Callable

from memra_compiler.codegen.cpu import compile_entries
from memra_compiler.codegen.toolchain import host_cpu
from memra_compiler.ir.graph import Call, Module, Sequence
from memra_compiler.ir.text import parse_module
from memra_compiler.ops.base import discover
from memra_compiler.passes.plan_memory import plan_memory
from memra_compiler.passes.select_kernels import select_kernels

TEXT = """\
module toy
weight $t : f32[8, 32] from target "t"
weight $w : f32[32, 32] from target "w"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @rows : f32[16, 32] rollback none
program one rows T<=1 {
  advance(@state) label "n"
}
program many rows T<=4 from rows {
  %ids : i32[T<=4] = read_tokens(@batch, @state) {chain = False, limit = 4} label "ids"
  %x : f32[T<=4, 32] = embed(%ids, $t) {scale = 1.0} label "x"
  %y : f32[T<=4, 32] = linear(%x, $w) label "y"
  write_rows(%y, @rows) label "out"
}
sequence both { one * drafted; many }
"""


def planned() -> Module:
    return plan_memory(select_kernels(parse_module(TEXT, discover())))


def entries(module: Module) -> tuple[bytes, str]:
    symbols = {node.kernel: node.op.name for _, node in module.nodes()}
    return compile_entries(module, symbols, list(module.weights), host_cpu())


def test_entries_call_kernels_on_fixed_offsets(golden: Callable[[str, str], None]) -> None:
    golden("codegen/entries.tir", entries(planned())[1] + "\n")


def test_entries_are_deterministic() -> None:
    assert entries(planned()) == entries(planned())


def test_sequence_is_its_programs_in_order() -> None:
    module = planned()
    _, text = entries(module)
    body = text[text.index("def both(") :]
    calls = [body.index(f'"{name}"') for name in ("advance", "read_tokens", "embed", "linear")]
    assert calls == sorted(calls)
    assert module.sequences["both"] == Sequence("both", (Call("one", "drafted"), Call("many")))

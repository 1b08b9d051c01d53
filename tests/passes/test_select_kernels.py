"""select_kernels: one name for one machine code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pass_support import ALL_SPECS, Golden, read, stages, write

from memra_compiler.codegen.kernels import kernel_specs
from memra_compiler.passes.select_kernels import select_kernels

BEFORE = """\
module toy
weight $w : q4_0[64, 32] from target "w"
weight $t : f32[64, 32] from target "t"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
program plain_step rows T<=1 {
  %ids : i32[T<=1] = read_tokens(@batch, @state) {chain = False, limit = 1} label "a.ids"
  %x : f32[T<=1, 32] = embed(%ids, $t) {scale = 1.0} label "a.x"
  %y : f32[T<=1, 64] = linear(%x, $w) label "a.y"
}
program verify rows T<=6 from rows {
  %ids : i32[T<=6] = read_tokens(@batch, @state) {chain = False, limit = 6} label "a.ids"
  %x : f32[T<=6, 32] = embed(%ids, $t) {scale = 1.0} label "a.x"
  %y : f32[T<=6, 64] = linear(%x, $w) label "a.y"
  %z : f32[T<=6, 64] = linear(%x, $t) label "a.z"
  %s : f32[T<=6, 32] = embed(%ids, $t) {scale = 2.0} label "a.s"
}
"""


def test_kernels_are_named(golden: Golden) -> None:
    golden("passes/select_kernels.mir", write(select_kernels(read(BEFORE))))


def test_both_steps_run_the_same_machine_code() -> None:
    """The row bound names no kernel: this is half of the first law."""
    module = select_kernels(read(BEFORE))
    plain, verify = (
        [node.kernel for node in module.programs[name].nodes] for name in ("plain_step", "verify")
    )
    assert plain == verify[:3]


def test_format_and_parameters_make_another_kernel() -> None:
    *_, y, z, s = select_kernels(read(BEFORE)).programs["verify"].nodes
    assert len({y.kernel, z.kernel}) == 2
    assert s.kernel != select_kernels(read(BEFORE)).programs["verify"].nodes[1].kernel


@pytest.mark.parametrize("path", ALL_SPECS, ids=lambda p: p.stem)
def test_name_stands_for_one_op_and_types_and_is_an_identifier(path: Path) -> None:
    module = stages(path)["select_kernels"]
    specs = kernel_specs(module)
    identities = set()
    for program, node in module.nodes():
        assert re.fullmatch(r"[A-Za-z]\w*", node.kernel)
        attrs = {k: v for k, v in node.op.attrs().items() if k != "limit"}
        types = [re.sub(r"T<=\d+", "T", str(t)) for t in module.operand_types(program, node)]
        identities.add((node.kernel, node.op.name, str(attrs), str(types)))
    assert len(identities) == len(specs)


@pytest.mark.parametrize("path", ALL_SPECS, ids=lambda p: p.stem)
def test_verify_and_plain_step_of_a_spec_share_every_kernel(path: Path) -> None:
    module = stages(path)["plan_launches"]
    plain, verify = (
        [node.kernel for node in module.programs[name].nodes] for name in ("plain_step", "verify")
    )
    assert plain == verify

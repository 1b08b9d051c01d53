"""plant_faults: broken twins of three programs, and nothing else changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pass_support import TINY, Golden, read, stages, write

from memra_compiler.compile import CompileOptions, load, lower
from memra_compiler.ir.graph import Module
from memra_compiler.passes.plant_faults import FAULTS, faults_of, plant_faults

BEFORE = """\
module toy
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @choice : i32[16] rollback none
plane @verified : f32[16, 64] rollback none
plane @hidden : f32[64] rollback none
plane @ring : i32[32] rollback none
plane @eos : i32[8] rollback none
plane @target.layers.0.k : f32[2, 24, 32] rollback truncate kind swa
plane @target.layers.0.v : f32[2, 24, 32] rollback truncate kind swa
plane @target.layers.1.k : f32[2, 24, 32] rollback truncate kind swa
plane @target.layers.1.v : f32[2, 24, 32] rollback truncate kind swa
plane @target.layers.2.k : f32[1, 64, 64] rollback truncate kind full
plane @target.layers.2.v : f32[1, 64, 64] rollback truncate kind full
program draft rows T<=1 {
  %q : f32[T<=1, 64] = read_row(@hidden) label "drafter.q"
  %ends : i32[T<=1] = positions(@state) {kind = 'committed', limit = 1} label "drafter.ends"
  %a : f32[T<=1, 64] = attention(%q, %ends, @target.layers.1.k, @target.layers.1.v) {scale = 1.0, span = 0} label "drafter.layers.0.attention"
  %b : f32[T<=1, 64] = attention(%a, %ends, @target.layers.2.k, @target.layers.2.v) {scale = 1.0, span = 0} label "drafter.layers.1.attention"
}
program rollback rows T<=1 {
  rollback(@state) {skip = False} label "round.rollback"
}
program commit rows T<=1 {
  commit(@state, @batch, @choice, @verified, @hidden, @ring, @eos) {row_shift = 0} label "round.commit"
}
"""  # noqa: E501


def test_faults_are_planted(golden: Golden) -> None:
    text = write(plant_faults(read(BEFORE)))
    golden("passes/plant_faults.mir", text[text.index("program rollback_fault") :])


def test_programs_of_the_product_are_untouched() -> None:
    before = read(BEFORE)
    after = plant_faults(before)
    assert {n: p for n, p in after.programs.items() if not p.fault} == before.programs


def test_fault_that_changes_nothing_is_left_out() -> None:
    """With one layer of each kind there is no earlier cache to read."""
    lone = BEFORE.replace("target.layers.0", "other.0")
    assert set(faults_of(plant_faults(read(lone)))) == {"skip_rollback", "wrong_carry_row"}


@pytest.fixture(scope="module")
def trimmed(poor_ranks: Path) -> Module:
    """The tiny pair with a trimmed head, which has the most faults."""
    trim = {"drafter.head.trim": f"{{ranks: {poor_ranks}, spare: 8}}"}
    return lower(*load(TINY, CompileOptions(overrides=trim)))


def test_a_whole_head_has_no_map_to_skip() -> None:
    assert set(faults_of(stages(TINY)["plan_launches"])) == set(FAULTS) - {"skip_remap"}


@pytest.mark.parametrize("fault", FAULTS)
def test_trimmed_tiny_has_every_fault(trimmed: Module, fault: str) -> None:
    module = trimmed
    program = faults_of(module)[fault]
    honest = module.programs[program.name.removesuffix(f"_fault_{fault}")]
    changed = [(a, b) for a, b in zip(honest.nodes, program.nodes, strict=True)
               if (a.op, a.inputs) != (b.op, b.inputs)]  # fmt: skip
    assert changed

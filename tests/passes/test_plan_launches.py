"""plan_launches: the sequences of a round, and a broken round for each planted fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pass_support import ALL_SPECS, TINY, Golden, read, stages

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.text import print_module
from memra_compiler.ir.verify import verify
from memra_compiler.passes.plan_launches import plan_launches

PROGRAMS = (
    "prefill plain_step begin begin_plain draft verify accept rollback commit adapt adapt_fresh "
    "again"
)
BEFORE = "module toy\n" + "".join(f"program {p} rows T<=1 {{\n}}\n" for p in PROGRAMS.split())
FAULTY = BEFORE + 'program rollback_fault_skip_rollback rows T<=1 fault "skip_rollback" {\n}\n'


def test_sequences_are_composed(golden: Golden) -> None:
    text = print_module(plan_launches(read(FAULTY)))
    golden("passes/plan_launches.mir", text[text.index("sequence") :])


def test_without_faults_there_is_no_faulty_round() -> None:
    bursts = {"plain_burst", "round_burst"}
    names = {"prefill", "prime", "plain", "round"} | bursts
    assert set(plan_launches(read(BEFORE)).sequences) == names


def test_chain_that_may_be_cut_is_counted_live() -> None:
    planes = (
        "plane @state : i32[64] rollback none\nplane @batch : i32[16] rollback none\n"
        "plane @h : f32[32] rollback none\nplane @c : f32[32] rollback none\n"
    )
    begin = "program begin rows T<=1 {\n"
    node = '  begin(@state, @batch, @h, @c) {plain = False, cuts = True} label "b"\n'
    text = FAULTY.replace("module toy\n", f"module toy\n{planes}").replace(begin, begin + node)
    planned = plan_launches(read(text))
    printed = print_module(planned)
    assert read(printed) == planned
    rounds = [line for line in printed.splitlines() if line.startswith("sequence round")]
    assert len(rounds) == 3
    assert all("begin; draft * at most drafted; verify;" in line for line in rounds), rounds
    assert "*" not in next(line for line in printed.splitlines() if "plain_burst" in line)


def test_missing_program_is_refused_by_the_verifier() -> None:
    module = read(BEFORE)
    programs = {n: p for n, p in module.programs.items() if n != "adapt"}
    planned = plan_launches(replace(module, programs=programs))
    with pytest.raises(IRError, match="sequence round: there is no program adapt"):
        verify(planned)


@pytest.mark.parametrize("path", ALL_SPECS, ids=lambda p: p.stem)
def test_every_program_of_a_spec_is_launched(path: Path) -> None:
    module = stages(path)["plan_launches"]
    called = {call.program for s in module.sequences.values() for call in s.calls}
    assert called == set(module.programs)


def test_faulty_round_differs_in_one_program() -> None:
    sequences = stages(TINY)["plan_launches"].sequences
    faulty = {n: s for n, s in sequences.items() if n.startswith("round_fault_")}
    assert len(faulty) == 3
    for sequence in faulty.values():
        pairs = zip(sequence.calls, sequences["round"].calls, strict=True)
        assert sum(ours != theirs for ours, theirs in pairs) == 1

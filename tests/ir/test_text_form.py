"""The text form: every module prints and parses back, and a bad text is refused by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ir_support import FULL, read

from memra_compiler.compile import CompileOptions, load
from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Module
from memra_compiler.ir.text import parse_type, print_module
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.passes.pipeline import NAMES, run_passes
from memra_compiler.rounds.programs import build_module

SPECS = Path(__file__).parent.parent.parent / "model_specs"


@pytest.mark.parametrize("path", sorted(SPECS.rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_spec_round_trips_after_every_pass(path: Path) -> None:
    module = build_module(*load(path, CompileOptions()))
    stages: list[tuple[str, Module]] = [("build", module)]
    run_passes(module, watch=lambda name, result, _: stages.append((name, result)))
    assert [name for name, _ in stages] == ["build", *NAMES]
    for name, stage in stages:
        assert read(print_module(stage)) == stage, name


def test_every_part_of_the_form_round_trips() -> None:
    module = read(FULL)
    assert print_module(module) == FULL
    assert module.weights["draft.freqs"].made == ("rope_factors", 4)
    assert module.weights["draft.head"].of_rows == 64
    assert module.programs["verify"].nodes[2].label == 'target."norm"'
    assert module.programs["verify"].results == ("logits",)
    assert module.programs["empty"].fault == "planted"
    assert module.arena[""] == 2048


def test_comments_and_blank_lines_are_skipped() -> None:
    text = "# a note\n\n" + FULL.replace("sequence", "  # another\nsequence")
    assert read(text) == read(FULL)


@pytest.mark.parametrize(
    "text", ["f32[]", "i32[7]", "q4_k[T<=8, 256]", "bf16[2, 3, 4] tiles", "q8_0_rows[2, 9, 64]"]
)
def test_type_round_trips(text: str) -> None:
    assert str(parse_type(text)) == text


def test_type_knows_its_bytes() -> None:
    assert TensorType((Sym("T", 8), 256), "q4_k").nbytes == 8 * 144
    assert TensorType((3, 64), "q8_0").row_bytes == 68
    assert TensorType((2, 5, 64), "q8_0_rows").row_bytes == 80  # 64 and 4, in sixteens
    assert TensorType((2, 5, 256), "q8_0_rows").stored_shape == (2, 5, 272)
    assert TensorType((), "f32").nbytes == 4
    assert TensorType((2, Sym("T", 3), 5), "bf16").elements == 30


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("module toy", "modul toy", "expected module, weight, plane, program"),
        ("q8_0[64, 32]", "q9_0[64, 32]", "unknown dtype `q9_0`; known: f32, f16"),
        ("q8_0[64, 32]", "q8_0[64, 48]", "`q8_0` stores blocks of 32, but a row has 48"),
        ('"output_norm.weight"', "output_norm.weight", "does not read as IR text"),
        ("('rope_factors', 4)", "(rope_factors, 4)", "malformed node"),
        ("rollback truncate ring", "rollback forget ring", "rollback `forget` is not one of"),
        ("T<=4 from rows", "T<=many from rows", "invalid literal"),
        ("= embed(", "= embedding(", "unknown op `embedding`; known: accept, adapt_depth, add"),
        ("{scale = 5.656854249492381}", "{factor = 5.6}", "unexpected keyword argument 'factor'"),
        ("{scale = 5.656854249492381}", "{scale = }", "invalid syntax"),
        ('label "target.head"', "", "does not read as IR text"),
        ("arena @state = 0", "arena @state = -1", "does not read as IR text"),
    ],
)
def test_bad_line_is_named(old: str, new: str, message: str) -> None:
    number = FULL[: FULL.index(old)].count("\n") + 1
    with pytest.raises(IRError, match=re.escape(message)) as error:
        read(FULL.replace(old, new, 1))
    assert str(error.value).startswith(f"line {number}: ")


def test_open_program_is_named() -> None:
    with pytest.raises(IRError, match="program verify is not closed"):
        read(FULL[: FULL.index("  %y")])

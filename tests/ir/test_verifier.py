"""The verifier: one broken module for each of its rules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from ir_support import FULL, PLANES, read, toy

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Call, Module, Plane, Sequence
from memra_compiler.ir.types import TensorType
from memra_compiler.ir.verify import open_references, verify

IDS = '%ids : i32[T<=4] = read_tokens(@batch, @state) {limit = 4} label "a.ids"\n'
X = '%x : f32[T<=4, 32] = embed(%ids, $w) {scale = 1.0} label "a.x"\n'


def refuse(module: Module, message: str) -> None:
    with pytest.raises(IRError, match=re.escape(message)):
        verify(module)


def test_sound_module_passes() -> None:
    verify(read(FULL))
    verify(toy(IDS + X))


TRIMMED = """\
module toy
weight $table : q8_0[4096, 32] from target "t"
weight $head : q8_0[64, 32] from draft "h" of 4096 rows
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @forced : i32[65] rollback none
plane @used : i32[1] rollback none
plane @head_ids : i32[64] rollback none
plane @row : f32[32] rollback none
program draft rows T<=1 {
  %x : f32[T<=1, 32] = read_row(@row) label "d.x"
  %y : f32[T<=1, 64] = linear(%x, $head) label "d.head"
  %z : f32[T<=1, 64] = softcap(%y) {cap = 30.0} label "d.softcap"
  %row : head_row[T<=1] = best_row(%z, @used) label "d.row"
  %id : i32[T<=1] = token_of_row(%row, @head_ids) {skip = False} label "d.id"
  %e : f32[T<=1, 32] = embed(%id, $table) {scale = 1.0} label "d.embed"
  draft_token(%id, @state, @forced, @batch) label "d.draft"
}
"""


def test_a_trimmed_head_and_its_map_are_sound() -> None:
    verify(read(TRIMMED))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("draft_token(%id", "draft_token(%row", "the choice must be i32, got head_row[T<=1]"),
        ("embed(%id", "embed(%row", "ids must be i32[T], got head_row[T<=1]"),
        (
            'token_of_row(%row, @head_ids) {skip = False} label "d.id"',
            'argmax(%z) {suppress = ()} label "d.id"',
            "d.id (argmax): makes token ids of the logits of a trimmed head",
        ),
        (
            "token_of_row(%row, @head_ids)",
            "token_of_row(%id0, @head_ids)",
            "rows must be those of a trimmed head, got i32[T<=1]",
        ),
    ],
)
def test_a_row_of_a_trimmed_head_is_no_token_id(right: str, wrong: str, message: str) -> None:
    assert right in TRIMMED
    text = TRIMMED.replace(right, wrong)
    if "%id0" in wrong:
        text = text.replace(
            "  %row :",
            '  %id0 : i32[T<=1] = read_tokens(@batch, @state) {chain = True} label "d.t"\n  %row :',
        )
    refuse(read(text), message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('%y : f32[T<=4, 32] = add(%x) label "a.y"', "a.y (add): takes 2 operands, got 1"),
        ('%y : f32[T<=4, 32] = add(%x, %x, %x) label "a.y"', "takes 2 operands, got 3"),
        ('%y : f32[T<=4, 32] = rmsnorm() label "a.y"', "takes 2 operands, got 0"),
        (
            '%y : f32[T<=4, 32] = linear(%x, %x) label "a.y"',
            "operand `w` must be a $ operand, got %x",
        ),
        (
            '%y : f32[T<=4, 32] = add(%x, @rows) label "a.y"',
            "operand `y` must be a % operand, got @rows",
        ),
        (
            '%y : f32[T<=4, 32] = add(%x, %z) label "a.y"\n'
            '%z : f32[T<=4, 32] = add(%x, %x) label "a.z"',
            "a.y (add): %z is used before it is defined",
        ),
        ('%y : f32[T<=4, 32] = linear(%x, $m) label "a.y"', "`$m` is not defined"),
        ('write_rows(%x, @none) label "a.y"', "`@none` is not defined"),
        (
            '%y : f32[T<=4, 32] = linear(%y0, $w) label "a.y"',
            "program p: `%y0` is not defined",
        ),
        (
            '%y : f32[T<=4, 32] = rmsnorm(%x, $w) {eps = 1e-6, size = 0} label "a.y"',
            "rmsnorm: weight f32[32, 32] does not fit 32 columns",
        ),
        (
            '%y : f32[T<=4, 16] = add(%x, %x) label "a.y"',
            "outputs are f32[T<=4, 32], stated f32[T<=4, 16]",
        ),
        ('%x : f32[T<=4, 32] = add(%x, %x) label "a.y"', "%x is defined twice"),
        (
            '%y : i32[T<=3] = positions(@state) {kind = "rows", limit = 3} label "a.y"',
            "%y has rows T<=3, its program T<=4",
        ),
    ],
)  # fmt: skip
def test_broken_node_is_refused(line: str, message: str) -> None:
    refuse(toy(IDS + X + line), message)


def test_variadic_op_takes_more_operands_of_its_last_kind() -> None:
    rows = 'rmsnorm_add(%x, %x, $n, $one) {eps = 1e-6} label "a.y"'
    weight = 'weight $one : f32[1] from target "one"'
    verify(toy(f"{IDS}{X}%y : f32[T<=4, 32] = {rows}", weights=weight))
    refuse(toy(f"{IDS}{X}%y : f32[T<=4, 32] = {rows.replace('$one', '%x')}", weights=weight),
           "operand `weight` must be a $ operand, got %x")  # fmt: skip


def test_untyped_output_is_refused() -> None:
    module = toy(IDS + X)
    program = module.programs["p"]
    values = {"ids": program.values["ids"]}
    refuse(module.with_programs(lambda p: replace(p, values=values)), "a.x (embed): %x has no type")


def test_rows_must_be_bounded() -> None:
    refuse(read(PLANES + "program p rows 4 {\n}\n"), "program p: rows must be a bounded symbol")


def test_rows_must_come_from_a_counter() -> None:
    text = PLANES + "program p rows T<=4 from guesses {\n}\n"
    refuse(read(text), "program p: `guesses` is not a counter")


def test_result_must_be_defined() -> None:
    text = PLANES + "program p rows T<=4 results %y {\n}\n"
    refuse(read(text), "program p: result %y is never defined")


def test_sequence_must_call_known_programs() -> None:
    module = replace(toy(IDS), sequences={"s": Sequence("s", (Call("p"), Call("q")))})
    refuse(module, "sequence s: there is no program q")


def test_sequence_must_repeat_by_a_counter() -> None:
    module = replace(toy(IDS), sequences={"s": Sequence("s", (Call("p", "often"),))})
    refuse(module, "sequence s: `often` is not a counter")


def test_sequence_must_loop_by_a_counter() -> None:
    module = replace(toy(IDS), sequences={"s": Sequence("s", (Call("p"),), "forever")})
    refuse(module, "sequence s: `forever` is not a counter")


def test_plane_must_have_a_known_rollback() -> None:
    with pytest.raises(IRError, match="plane @k: rollback `undo` is not one of truncate, none"):
        Plane("k", TensorType((4,)), "undo")


def test_open_reference_is_no_error_but_is_listed() -> None:
    line = '%y : f32[T<=4, 32] = linear(%x, ?later) label "a.y"'
    module = toy(IDS + X + line)
    verify(module)
    assert open_references(module) == ["program p, a.y: ?later"]


def test_all_problems_are_reported_and_the_pass_is_blamed() -> None:
    module = toy(
        IDS + '%y : i32[T<=4] = add(%z, %ids) label "one"\nwrite_rows(%q, @no) label "two"'
    )
    with pytest.raises(IRError) as error:
        verify(module, after="fuse")
    lines = str(error.value).splitlines()
    assert lines[0] == "module toy is broken after pass `fuse`:"
    assert any("one (add)" in line for line in lines)
    assert any("two (write_rows)" in line for line in lines)

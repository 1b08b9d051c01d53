"""assign_numeric_class: every node says what decides the bits of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pass_support import ALL_SPECS, Golden, read, stages, write

from memra_compiler.passes.assign_numeric_class import assign_numeric_class

BEFORE = """\
module toy
weight $w : q4_0[64, 32] from target "w"
plane @state : i32[64] rollback none
plane @x : f32[32] rollback none
program p rows T<=1 {
  %at : i32[T<=1] = positions(@state) {kind = 'rows', limit = 1} label "a.at"
  %x : f32[T<=1, 32] = read_row(@x) label "a.x"
  %y : f32[T<=1, 64] = linear(%x, $w) label "a.y" at "toy.yaml":3:1
}
"""


def test_classes_are_stated(golden: Golden) -> None:
    golden("passes/assign_numeric_class.mir", write(assign_numeric_class(read(BEFORE))))


def test_class_follows_the_storage_format() -> None:
    stated = {
        assign_numeric_class(read(BEFORE.replace("q4_0", f))).programs["p"].nodes[2].numeric_class
        for f in ("q4_0", "q8_0", "f16", "f32")
    }
    assert len(stated) == 4


def test_class_does_not_follow_the_number_of_rows() -> None:
    wide = BEFORE.replace("T<=1", "T<=8").replace("limit = 1", "limit = 8")
    wide = wide.replace("read_row(@x)", "embed(%at, $t) {scale = 1.0}")
    wide = wide.replace("plane @state", 'weight $t : f32[8, 32] from target "t"\nplane @state')
    narrow, wider = (assign_numeric_class(read(t)).programs["p"].nodes[2] for t in (BEFORE, wide))
    assert narrow.numeric_class == wider.numeric_class


@pytest.mark.parametrize("path", ALL_SPECS, ids=lambda p: p.stem)
def test_every_node_of_a_spec_has_a_class(path: Path) -> None:
    assert all(node.numeric_class for _, node in stages(path)["assign_numeric_class"].nodes())

"""fuse: what rounds rows for a matrix goes into whatever made them, in either format."""

from __future__ import annotations

import numpy as np
import pytest
from test_fuse import outcome, toy

from memra_compiler.ops.quantise import ROUNDINGS
from memra_compiler.passes.fuse import fuse

NODES = """\
  %s : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "l.0.s"
  %sq : TO[T<=3, 64] = quantise(%s) {to = 'TO'} label "l.0.s.in"
  %q : f32[T<=3, 64] = linear(%sq, $a) label "l.0.q"
  %heads : f32[T<=3, 64] = attention(%q, %at, @k, @v) {scale = 1.0, span = 0, to = 'f32'} label "l.0.h"
  %hq : TO[T<=3, 64] = quantise(%heads) {to = 'TO'} label "l.0.h.in"
  %o : f32[T<=3, 64] = linear(%hq, $a) label "l.0.o"
  %n : f32[T<=3, 64] = rmsnorm(%o, $norm) {eps = 1e-06, size = 0} label "l.0.post"
  %u : f32[T<=3, 64] = add(%x, %n) label "l.0.add"
  %m : f32[T<=3, 64] = rmsnorm(%u, $norm) {eps = 1e-06, size = 0} label "l.0.pre"
  %mq : TO[T<=3, 64] = quantise(%m) {to = 'TO'} label "l.0.pre.in"
  %y : f32[T<=3, 32] = linear(%mq, $b) label "l.0.y"
"""  # noqa: E501


@pytest.mark.parametrize("to", ROUNDINGS)
def test_rounding_joins_its_maker(to: str) -> None:
    module = toy(NODES.replace("TO", to), "u", "y")
    fused = fuse(module)
    found = [(node.op.name, node.op.attrs().get("to")) for node in fused.programs["p"].nodes[3:]]
    assert found == [
        ("rmsnorm_quantise", to),
        ("linear", None),
        ("attention", to),
        ("linear", None),
        ("rmsnorm_add_quantise", to),
        ("linear", None),
    ]
    for got, want in zip(outcome(fused, ("u", "y")), outcome(module, ("u", "y")), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("to", ROUNDINGS)
def test_rows_that_others_read_are_rounded_apart(to: str) -> None:
    module = toy(NODES.replace("TO", to), "s", "heads", "m", "y")
    names = [node.op.name for node in fuse(module).programs["p"].nodes]
    assert names.count("quantise") == 3

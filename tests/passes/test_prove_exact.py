"""prove_exact: refuses whatever could make a verified row differ from a plain step's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pass_support import ALL_SPECS, read, stages

from memra_compiler.ir.graph import Module
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import REGISTRY, Op, Operand, op
from memra_compiler.passes.assign_numeric_class import assign_numeric_class
from memra_compiler.passes.prove_exact import prove_exact
from memra_runtime.errors import MemraError

NODES = """\
  %ids : i32[T<=LIMIT] = read_tokens(@batch, @state) {chain = False, limit = LIMIT} label "target.tokens"
  %x : f32[T<=LIMIT, 32] = embed(%ids, $w) {scale = 1.0} label "target.embed"
  %y : f32[T<=LIMIT, 32] = rmsnorm(%x) {eps = 1e-06, size = 0} label "target.layers.0.norm" at "toy.yaml":4:5
  %z : f32[T<=LIMIT, 32] = linear(%y, $w) label "target.layers.0.o" at "toy.yaml":6:5
"""  # noqa: E501
HEAD = """\
module toy
weight $w : f32[32, 32] from target "w"
weight $w2 : f16[32, 32] from target "w2"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
"""


def pair(verify: str, plain: str) -> Module:
    """A module of the two programs, with classes assigned."""
    programs = (("verify", " from rows", verify, 6), ("plain_step", "", plain, 1))
    text = HEAD + "".join(
        f"program {name} rows T<={limit}{rows} {{\n{nodes.replace('LIMIT', str(limit))}}}\n"
        for name, rows, nodes, limit in programs
    )
    return assign_numeric_class(read(text))


def refuse(module: Module) -> str:
    with pytest.raises(MemraError) as error:
        prove_exact(module)
    return str(error.value)


def test_equal_programs_pass_unchanged() -> None:
    module = pair(NODES, NODES)
    assert prove_exact(module) is module


def test_class_that_differs_is_refused_with_layer_op_and_both_classes() -> None:
    module = pair(NODES, NODES)
    plain = module.programs["plain_step"]
    *rest, last = plain.nodes
    other = replace(last, numeric_class="f16 x f32->f32, split of 4")
    programs = {**module.programs, "plain_step": replace(plain, nodes=(*rest, other))}
    assert refuse(replace(module, programs=programs)) == (
        "error[inexact]: speculation could change the text: in `target.layers.0.o`, op `linear`, "
        "the two steps compute it in different numeric classes\n"
        "  --> toy.yaml:6:5\n"
        "note: verify: linear, class `f32 x f32->f32, fma over 2 steps of 16 lanes, tree of 16`\n"
        "note: plain step: linear, class `f16 x f32->f32, split of 4`\n"
        "hint: give both programs the same row-independent op"
    )


def test_weight_in_another_format_is_refused() -> None:
    error = refuse(pair(NODES, NODES.replace("linear(%y, $w)", "linear(%y, $w2)")))
    assert "f32 x f32->f32" in error
    assert "f32 x f16->f32" in error


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rmsnorm(%x) {eps = 1e-06, size = 0}", "rmsnorm(%x) {eps = 1e-05, size = 0}"),
        ("linear(%y, $w)", "linear(%x, $w)"),
        ("rmsnorm(%x) {eps = 1e-06, size = 0}", "add(%x, %x)"),
    ],
)
def test_different_mathematics_is_refused(old: str, new: str) -> None:
    error = refuse(pair(NODES, NODES.replace(old, new)))
    assert "target.layers.0" in error
    assert "do not compute the same thing" in error or "different numeric classes" in error


def test_different_op_of_one_class_is_refused() -> None:
    scale = NODES.replace("rmsnorm(%x) {eps = 1e-06, size = 0}", "add(%x, %x)")
    module = pair(scale, NODES)
    same = module.programs["verify"].nodes[2].numeric_class
    plain = module.programs["plain_step"]
    nodes = tuple(
        replace(node, numeric_class=same) if node.op.name == "rmsnorm" else node
        for node in plain.nodes
    )
    programs = {**module.programs, "plain_step": replace(plain, nodes=nodes)}
    error = refuse(replace(module, programs=programs))
    assert "in `target.layers.0.norm`, op `add`, the two steps do not compute the same" in error
    assert "plain step: rmsnorm" in error


def test_missing_step_is_refused() -> None:
    short = "\n".join(NODES.splitlines()[:3]) + "\n"
    assert "verify has 4 steps, the plain step has 3" in refuse(pair(NODES, short))


def test_every_difference_is_reported_at_once() -> None:
    worse = NODES.replace("1e-06", "1e-05").replace("linear(%y, $w)", "linear(%y, $w2)")
    assert refuse(pair(NODES, worse)).count("error[inexact]") == 2


@pytest.fixture
def mixing_op() -> Iterator[None]:
    """An op of this test alone, whose rows depend on each other."""

    @op("test_mix_rows")
    @dataclass(frozen=True)
    class MixRows(Op):
        """Subtract the mean over the rows."""

        operands = (Operand("x"),)
        rows_independent = False

        def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
            return types

        def numeric_class(self, *types: TensorType) -> str:
            return "f32 mean over rows"

    yield
    del REGISTRY[MixRows.name]


@pytest.mark.usefixtures("mixing_op")
def test_op_whose_rows_depend_on_each_other_is_refused() -> None:
    mixed = NODES.replace("rmsnorm(%x) {eps = 1e-06, size = 0}", "test_mix_rows(%x)")
    error = refuse(pair(mixed, mixed))
    assert error == (
        "error[inexact]: speculation could change the text: in `target.layers.0.norm`, op "
        "`test_mix_rows`, its rows depend on each other, so a row's bits depend on how many "
        "there are\n"
        "  --> toy.yaml:4:5\n"
        "note: verify: test_mix_rows, class `f32 mean over rows`\n"
        "note: plain step: test_mix_rows, class `f32 mean over rows`\n"
        "hint: give both programs the same row-independent op"
    )


@pytest.mark.parametrize("path", ALL_SPECS, ids=lambda p: p.stem)
def test_every_spec_is_proved(path: Path) -> None:
    module = stages(path)["assign_numeric_class"]
    assert prove_exact(module) is module

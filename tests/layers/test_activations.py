"""Activations: what `auto` stands for, and which rows meet which matrix in a built module."""

from __future__ import annotations

from pathlib import Path

import pytest

from memra_compiler.compile import CompileOptions, load
from memra_compiler.ir.graph import Module
from memra_compiler.ir.types import TensorType
from memra_compiler.layers.build import rows_for
from memra_compiler.ops.formats import WEIGHT_FORMATS
from memra_compiler.ops.linear import PRODUCTS
from memra_compiler.rounds.programs import build_module

TINY = Path(__file__).parent.parent.parent / "model_specs" / "tiny" / "gemma4_tiny.yaml"
FLOATS = Path(__file__).parent.parent / "data"


def built(activations: str, target: str, *, floats: bool = False) -> Module:
    """The tiny spec as built, on its q8_0 files or on the bf16 ones."""
    overrides = {"runtime.activations": activations}
    files = {"weights": FLOATS / "gemma4-tiny", "draft": FLOATS / "gemma4-tiny-assistant"}
    options = CompileOptions(target=target, overrides=overrides, **files if floats else {})
    return build_module(*load(TINY, options), target)


def rows(module: Module) -> set[tuple[str, str]]:
    """Formats of rows and matrix of every product."""
    return {
        (module.type_of(program, node.inputs[0]).dtype, module.type_of(program, weight).dtype)
        for program, node in module.nodes()
        if isinstance(node.op, PRODUCTS)
        for weight in node.inputs[1:]
    }


@pytest.mark.parametrize(
    ("activations", "target", "quantised", "half"),
    [
        ("auto", "cpu", "f32", "f32"),
        ("auto", "cuda:sm_90a", "a8", "bf16"),
        ("f32", "cuda:sm_90a", "f32", "f32"),
        ("int8", "cpu", "a8", "bf16"),
        ("bf16", "cpu", "bf16", "bf16"),
        ("bf16", "cuda:sm_80", "bf16", "bf16"),
    ],
)
def test_rows_follow_the_storage_of_their_matrix(
    activations: str, target: str, quantised: str, half: str
) -> None:
    assert rows(built(activations, target)) == {(quantised, "q8_0")}
    assert rows(built(activations, target, floats=True)) == {(half, "bf16")}


def test_prompts_are_wide_on_every_gpu() -> None:
    wide = {
        (activations, target): built(activations, target).programs["prefill"].rows.bound
        for activations in ("auto", "bf16", "f32")
        for target in ("cpu", "cuda:sm_90a")
    }
    assert {key for key, bound in wide.items() if bound == 64} == {
        ("auto", "cuda:sm_90a"),
        ("bf16", "cuda:sm_90a"),
        ("f32", "cuda:sm_90a"),
    }


@pytest.mark.parametrize("activations", ["f32", "bf16", "int8"])
def test_rows_of_f32_matrices_and_of_broken_pieces_stay_f32(activations: str) -> None:
    assert rows_for(activations, TensorType((64, 128), "f32")) == "f32"
    for format in WEIGHT_FORMATS[:5]:  # those that store 96 inputs
        assert rows_for(activations, TensorType((64, 96), format)) == "f32"

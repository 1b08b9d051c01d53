"""The launch that ends a half of a layer, run on the CPU: one or two branches, and norms of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from templates_on_cpu import TemplatesOnCpu

from cpp_on_cpu import compiler
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_layouts import a8_reference
from memra_compiler.ops.quantise import RMSNormAddQuantise
from memra_compiler.ops.residual import BranchNorms, ResidualNorms

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

SPLITS, TILE = 3, 8


def planes(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Partial planes of whole tiles of rows that add up to `value`; rows past the last are NaN."""
    parts = rng.standard_normal((SPLITS, TILE, value.shape[1])).astype(np.float32)
    parts[:, len(value) :] = np.nan
    parts[-1, : len(value)] = value - parts[:-1, : len(value)].sum(axis=0)
    return parts


@pytest.mark.parametrize(
    ("size", "branches", "to"),
    [
        (64, 1, ("a8",)),
        (3200, 1, ("a8", "f32", "a8")),  # two vectors a thread
        (64, 2, ()),
        (3200, 2, ("f32", "a8")),  # too many weights to hold
        (64, 2, ("a8",)),
    ],
)
def test_launch_agrees_with_the_reference(
    size: int, branches: int, to: tuple[str, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(size)
    rows, x = 3, TensorType((Sym("T", 5), size))
    split = replace(x, layout=f"planes{SPLITS}")
    factors = tuple(0.125 if kind == "f32" else 1.0 for kind in to)
    one = RMSNormAddQuantise() if branches == 1 and to == ("a8",) else None
    op = one or (ResidualNorms, BranchNorms)[branches - 1](1e-6, to, factors)
    weight, scale = TensorType((size,), "f32"), TensorType((1,))
    count = 2 * branches - 1 + len(to)
    types = (x, *(split,) * branches, *(weight,) * count, scale)
    outputs = op.infer(*(t.in_rows for t in types))

    values = [rng.standard_normal((rows, size)).astype(np.float32) for _ in range(1 + branches)]
    given = [values[0], *(planes(v, rng) for v in values[1:])]
    weights = [rng.standard_normal(size).astype(np.float32) for _ in range(count)]
    weights.append(np.array([0.7], np.float32))
    made = [
        np.full((5, size), np.nan, np.float32)
        if kind == "f32"
        else np.full(a8_reference(np.zeros((5, size), np.float32)).nbytes, 0xB3, np.uint8)
        for kind in ("f32", *to)
    ]
    launches = op.lower_cuda(ARCHS["sm_90a"], *types, *outputs)
    TemplatesOnCpu(launches, tmp_path)(rows, *given, *weights, *made)

    sums = [values[0], *(g[:, :rows].sum(axis=0) for g in given[1:])]
    exact = op.reference(rows, *(v.astype(np.float64) for v in [*sums, *weights]))
    plain = ResidualNorms if branches == 1 else BranchNorms
    floats = plain(1e-6, ("f32",) * len(to), factors)
    norms = floats.reference(rows, *(v.astype(np.float64) for v in [*sums, *weights]))
    for kind, got, want, norm in zip(("f32", *to), made, exact, norms, strict=True):
        if kind == "f32":
            np.testing.assert_allclose(got[:rows], want, rtol=0, atol=1e-5 * np.abs(want).max())
            assert np.isnan(got[rows:]).all()
        else:
            check_tiles(got, norm.astype(np.float32))


def check_tiles(got: np.ndarray, norm: np.ndarray) -> None:
    """Bytes of a8 tiles: those of rows nearly equal; a value between two integers may take either.

    Rows that nobody asked for are zero.
    """
    padded = np.zeros((TILE, norm.shape[1]), np.float32)
    padded[: len(norm)] = norm
    want = a8_reference(padded)
    values = norm.shape[1] // 64 * 512
    steps = got[:values].view(np.int8).astype(int) - want.view(np.uint8)[:values].view(np.int8)
    assert np.abs(steps).max() <= 1
    assert (steps != 0).mean() < 1e-3
    scales, wanted = (
        tiles.view(np.uint8)[values:].view(np.float32).reshape(-1, 4)[:, :2]
        for tiles in (got, want)
    )
    np.testing.assert_allclose(scales, wanted, rtol=1e-5)

"""A NaN or an infinity is never lost on the way to the choice of a token, where it ends a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_every_op import CompiledOp, as_float

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.base import Op
from memra_compiler.ops.cuda_layouts import a8_quantise, bf16_round
from memra_compiler.ops.formats import random_bytes
from memra_compiler.ops.linear import Linear
from memra_compiler.ops.quantise import (
    ROUNDINGS,
    Quantise,
    quantise_reference,
    round_reference,
    unpack,
)
from memra_compiler.ops.top_experts import TopExperts

BAD = (np.nan, -np.nan, np.inf, -np.inf)
X, Q = TensorType((4, 96)), TensorType((4, 96), "a8")


def compiled(op: Op, types: tuple[TensorType, ...], folder: Path) -> CompiledOp:
    """A kernel in a folder of its own: a library is loaded once a path."""
    (folder / op.name).mkdir()
    return CompiledOp(op, types, folder / op.name)


def rows(bad: float) -> np.ndarray:
    """Four rows, of which the first and the third have one bad value."""
    x = np.random.default_rng(11).standard_normal((4, 96)).astype(np.float32)
    x[0, 0] = x[2, 77] = bad
    x[1, :32] = 0
    return x


def expected(bad: float) -> np.ndarray:
    """Which values are NaN: those of the bad blocks."""
    bad_values = np.zeros((4, 96), bool)
    bad_values[0, :32] = bad_values[2, 64:] = True
    return bad_values


@pytest.mark.parametrize("bad", BAD)
def test_bad_block_is_nan_and_others_are_as_ever(bad: float, tmp_path: Path) -> None:
    x = rows(bad)
    quantise = compiled(Quantise(), (X,), tmp_path)
    (data,) = quantise(4, x)
    got, meaning = unpack(data[:4], Q), quantise_reference(x)
    q, d = a8_quantise(x)
    cuda = q * np.repeat(d.astype(np.float64), 32, axis=1)
    for values in (got, meaning, cuda):
        assert (np.isnan(values) == expected(bad)).all()
    np.testing.assert_array_equal(got, cuda)
    np.testing.assert_array_equal(meaning, cuda)
    finite = np.where(expected(bad), 0, x)
    (plain,) = quantise(4, finite)
    same = ~expected(bad).reshape(4, 3, 32).all(axis=2)
    assert (data[:4].reshape(4, 3, 36)[same] == plain[:4].reshape(4, 3, 36)[same]).all()


@pytest.mark.parametrize("bad", [*BAD, np.uint32(0xFFFFFFFF).view(np.float32), 3.4e38])
def test_bf16_keeps_what_is_not_finite(bad: float, tmp_path: Path) -> None:
    """NaN with every payload, and infinities; what is beyond the largest bf16 becomes one."""
    x = rows(bad)
    (data,) = compiled(Quantise("bf16"), (X,), tmp_path)(4, x)
    got = as_float(data[:4], "bf16")
    np.testing.assert_array_equal(got, round_reference(x, "bf16"))
    np.testing.assert_array_equal(got, bf16_round(x).astype(np.float64))
    assert not np.isfinite(got[[0, 2], [0, 77]]).any()
    assert np.isnan(got[0, 0]) == np.isnan(bad)
    assert np.isfinite(got).sum() == 4 * 96 - 2


@pytest.mark.parametrize("to", ROUNDINGS)
@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_row_chooses_no_token(bad: float, format: str, to: str, tmp_path: Path) -> None:
    """quantise, linear, argmax: -1 for the bad rows, a token for the others."""
    w = TensorType((64, 96), format)
    (data,) = compiled(Quantise(to), (X,), tmp_path)(4, rows(bad))
    weights = random_bytes(w, np.random.default_rng(5))
    (logits,) = compiled(Linear(), (replace(Q, dtype=to), w), tmp_path)(4, data, weights)
    assert (~np.isfinite(logits[:4]).any(axis=1) == [True, False, True, False]).all()
    (choice,) = compiled(ArgMax(), (TensorType((4, 64)),), tmp_path)(4, logits)
    assert ((choice[:4] == -1) == [True, False, True, False]).all()


@pytest.mark.parametrize("bad", BAD)
def test_bad_row_has_no_shares_and_experts_that_exist(bad: float, tmp_path: Path) -> None:
    x, scale = rows(bad), np.ones(96, np.float32)
    x[2] = bad
    op = TopExperts(5)
    got = compiled(op, (X, TensorType((96,))), tmp_path)(4, x, scale)
    for (experts, shares), kind in ((got, "kernel"), (op.reference(4, x, scale), "reference")):
        assert (experts[[0, 2]] == np.arange(5)).all(), kind
        assert np.isnan(shares[[0, 2]]).all(), kind
        np.testing.assert_allclose(shares[[1, 3]].sum(axis=1), 1, rtol=1e-6)

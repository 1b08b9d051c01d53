"""Kernels that read weights as the file stores them, as NVRTC compiles them, run on the CPU.

Every format in every such kernel: rows of a table, products of few rows, products of prompts. The
text of a kernel may be right and its PTX wrong, which no test of the text can see.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ptx_on_cpu import OnCpu
from te_samples import rows

from cpp_on_cpu import compiler
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op
from memra_compiler.ops.cuda import ARCHS, CudaArch
from memra_compiler.ops.cuda_layouts import (
    a8_quantise,
    a8_reference,
    bf16_reference,
    bf16_round,
)
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.cuda_wide import wide_launches
from memra_compiler.ops.embed import Embed
from memra_compiler.ops.formats import dequantise, random_bytes
from memra_compiler.ops.linear import GatedLinear, Linear

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

HOPPER = ARCHS["sm_90a"]
#: One block of 256 inputs, which compilers see through, and several.
CASES = [(f, 256) for f in FORMATS] + [(f, 768) for f in FORMATS if FORMATS[f].unit_pieces > 1]
#: Errors of sums, over the largest.
TOLERANCE = 3e-6


def run(
    op: Op,
    folder: Path,
    x: Array,
    weights: list[TensorType],
    bound: int,
    arch: CudaArch = HOPPER,
) -> tuple[Array, Array]:
    """What the kernels of `op` make of rows `x` and random weights, and what the op means."""
    rng = np.random.default_rng(4)
    stored = [random_bytes(w, rng) for w in weights]
    values = [dequantise(data, w) for data, w in zip(stored, weights, strict=True)]
    (wanted,) = op.reference(len(x), x if x.dtype == np.int32 else x.astype(float), *values)
    type = rows(bound, *x.shape[1:], dtype="i32" if x.dtype == np.int32 else "f32")
    launches = op.lower_cuda(arch, type, *weights, rows(bound, wanted.shape[1]))
    given = np.zeros((bound, *x.shape[1:]), x.dtype)
    given[: len(x)] = x
    out = np.full((bound, wanted.shape[1]), np.nan, np.float32)
    OnCpu(launches, arch, folder)(len(x), [given, *stored, out])
    assert np.isnan(out[len(x) :]).all(), "rows past T were written"
    return out[: len(x)], wanted


@pytest.mark.parametrize(("format", "inputs"), CASES)
def test_rows_of_a_table(format: str, inputs: int, tmp_path: Path) -> None:
    ids = np.array([6, 0, 3, -2, 9], np.int32)
    got, wanted = run(Embed(2.5), tmp_path, ids, [TensorType((7, inputs), format, "plain")], 6)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


@pytest.mark.parametrize(("format", "inputs"), CASES)
def test_products_of_few_rows(format: str, inputs: int, tmp_path: Path) -> None:
    x = np.random.default_rng(5).standard_normal((3, inputs)).astype(np.float32)
    got, wanted = run(Linear(), tmp_path, x, [TensorType((12, inputs), format, "plain")], 8)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize(("format", "inputs"), CASES)
def test_products_of_prompts(format: str, inputs: int, tmp_path: Path) -> None:
    x = np.random.default_rng(6).standard_normal((18, inputs)).astype(np.float32)
    got, wanted = run(Linear(), tmp_path, x, [TensorType((36, inputs), format, "plain")], 20)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_gated_products_of_prompts(arch: str, tmp_path: Path) -> None:
    x = np.random.default_rng(7).standard_normal((18, 256)).astype(np.float32) / 16
    weights = [TensorType((32, 256), format, "plain") for format in ("q6_k", "q4_k")]
    got, wanted = run(GatedLinear("gelu_tanh"), tmp_path, x, weights, 20, ARCHS[arch])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize(("kind", "format"), [("a8", "q4_k"), ("bf16", "f32"), ("a8", "bf16")])
def test_prompts_with_a_matrix_that_does_not_tile(kind: str, format: str, tmp_path: Path) -> None:
    """All 64 rows of a launch, or fewer; rows rounded to int8 or bf16 lie as fragments."""
    x = np.random.default_rng(8).standard_normal((64, 256)).astype(np.float32)
    weight = TensorType((12, 256), format)
    stored = random_bytes(weight, np.random.default_rng(9))
    if kind == "a8":
        q, d = a8_quantise(x)
        fragments, values = a8_reference(x), q * np.repeat(d.astype(float), 32, axis=1)
    else:
        fragments, values = bf16_reference(x), bf16_round(x).astype(float)
    wanted = values @ dequantise(stored, weight).T
    launches = wide_launches(HOPPER, TensorType((64, 256), kind), [weight], ())
    kernels = OnCpu(launches, HOPPER, tmp_path)
    for count in (64, 33):
        out = np.full((64, 12), np.nan, np.float32)
        kernels(count, [fragments, stored, out])
        limit = TOLERANCE * np.abs(wanted).max()
        np.testing.assert_allclose(out[:count], wanted[:count], rtol=0, atol=limit)
        assert np.isnan(out[count:]).all(), "rows past T were written"

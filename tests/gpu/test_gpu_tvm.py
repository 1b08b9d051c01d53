"""Every kernel that TVM schedules, on a GPU, against the op's NumPy reference.

Each goes through `lower_cuda`, as in an artifact. What is checked is what `kernel_cases.py` lists:
values, bounds, planes, and that a row's bits depend on no other row and not on their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import (
    COUNTS,
    POISON,
    STORAGE,
    Array,
    Case,
    check_cases,
    close,
    normal,
    rows_of,
    run,
    split_planes,
    weight,
)

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import Add, Concat, Scale, SoftCap
from memra_compiler.ops.base import Op
from memra_compiler.ops.cuda import Scheduled
from memra_compiler.ops.formats import dequantise, random_bytes
from memra_compiler.ops.linear import GatedLinear, Linear
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.rope import Rope, RopeAngles
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import exp, te

pytestmark = pytest.mark.gpu


def check(
    gpu: Gpu,
    op: Op,
    types: Sequence[TensorType],
    given: list[Array],
    *,
    planes: tuple[int, ...] = (),
    splits: int = 1,
    by_row: tuple[int, ...] = (0,),
    rule: str,
    tolerance: float | None = None,
) -> None:
    """Run a case at several row counts; `planes` says which operands are split."""
    laid_out = [
        dataclasses.replace(t, layout=f"planes{splits}") if i in planes and splits > 1 else t
        for i, t in enumerate(types)
    ]
    launches = op.lower_cuda(ARCH, *laid_out)
    assert all(isinstance(one, Scheduled) and one.rule == rule for one in launches), launches
    case = Case(op, tuple(types), launches, given, planes, splits, tolerance=tolerance,
                by_row=by_row)  # fmt: skip
    check_cases(gpu, [case], COUNTS[case.bound])


#: Widths that fill warps, and some that do not: bound, width, splits, weight type.
SIZES = [(8, 5376, 1, "f32"), (8, 5376, 4, "bf16"), (16, 3840, 2, "f32"), (6, 64, 3, "f16"),
         (3, 320, 1, "f32"), (3, 1040, 2, "bf16"), (3, 2880, 1, "f16"), (1, 16, 1, "f32"),
         (3, 4112, 1, "f32")]  # fmt: skip


@pytest.mark.parametrize(("bound", "size", "splits", "dtype"), SIZES)
def test_norms(gpu: Gpu, bound: int, size: int, splits: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    x, w = rows_of(bound, size), TensorType((size,), dtype)
    rows = split_planes(normal(rng, bound, size) * 3, splits, rng)
    check(gpu, RMSNorm(), (x, w, x), [rows, weight(rng, size, dtype)], planes=(0,), splits=splits,
          rule="row_reduction")  # fmt: skip
    check(gpu, RMSNorm(), (x, x), [rows], planes=(0,), splits=splits, rule="row_reduction")


@pytest.mark.parametrize(("bound", "size", "splits", "dtype"), SIZES)
def test_element_wise(gpu: Gpu, bound: int, size: int, splits: int, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, one = rows_of(bound, size), TensorType((1,), dtype)
    rows, other = normal(rng, bound, size) * 4, normal(rng, bound, size)
    planes, others = (split_planes(a, splits, rng) for a in (rows, other))
    factor = np.array([0.37], np.float32).astype(STORAGE[dtype])
    check(gpu, Add(), (x, x, x), [rows, others], planes=(1,), splits=splits, by_row=(0, 1),
          rule="elementwise")  # fmt: skip
    check(gpu, Scale(), (x, one, x), [planes, factor], planes=(0,), splits=splits,
          rule="elementwise")  # fmt: skip
    check(gpu, SoftCap(2.5), (x, x), [planes], planes=(0,), splits=splits, rule="elementwise")


def test_softcap_holds_what_is_not_a_number(gpu: Gpu) -> None:
    rows = np.zeros((1, 64), np.float32)
    rows[0, :4] = np.nan, np.inf, -np.inf, 1e30
    x = rows_of(1, 64)
    launches = SoftCap(30.0).lower_cuda(ARCH, x, x)
    given, out = gpu.upload(rows), gpu.upload(np.zeros_like(rows))
    gpu.run(launches, "softcap", ARCH, 1, [given, out])
    got = gpu.download(out, rows)
    assert np.isnan(got[0, 0])
    np.testing.assert_allclose(got[0, 1:4], [30, -30, 30], rtol=1e-6)


@pytest.mark.parametrize(
    ("bound", "first", "second"), [(1, 5376, 5376), (6, 64, 128), (3, 64, 192), (3, 16, 48)]
)
def test_concat(gpu: Gpu, bound: int, first: int, second: int) -> None:
    rng = np.random.default_rng(3)
    types = [rows_of(bound, n) for n in (first, second, first + second)]
    given = [normal(rng, bound, first), normal(rng, bound, second)]
    check(gpu, Concat(), types, given, by_row=(0, 1), rule="elementwise")


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotated", "base"),
    [(512, 256, 1e6), (256, 128, 1e4), (96, 48, 1e4), (64, 8, 1e4), (32, 16, 1e4)],
)
def test_rope_angles(gpu: Gpu, head_dim: int, rotated: int, base: float, factored: bool) -> None:
    positions = np.array([0, 1, 7, 1023, 16383, 32768, 131071, 1_000_000], np.int32)
    at, out = rows_of(8, dtype="i32"), rows_of(8, 2, head_dim // 2)
    factors = np.where(np.arange(head_dim // 2) < head_dim // 8, 1, 1e30).astype(np.float32)
    types = (at, TensorType(factors.shape), out) if factored else (at, out)
    given = [positions, factors] if factored else [positions]
    check(gpu, RopeAngles(head_dim, base, rotated), types, given, rule="elementwise",
          tolerance=2e-7)  # fmt: skip


HEADS = [(8, 32, 256, 4), (8, 32, 512, 2), (16, 16, 512, 1), (6, 4, 64, 1), (3, 2, 32, 3),
         (3, 6, 96, 1), (8, 8, 128, 2), (3, 3, 80, 1), (1, 1, 32, 1)]  # fmt: skip


@pytest.mark.parametrize(("bound", "heads", "d", "splits"), HEADS)
def test_heads(gpu: Gpu, bound: int, heads: int, d: int, splits: int) -> None:
    rng = np.random.default_rng(4)
    q, turns = rows_of(bound, heads * d), rows_of(bound, 2, d // 2)
    angle = rng.uniform(0, 6.28, (bound, d // 2))
    angles = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    queries = split_planes(normal(rng, bound, heads * d), splits, rng)
    check(gpu, RMSNorm(size=d), (q, TensorType((d,)), q), [queries, weight(rng, d)], planes=(0,),
          splits=splits, rule="row_reduction")  # fmt: skip
    check(gpu, Rope(), (q, turns, q), [queries, angles], planes=(0,), splits=splits, by_row=(0, 1),
          rule="elementwise")  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("bound", "inputs", "outputs", "dtype"),
    [(64, 5376, 2048, "q4_0"), (64, 1024, 260, "q8_0"), (33, 256, 36, "q4_k"),
     (64, 512, 64, "q5_k"), (64, 512, 64, "q6_k"), (70, 96, 100, "bf16"), (64, 352, 12, "f16"),
     (17, 32, 4, "f32")],
)  # fmt: skip
def test_products_of_prompts(
    gpu: Gpu, bound: int, inputs: int, outputs: int, dtype: str, gated: bool
) -> None:
    """Weights in every format, as stored; each row the same bits in any company."""
    rng = np.random.default_rng(6)
    x, out = rows_of(bound, inputs), rows_of(bound, outputs)
    w = TensorType((outputs, inputs), dtype, "plain")
    op: Op = GatedLinear("gelu_tanh") if gated and outputs % 16 == 0 else Linear()
    count = 2 if isinstance(op, GatedLinear) else 1
    stored = [random_bytes(w, rng) for _ in range(count)]
    values = [dequantise(data, w) for data in stored]
    given = normal(rng, bound, inputs) / np.float32(inputs**0.5)
    types = (x, *count * [w], out)
    launches = op.lower_cuda(ARCH, *types)
    assert all(isinstance(one, Scheduled) and one.rule == "gemm" for one in launches)
    case = Case(op, types, launches, [given, *stored])
    (whole,), _ = run(gpu, case, bound, case.operands)
    for rows in sorted({1, 17, bound - 1, bound}):
        if rows > bound:
            continue
        (got,), after = run(gpu, case, rows, case.operands)
        (want,) = op.reference(rows, given.astype(np.float64), *values)
        close(got[:rows], want, 4e-5, op.name)
        assert (got[rows:].reshape(-1).view(np.uint8) == POISON).all(), "rows past T were written"
        assert got[:rows].tobytes() == whole[:rows].tobytes(), rows
        for left, right in zip(after, case.operands, strict=True):
            assert left.tobytes() == right.tobytes()


@dataclass(frozen=True)
class Softmax(Op):
    """exp(x - max) / sum over a row: no rule knows it, so the fallback schedules it."""

    name = "softmax"
    operands = RMSNorm.operands[:1]

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        e = np.exp(arrays[0][:rows] - arrays[0][:rows].max(axis=1, keepdims=True))
        return (e / e.sum(axis=1, keepdims=True),)

    def compute(self, *operands: TeOperand) -> Any:
        x = operands[0].tensor()
        j, k = (te.reduce_axis((0, x.shape[1]), name) for name in "jk")
        top = te.compute(x.shape[:1], lambda row: te.max(x[row, j], j), "top")
        total = te.compute(x.shape[:1], lambda row: te.sum(exp(x[row, k] - top[row]), k), "total")
        return te.compute(x.shape, lambda row, col: exp(x[row, col] - top[row]) / total[row], "out")


@pytest.mark.parametrize(("bound", "size"), [(6, 64), (3, 37), (1, 1)])
def test_fallback(gpu: Gpu, bound: int, size: int) -> None:
    x = rows_of(bound, size)
    given = [normal(np.random.default_rng(5), bound, size)]
    check(gpu, Softmax(), (x, x), given, rule="fallback")

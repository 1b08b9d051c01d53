"""Templates of norms and element-wise ops on a GPU, against the NumPy reference of each op.

What TVM schedules is in `test_gpu_tvm.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import (
    COUNTS,
    Case,
    check_a8,
    check_cases,
    check_rows,
    exact,
    normal,
    rounded,
    rows_of,
    run,
    split_planes,
    weight,
)

from memra_compiler.ir.types import TensorType
from memra_compiler.ops import cuda_kernels
from memra_compiler.ops.activation import Concat, GateMul
from memra_compiler.ops.norm import RMSNormAdd
from memra_compiler.ops.quantise import Quantise, RMSNormAddQuantise, RMSNormQuantise
from memra_compiler.ops.residual import BranchNorms, ResidualNorms

pytestmark = pytest.mark.gpu

SIZES = [(8, 5376, 1, "f32"), (8, 5376, 4, "bf16"), (16, 3840, 2, "f32"), (6, 64, 3, "f16"),
         (3, 320, 1, "f32")]  # fmt: skip


@pytest.mark.parametrize(("bound", "size", "splits", "dtype"), SIZES)
def test_norms(gpu: Gpu, bound: int, size: int, splits: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    x, wide = rows_of(bound, size), rows_of(bound, size, dtype="a8")
    w, one = TensorType((size,), dtype), TensorType((1,))
    rows = normal(rng, bound, size) * 3
    planes = split_planes(rows, splits, rng)
    weights = weight(rng, size, dtype), weight(rng, size, dtype)
    k = cuda_kernels
    cases = []
    norm = RMSNormQuantise()
    launches = k.rmsnorm_launches(norm, ARCH, x, w, wide, splits=splits)
    cases.append(Case(norm, (x, w, wide), launches, [planes, weights[0]], (0,), splits))
    y = split_planes(normal(rng, bound, size), splits, rng)
    factor = np.array([0.37], np.float32)
    for op, types, given in (
        (RMSNormAdd(), (x, x, w, x), [rows, y, weights[0]]),
        (RMSNormAdd(), (x, x, w, one, x), [rows, y, weights[0], factor]),
        (RMSNormAddQuantise(), (x, x, w, w, x, wide), [rows, y, *weights]),
        (RMSNormAddQuantise(), (x, x, w, w, one, x, wide), [rows, y, *weights, factor]),
    ):
        launches = k.rmsnorm_add_launches(op, ARCH, *types, splits=splits)
        cases.append(Case(op, types, launches, given, (1,), splits, by_row=(0, 1)))
    z, part = (
        split_planes(normal(rng, bound, size), splits, rng),
        replace(x, layout=f"planes{splits}"),
    )
    more = [weight(rng, size, dtype) for _ in range(6)]
    three = {"to": ("a8", "f32", "a8"), "factors": (1.0, 0.125, 1.0)}
    outputs = (x, wide, x, wide)
    for op, types, given, planed in (
        (ResidualNorms(**three), (x, part, *(w,) * 4, one), [rows, y, *more[:4], factor], (1,)),
        (
            BranchNorms(**three),
            (x, part, part, *(w,) * 6, one),
            [rows, y, z, *more, factor],
            (1, 2),
        ),
    ):
        launches = op.lower_cuda(ARCH, *types, *outputs)
        plain = (*(t.in_rows for t in types), *outputs)
        cases.append(Case(op, plain, launches, given, planed, splits, by_row=(0, *planed)))
    check_cases(gpu, cases, COUNTS[bound])


@pytest.mark.parametrize(("bound", "size", "splits", "dtype"), SIZES)
def test_element_wise(gpu: Gpu, bound: int, size: int, splits: int, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, wide = rows_of(bound, size), rows_of(bound, size, dtype="a8")
    rows, other = normal(rng, bound, size) * 4, normal(rng, bound, size)
    planes, others = (split_planes(a, splits, rng) for a in (rows, other))
    zeros = rows.copy()
    zeros[:, :32] = 0
    k, op = cuda_kernels, Quantise()
    cases = []
    for given in (planes, split_planes(zeros, splits, rng)):
        launches = k.quantise_launches(op, ARCH, x, wide, splits=splits)
        cases.append(Case(op, (x, wide), launches, [given], (0,), splits))
    gates = [GateMul(act) for act in ("gelu_tanh", "silu")]
    for gate in gates:
        launches = k.gate_mul_launches(gate, ARCH, x, x, x, splits=splits)
        cases.append(Case(gate, (x, x, x), launches, [planes, others], (0, 1), splits,
                          by_row=(0, 1)))  # fmt: skip
    check_cases(gpu, cases, COUNTS[bound])
    for gate in gates:
        launches = k.gate_mul_launches(gate, ARCH, x, x, wide, splits=splits)
        case = Case(gate, (x, x, wide), launches, [planes, others], (0, 1), splits, by_row=(0, 1))
        (want,) = gate.reference(bound, *exact(case, case.operands))
        check_quantised(gpu, case, bound, want)


def check_quantised(gpu: Gpu, case: Case, rows: int, want: np.ndarray) -> None:
    """A kernel that writes int8 rows of an op that gives floats."""
    outputs, _ = run(gpu, case, rows, case.operands)
    check_a8(outputs[0], rounded(want), rows, want.shape[1], case)
    check_rows(gpu, case, rows, outputs)


@pytest.mark.parametrize(
    ("bound", "first", "second"), [(1, 5376, 5376), (6, 64, 128), (3, 64, 192)]
)
def test_concat(gpu: Gpu, bound: int, first: int, second: int) -> None:
    rng = np.random.default_rng(3)
    x, y = (rows_of(bound, n) for n in (first, second))
    wide = rows_of(bound, first + second, dtype="a8")
    given = [normal(rng, bound, first), normal(rng, bound, second)]
    op = Concat()
    launches = cuda_kernels.concat_launches(op, ARCH, x, y, wide)
    case = Case(op, (x, y, wide), launches, given, by_row=(0, 1))
    check_quantised(gpu, case, bound, np.concatenate(given, axis=1))

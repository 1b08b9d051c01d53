"""Scheduled kernels, run on the CPU: values, rows that are not there, and bits of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import OnCpu
from te_samples import FORMULAS, Formula, Softmax, SumAndDifference, rows

from cpp_on_cpu import compiler
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import Add, Concat, Scale, SoftCap
from memra_compiler.ops.base import Array, Op
from memra_compiler.ops.linear import GatedLinear, Linear, LinearGroup
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.per_layer import PerLayerGate, PerLayerMix
from memra_compiler.ops.rope import Rope, RopeAngles

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def weight(*shape: int, dtype: str = "f32") -> TensorType:
    return TensorType(shape, dtype)


def norm(width: int, planes: int = 0, dtype: str = "f32") -> tuple[Op, tuple[TensorType, ...]]:
    return RMSNorm(), (rows(2, width, planes=planes), weight(width, dtype=dtype), rows(2, width))


def heads(count: int, d: int, planes: int = 0) -> tuple[TensorType, TensorType]:
    return rows(3, count * d, planes=planes), rows(3, count * d)


def product(bound: int, k: int, *n: int, dtype: str = "f32") -> tuple[TensorType, ...]:
    matrices = [weight(size, k, dtype=dtype) for size in n]
    return rows(bound, k), *matrices, *(rows(bound, size) for size in n)


CASES: dict[str, tuple[Op, tuple[TensorType, ...]]] = {
    "add": (Add(), (rows(3, 64), rows(3, 64, planes=3), rows(3, 64))),
    "scale": (Scale(), (rows(3, 320, planes=2), weight(1, dtype="bf16"), rows(3, 320))),
    "softcap": (SoftCap(2.5), (rows(3, 320), rows(3, 320))),
    "concat": (Concat(), (rows(3, 64), rows(3, 192), rows(3, 256))),
    "concat_narrow": (Concat(), (rows(3, 16), rows(3, 48), rows(3, 64))),
    "rope": (Rope(), (heads(4, 256, 2)[0], rows(3, 2, 128), heads(4, 256)[1])),
    "rope_small": (Rope(), (heads(3, 96)[0], rows(3, 2, 48), heads(3, 96)[1])),
    "angles": (RopeAngles(96, 1e6, 12), (rows(3, dtype="i32"), weight(48), rows(3, 2, 48))),
    "norm": norm(5376, 2, "bf16"),
    "norm_odd": norm(1040, 2),
    "norm_idle_warp": norm(2880, 0, "f16"),
    "norm_lanes": norm(976),
    "norm_least": norm(16),
    "heads": (RMSNorm(size=256), (heads(4, 256)[0], weight(256), heads(4, 256)[1])),
    "heads_of_half_a_warp": (RMSNorm(size=64), heads(3, 64, 2)),
    "heads_odd": (RMSNorm(size=80), heads(3, 80)),
    "per_layer_mix": (
        PerLayerMix(),
        (heads(3, 256, 2)[0], heads(3, 256)[0], weight(256), heads(3, 256)[1]),
    ),
    "per_layer_gate": (PerLayerGate(2), (rows(3, 256, planes=2), rows(3, 768), rows(3, 256))),
    "linear": (Linear(), product(20, 96, 100, dtype="bf16")),
    "linear_two_tiles": (Linear(), product(70, 32, 36, dtype="f16")),
    "linear_group": (LinearGroup(), product(17, 64, 48, 36)),
    "gelu": (GatedLinear("gelu_tanh"), (*product(20, 64, 48, 48)[:3], rows(20, 48))),
    "silu": (GatedLinear("silu"), (*product(20, 64, 48, 48)[:3], rows(20, 48))),
    "fallback": (Softmax(), (rows(6, 37), rows(6, 37))),
    "two_outputs": (SumAndDifference(), (rows(3, 64, planes=2), *3 * [rows(3, 64)])),
}


#: Nobody wrote a rule with these in mind, nor for rows of 64 and of 50.
CASES |= {
    f"{kind}_{width}": (Formula(kind), tuple(rows(3, width) for _ in range(3)))
    for kind in FORMULAS
    for width in (64, 50)
}


def split(x: Array, planes: int, rng: np.random.Generator) -> Array:
    """x as planes of whole tiles of eight rows whose sum in order is x; NaN in rows beyond."""
    out = np.full((planes, -(-len(x) // 8) * 8, *x.shape[1:]), np.nan, np.float32)
    out[:, : len(x)] = rng.integers(-8, 8, (planes, *x.shape)) / 4
    out[-1, : len(x)] = 0
    total = np.zeros_like(x)
    for plane in out[:, : len(x)]:
        total = total + plane
    out[-1, : len(x)] = x - total
    return out


def operands(types: Sequence[TensorType], rng: np.random.Generator) -> list[Array]:
    made = []
    for type in types:
        if type.dtype == "i32":
            made.append(rng.integers(0, 100_000, type.max_shape).astype(np.int32))
        else:
            made.append(rng.standard_normal(type.max_shape).astype(DTYPES[type.dtype]))
    return made


@pytest.mark.parametrize("name", CASES)
def test_kernel_agrees_with_reference_and_rows_are_independent(name: str, tmp_path: Path) -> None:
    op, types = CASES[name]
    rng = np.random.default_rng(3)
    inputs = types[: -op.outputs_of(len(types))]
    plain = operands(inputs, rng)
    given = [
        split(a, t.planes, rng) if t.planes > 1 else a for a, t in zip(plain, inputs, strict=True)
    ]
    values = [
        a if a.dtype == np.int32 else (a.sum(axis=0)[: len(p)] if t.planes > 1 else a).astype(float)
        for a, p, t in zip(given, plain, inputs, strict=True)
    ]
    kernel = OnCpu(op, types, tmp_path)
    bound = types[0].max_shape[0]
    whole = kernel(bound, given)
    for count in sorted({1, bound - 1, bound}):
        outputs = kernel(count, given)
        wanted = op.reference(count, *values)
        for got, want, all_rows in zip(outputs, wanted, whole, strict=True):
            scale = max(1.0, float(np.abs(want).max()))
            found = got[:count].reshape(want.shape)
            np.testing.assert_allclose(found, want, rtol=0, atol=3e-6 * scale)
            assert np.isnan(got[count:]).all(), "rows past T were written"
            assert got[:count].tobytes() == all_rows[:count].tobytes()

"""Templates of rotations and the rows they append on a GPU, against each op's reference.

What TVM schedules is in `test_gpu_tvm.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import (
    COUNTS,
    Case,
    check_cases,
    normal,
    rows_of,
    split_planes,
    stored_rows,
    weight,
)

from memra_compiler.ir.types import TensorType
from memra_compiler.ops import cuda_kernels
from memra_compiler.ops.attention import KvAppend, NormRopeAppend
from memra_compiler.ops.base import Op
from memra_compiler.ops.qkv import NormRopeQKV
from memra_compiler.ops.rope import NormRope

pytestmark = pytest.mark.gpu


HEADS = [(8, 32, 16, 256, 4, "f16"), (8, 32, 4, 512, 2, "f16"), (16, 16, 1, 512, 1, "bf16"),
         (6, 4, 2, 64, 1, "f32"), (3, 2, 2, 32, 3, "bf16"), (3, 6, 3, 96, 1, "f16"),
         (8, 8, 4, 128, 2, "f16"),
         *((8, 2 * n, n, d, splits, "q8_0_rows") for n, d, splits in (
             (16, 256, 4), (4, 512, 2), (1, 128, 1), (2, 64, 3), (3, 32, 1), (2, 96, 2)
         ))]  # fmt: skip


@pytest.mark.parametrize(("bound", "heads", "kv_heads", "d", "splits", "kv"), HEADS)
def test_rotary_and_append(
    gpu: Gpu, bound: int, heads: int, kv_heads: int, d: int, splits: int, kv: str
) -> None:
    rng = np.random.default_rng(4)
    ring = bound + 5
    positions = np.arange(bound, dtype=np.int32) + 3 * ring - 2  # wraps after two rows
    q, key, at = (
        rows_of(bound, heads * d),
        rows_of(bound, kv_heads * d),
        rows_of(bound, dtype="i32"),
    )
    turns, w = rows_of(bound, 2, d // 2), TensorType((d,), "f32")
    plane = TensorType((kv_heads, ring, d), kv)
    angle = rng.uniform(0, 6.28, (bound, d // 2))
    angles = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    queries, keys, values = (
        split_planes(normal(rng, bound, n * d), splits, rng) for n in (heads, kv_heads, kv_heads)
    )
    weights = weight(rng, d), weight(rng, d)
    caches = [stored_rows(np.full(plane.max_shape, np.nan, np.float32), kv) for _ in range(2)]
    k, cases = cuda_kernels, []

    op: Op = NormRope()
    launches = k.norm_rope_launches(op, ARCH, q, turns, w, q, splits=splits)
    cases.append(Case(op, (q, turns, w, q), launches, [queries, angles, weights[0]], (0,), splits,
                      by_row=(0, 1)))  # fmt: skip
    for v_norm in ("unit", "none"):
        op = NormRopeAppend(v_norm=v_norm)
        types = (key, key, turns, w, at, plane, plane)
        launches = k.norm_rope_append_launches(op, ARCH, *types, splits=splits)
        given = [keys, values, angles, weights[0], positions, *caches]
        cases.append(Case(op, types, launches, given, (0, 1), splits))
        op = NormRopeQKV(v_norm=v_norm)
        types = (q, key, key, turns, w, w, at, plane, plane, q)
        launches = k.norm_rope_qkv_launches(op, ARCH, *types, splits=splits)
        given = [queries, keys, values, angles, *weights, positions, *caches]
        cases.append(Case(op, types, launches, given, (0, 1, 2), splits, by_row=(0, 1, 2, 3, 6)))
    op = KvAppend()
    types = (key, key, at, plane, plane)
    launches = k.kv_append_launches(op, ARCH, *types, splits=splits)
    given = [keys, values, positions, *caches]
    cases.append(Case(op, types, launches, given, (0, 1), splits))
    check_cases(gpu, cases, COUNTS[bound])

"""Kernels of caches and of the centroid head, run on the CPU: what they write, from what they read.

On a GPU, tests/gpu covers many more shapes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import templates_on_cpu
from templates_on_cpu import TemplatesOnCpu

from cpp_on_cpu import compiler
from memra_compiler.codegen.cuda import render
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops import cuda_attention, cuda_kernels
from memra_compiler.ops.attention import Attention, KvAppend
from memra_compiler.ops.clusters import ClusterLogits, TopClusters
from memra_compiler.ops.cuda import ARCHS, Launch
from memra_compiler.ops.formats import dequantise, random_bytes
from memra_compiler.ops.kv_move import KvMove
from memra_compiler.ops.kv_rows import cache_values, encode_rows

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def stored(values: np.ndarray, kv: str) -> np.ndarray:
    return encode_rows(values) if kv == "q8_0_rows" else values.astype(STORAGE[kv])


@pytest.mark.parametrize("d", [32, 64, 96, 128, 160, 256, 512])
def test_appended_rows_are_the_bytes_of_the_definition(d: int, tmp_path: Path) -> None:
    """Lanes hold pairs of a head: which of them hold a block depends on its width."""
    rng = np.random.default_rng(d)
    rows, heads, limit = 5, 2, 7
    x = rng.standard_normal((2, rows, heads, d)) * 10.0 ** rng.integers(-3, 3, (2, rows, 1, 1))
    x = (x * rng.uniform(0.1, 10, (2, rows, heads, d // 32)).repeat(32, -1)).astype(np.float32)
    x[0, 1, 0, :32], x[1, 2, 1, d - 5], x[0, 3, 1, 17] = 0, np.nan, np.inf
    x[1, 4, 0] *= 1e-30
    kv, at = TensorType((Sym("T", 8), heads * d)), TensorType((Sym("T", 8),), "i32")
    plane = TensorType((heads, limit, d), "q8_0_rows")
    launches = cuda_kernels.kv_append_launches(
        KvAppend(), ARCHS["sm_90a"], kv, kv, at, plane, plane
    )
    caches = [np.full(plane.stored_shape, 0xB3, np.uint8) for _ in range(2)]
    positions = np.arange(5, 5 + rows, dtype=np.int32)
    TemplatesOnCpu(launches, tmp_path)(rows, x[0].copy(), x[1].copy(), positions, *caches)
    for cache, given in zip(caches, x, strict=True):
        want = np.full_like(cache, 0xB3)
        want[:, positions % limit] = encode_rows(given).swapaxes(0, 1)
        scales = slice(d, d + d // 16)
        np.testing.assert_array_equal(np.delete(cache, scales, -1), np.delete(want, scales, -1))
        got, wanted = (c[..., scales].copy().view(np.float16) for c in (cache, want))
        np.testing.assert_array_equal(got, wanted)  # a NaN is one, with whatever bits


@pytest.mark.parametrize(
    ("kv", "d", "arch", "heads", "span"),
    [
        ("q8_0_rows", 64, "sm_90a", 4, 0),
        ("q8_0_rows", 32, "sm_80", 2, 200),
        ("q8_0_rows", 96, "sm_90a", 2, 0),
        ("q8_0_rows", 1024, "sm_80", 2, 0),  # too wide for tensor cores there
        ("f16", 64, "sm_90a", 4, 0),
        ("bf16", 64, "sm_90a", 4, 200),
        ("f32", 64, "sm_90a", 2, 0),
    ],
)
def test_attention_agrees_with_its_reference(
    kv: str, d: int, arch: str, heads: int, span: int, tmp_path: Path
) -> None:
    """Several units in a split, a ring that has turned, rows that nobody wrote."""
    rng = np.random.default_rng(1)
    bound, limit, end = 3, 328, 390 if span else 325
    q, at = TensorType((Sym("T", bound), heads * d)), TensorType((Sym("T", bound),), "i32")
    plane = TensorType((1, limit, d), kv)
    op, types = Attention(1.0, span), (q, at, plane, plane, q)
    device = dataclasses.replace(ARCHS[arch], multiprocessors=1)  # few splits, so long ones
    ends = np.arange(end - bound + 1, end + 1, dtype=np.int32)
    caches = []
    for _ in range(2):
        values = np.full(plane.max_shape, np.nan, np.float32)
        seen = np.arange(max(0, end - limit), end) % limit
        values[:, seen] = rng.standard_normal((1, len(seen), d))
        caches.append(stored(values, kv))
    queries = (rng.standard_normal((bound, heads * d)) * 3 / d**0.5).astype(np.float32)
    out = np.full((bound, heads * d), np.nan, np.float32)
    scratch = np.full(
        cuda_attention.attention_scratch_floats(op, device, *types), np.nan, np.float32
    )
    launches = cuda_attention.attention_launches(op, device, *types)
    TemplatesOnCpu(launches, tmp_path)(bound, queries, ends, *caches, out, scratch)
    exact = (c if kv == "q8_0_rows" else cache_values(c) for c in caches)
    (want,) = op.reference(bound, queries.astype(np.float64), ends, *exact)
    tolerance = 1e-5 if kv == "f32" or d == 1024 else 3e-3
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(
    ("kv", "d", "first", "rows"),
    [
        ("f16", 32, 0, 20),  # nothing is cached yet
        ("bf16", 64, 150, 24),
        ("q8_0_rows", 96, 155, 24),
        ("f32", 20, 155, 24),  # the plain kernel, and rows that are copied by words
    ],
)
def test_a_chunk_beside_a_ring_has_the_bits_of_a_longer_ring(
    kv: str, d: int, first: int, rows: int, tmp_path: Path
) -> None:
    """A ring with no room for the chunk; what it holds of other positions is NaN, or so large."""
    rng, window, spare, bound, heads = np.random.default_rng(first), 100, 3, 24, 2
    q, at = TensorType((Sym("T", bound), heads * d)), TensorType((Sym("T", bound),), "i32")
    long, ring, part = (TensorType((1, n, d), kv) for n in (160, window + spare, bound))
    op, device = Attention(1.0, window), dataclasses.replace(ARCHS["sm_90a"], multiprocessors=1)
    end = first + rows
    ends = np.arange(first + 1, end + 1, dtype=np.int32)
    values = [stored(rng.standard_normal((1, end, d)).astype(np.float32), kv) for _ in range(2)]
    queries = (rng.standard_normal((bound, heads * d)) * 3 / d**0.5).astype(np.float32)

    def plane(type: TensorType, rows: np.ndarray, low: int, high: int) -> np.ndarray:
        empty = stored(np.full(type.max_shape, np.nan, np.float32), kv)
        where = np.arange(max(low, high - type.max_shape[1]), high)
        empty[:, where % type.max_shape[1]] = rows[:, where]
        return empty

    def attend(types: tuple[TensorType, ...], planes: list[np.ndarray], folder: str) -> np.ndarray:
        floats = cuda_attention.attention_scratch_floats(op, device, *types)
        out, scratch = np.full((bound, heads * d), np.nan, np.float32), np.zeros(floats, np.float32)
        (tmp_path / folder).mkdir()
        launches = cuda_attention.attention_launches(op, device, *types)
        TemplatesOnCpu(launches, tmp_path / folder)(rows, queries, ends, *planes, out, scratch)
        return out[:rows]

    whole = [plane(long, v, 0, end) for v in values]
    want = attend((q, at, long, long, q), whole, "whole")
    rings = [plane(ring, v, 0, first) for v in values]
    chunk = [plane(part, v, first, end) for v in values]
    types = (q, at, ring, ring, part, part, q)
    np.testing.assert_array_equal(attend(types, [*rings, *chunk], "chunk"), want)
    assert np.isfinite(want).all()

    (tmp_path / "move").mkdir()
    moves = cuda_kernels.kv_move_launches(KvMove(), ARCHS["sm_90a"], at, part, part, ring, ring)
    TemplatesOnCpu(moves, tmp_path / "move")(rows, ends - 1, *chunk, *rings)
    for got, rows_of in zip(rings, values, strict=True):
        assert got.tobytes() == plane(ring, rows_of, 0, end).tobytes()


@pytest.mark.parametrize("limit", [1, 5, 9])
def test_a_chunk_longer_than_a_ring_leaves_its_last_rows(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of blocks: here the last one comes first, so that none may rely on it."""

    def last_first(launch: Launch, name: str) -> tuple[str, str]:
        symbol, text = render(launch, name)
        assert text.count("blockIdx.x") == 1
        return symbol, text.replace("blockIdx.x", f"({launch.grid[0]} - 1 - blockIdx.x)")

    monkeypatch.setattr(templates_on_cpu, "render", last_first)
    rng, rows, d = np.random.default_rng(limit), 6, 36
    chunk, ring = TensorType((2, 7, d), "f16"), TensorType((2, limit, d), "f16")
    at = TensorType((Sym("T", 7),), "i32")
    planes = [stored(rng.standard_normal(t.max_shape), "f16") for t in (chunk, chunk, ring, ring)]
    want = [plane.copy() for plane in planes]
    positions = np.arange(11, 11 + rows, dtype=np.int32)
    KvMove().reference(rows, positions, *want)
    launches = KvMove().lower_cuda(ARCHS["sm_80"], at, chunk, chunk, ring, ring)
    TemplatesOnCpu(launches, tmp_path)(rows, positions, *planes)
    for got, wanted in zip(planes, want, strict=True):
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("count", "active"), [(64, 5), (304, 32), (16, 16)])
def test_best_clusters_are_those_of_the_definition(count: int, active: int, tmp_path: Path) -> None:
    """Ties, NaN and infinities included; rows that are not there stay as they were."""
    op, rng = TopClusters(active), np.random.default_rng(2)
    scores = rng.integers(0, 9, (3, count)).astype(np.float32)
    scores[1, :6] = np.nan, np.inf, -np.inf, np.nan, -3.4e38, 9
    types = TensorType((Sym("T", 3), count)), TensorType((Sym("T", 3), active), "i32")
    out = np.full((3, active), -7, np.int32)
    TemplatesOnCpu(op.lower_cuda(ARCHS["sm_90a"], *types), tmp_path)(2, scores, out)
    np.testing.assert_array_equal(out[:2], *op.reference(2, scores))
    assert (out[2] == -7).all()


@pytest.mark.parametrize(("form", "ids"), [("f32", "i32"), ("bf16", "i64")])
def test_cluster_logits_agree_with_the_reference(form: str, ids: str, tmp_path: Path) -> None:
    op, rng = ClusterLogits(5), np.random.default_rng(3)
    table, ordering = TensorType((40, 256), form), TensorType((40,), ids)
    x, clusters = TensorType((Sym("T", 3), 256)), TensorType((Sym("T", 3), 3), "i32")
    types = x, clusters, ordering, table, TensorType((Sym("T", 3), 15))
    rows = rng.standard_normal((3, 256)).astype(np.float32)
    best = np.array([[7, 0, 3], [1, 2, 6], [5, 5, 5]], np.int32)
    tokens = rng.permutation(40).astype({"i32": np.int32, "i64": np.int64}[ids])
    weights = random_bytes(table, rng)
    out = np.full((3, 15), np.nan, np.float32)
    kernels = TemplatesOnCpu(op.lower_cuda(ARCHS["sm_90a"], *types), tmp_path)
    kernels(2, rows, best, tokens, weights, out)
    (want,) = op.reference(2, rows.astype(np.float64), best, tokens, dequantise(weights, table))
    np.testing.assert_allclose(out[:2], want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert np.isnan(out[2]).all()

"""Attention kernels on a GPU against their reference, around units, folds, windows and rings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import (
    Array,
    Case,
    check_a8,
    check_rows,
    close,
    exact,
    normal,
    rounded,
    rows_of,
    run,
    stored_rows,
)

from memra_compiler.ir.types import TensorType
from memra_compiler.ops import cuda_attention
from memra_compiler.ops.attention import Attention
from memra_compiler.ops.cuda import Launch
from memra_compiler.ops.kv_move import KvMove
from memra_compiler.ops.kv_rows import cache_values, head_width

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Cache:
    """One kind of cache and its readers."""

    heads: int
    kv_heads: int
    d: int
    rows: int
    kv: str
    span: int = 0

    @property
    def plane(self) -> TensorType:
        return TensorType((self.kv_heads, self.rows, self.d), self.kv)


CACHES = {
    "31b-global": Cache(32, 4, 512, 33000, "f16"),
    "31b-window": Cache(32, 16, 256, 1040, "f16", 1024),
    "31b-draft": Cache(32, 16, 256, 1040, "f16", 1023),
    "12b-global": Cache(16, 1, 512, 9000, "bf16"),
    "12b-window": Cache(16, 8, 256, 1040, "bf16", 1024),
    "wide-group": Cache(40, 1, 128, 700, "f16"),
    "tiny-f16": Cache(4, 2, 64, 700, "f16"),
    "tiny-ring": Cache(4, 2, 32, 56, "f16", 40),
    "tiny-f32": Cache(4, 2, 64, 700, "f32"),
    "ring-f32": Cache(6, 2, 80, 56, "f32", 40),
    "odd-head": Cache(2, 2, 80, 300, "f16"),
    "31b-global-q8": Cache(32, 4, 512, 33000, "q8_0_rows"),
    "31b-window-q8": Cache(32, 16, 256, 1040, "q8_0_rows", 1024),
    "wide-group-q8": Cache(40, 1, 128, 700, "q8_0_rows"),
    "tiny-q8": Cache(4, 2, 64, 700, "q8_0_rows"),
    "ring-q8": Cache(4, 2, 32, 56, "q8_0_rows", 40),
    "odd-q8": Cache(6, 3, 96, 300, "q8_0_rows"),
    "plain-q8": Cache(2, 1, 1536, 150, "q8_0_rows"),  # too wide for tensor cores
}
#: (cache, rows, ends of the last row): around units of 64, folds, windows and rings.
ATTENTION = [
    *(("tiny-f16", rows, end) for rows, end in
      ((1, 1), (2, 2), (3, 64), (6, 66), (8, 129), (16, 129), (7, 700))),
    *(("tiny-f32", rows, end) for rows, end in ((1, 1), (6, 33), (8, 129), (16, 700))),
    *(("tiny-ring", rows, end) for rows, end in ((1, 39), (6, 43), (8, 60), (16, 300))),
    *(("ring-f32", rows, end) for rows, end in ((3, 41), (16, 300))),
    ("odd-head", 5, 290),
    *(("wide-group", rows, end) for rows, end in ((1, 1), (8, 131), (16, 700))),
    *(("31b-window", rows, end) for rows, end in
      ((1, 1), (6, 64), (8, 1023), (8, 1028), (1, 1025), (16, 1047), (8, 2085), (6, 5000))),
    *(("31b-draft", rows, end) for rows, end in ((1, 1023), (1, 1024), (1, 4097))),
    *(("12b-window", rows, end) for rows, end in ((6, 1026), (16, 3001))),
    *(("31b-global", rows, end) for rows, end in
      ((1, 1), (6, 67), (8, 1736), (16, 2120), (8, 2113), (6, 4228), (8, 16384), (16, 16900),
       (8, 32768))),
    *(("12b-global", rows, end) for rows, end in ((1, 64), (6, 1000), (16, 8455), (8, 9000))),
    *(("tiny-q8", rows, end) for rows, end in
      ((1, 1), (2, 2), (3, 64), (6, 66), (8, 129), (16, 129), (7, 700))),
    *(("ring-q8", rows, end) for rows, end in ((1, 39), (6, 43), (8, 60), (16, 300))),
    *(("odd-q8", rows, end) for rows, end in ((5, 290), (8, 131))),
    ("plain-q8", 3, 140),
    ("wide-group-q8", 16, 700),
    *(("31b-window-q8", rows, end) for rows, end in
      ((1, 1), (6, 64), (8, 1028), (1, 1025), (16, 1047), (8, 2085))),
    *(("31b-global-q8", rows, end) for rows, end in
      ((1, 1), (6, 67), (8, 1736), (16, 2120), (6, 4228), (8, 16384), (8, 32768))),
]  # fmt: skip


def attention_reference(op: Attention, rows: int, *arrays: Array) -> Array:
    """`Attention.reference`, a K/V head at a time."""
    q, ends, k_cache, v_cache = arrays
    kv_heads, limit, _ = k_cache.shape
    q = q[:rows].reshape(rows, kv_heads, -1, head_width(k_cache))
    out = np.zeros_like(q)
    low = min((max(0, e - op.span) if op.span else 0) for e in ends[:rows])
    at = np.arange(low, max(ends[:rows]))
    for n in range(kv_heads):
        keys, values = (cache_values(c[n, at % limit]) for c in (k_cache, v_cache))
        for t in range(rows):
            first = max(0, ends[t] - op.span) if op.span else 0
            part = slice(first - low, ends[t] - low)
            score = q[t, n] @ keys[part].T * op.scale
            share = np.exp(score - score.max(axis=1, keepdims=True))
            out[t, n] = share @ values[part] / share.sum(axis=1, keepdims=True)
    return out.reshape(rows, -1)


def attention_types(
    cache: Cache, bound: int, out: str = "f32"
) -> tuple[Attention, tuple[TensorType, ...]]:
    """The op that reads a cache, and its operands and output."""
    q, at = rows_of(bound, cache.heads * cache.d), rows_of(bound, dtype="i32")
    types = (q, at, cache.plane, cache.plane, TensorType(q.shape, out))
    return Attention(1.0, cache.span), types


@pytest.fixture(scope="module", autouse=True)
def compiled(gpu: Gpu) -> None:
    """All kernels of `ATTENTION`, compiled on all cores before the first test."""
    wanted: list[tuple[Launch, str]] = []
    for name, bound in {(name, rows) for name, rows, _ in ATTENTION}:
        op, types = attention_types(CACHES[name], bound)
        wanted += [(x, op.name) for x in cuda_attention.attention_launches(op, ARCH, *types)]
    gpu.prepare(wanted, ARCH)


def attention_case(cache: Cache, bound: int, end: int, seed: int, out: str = "f32") -> Case:
    """Rows that end at `end`, and before it by one each; unwritten cache rows are NaN."""
    rng = np.random.default_rng(seed)
    op, types = attention_types(cache, bound, out)
    ends = np.maximum(end - np.arange(bound)[::-1], 1).astype(np.int32)
    planes = [np.full(cache.plane.max_shape, np.nan, np.float32) for _ in range(2)]
    written = np.arange(max(0, end - cache.rows), end) % cache.rows
    shape = (cache.kv_heads, len(written), cache.d)
    for plane in planes:
        plane[:, written] = rng.standard_normal(shape, dtype=np.float32)
    stored = [stored_rows(plane, cache.kv) for plane in planes]
    queries = normal(rng, bound, cache.heads * cache.d) * np.float32(3 / cache.d**0.5)
    return Case(
        op,
        types,
        cuda_attention.attention_launches(op, ARCH, *types),
        [queries, ends, *stored],
        scratch=cuda_attention.attention_scratch_floats(op, ARCH, *types),
        tolerance={"f32": 1e-5, "f16": 3e-3, "bf16": 1e-3, "q8_0_rows": 3e-3}[cache.kv],
        by_row=(0, 1),
    )


@pytest.mark.parametrize(("name", "rows", "end"), ATTENTION)
def test_attention(gpu: Gpu, name: str, rows: int, end: int) -> None:
    case = attention_case(CACHES[name], rows, end, seed=end + rows)
    outputs, after = run(gpu, case, rows, case.operands)
    assert isinstance(case.op, Attention)
    want = attention_reference(case.op, rows, *exact(case, case.operands))
    close(outputs[0], want, case.tolerance or 0, f"attention {CACHES[name].kv}")
    for got, given in zip(after, case.operands, strict=True):
        assert got.tobytes() == given.tobytes(), "attention wrote an operand"
    check_rows(gpu, case, rows, outputs)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("tiny-f16", 129),
        ("tiny-f32", 99),
        ("31b-window", 1030),
        ("31b-global", 700),
        ("12b-global", 700),
        ("31b-window-q8", 1030),
        ("31b-global-q8", 700),
    ],
)
def test_attention_bits_do_not_depend_on_the_compiled_bound(gpu: Gpu, name: str, end: int) -> None:
    """A plain step compiled for one row gives the bits of a verify compiled for more."""
    wide = attention_case(CACHES[name], 16, end, seed=5)
    outputs, _ = run(gpu, wide, 16, wide.operands)
    narrow = attention_case(CACHES[name], 1, end, seed=5)
    for row in (0, 9, 15):
        given = [wide.operands[0][row : row + 1], wide.operands[1][row : row + 1]]
        alone, _ = run(gpu, narrow, 1, [*given, *wide.operands[2:]])
        assert alone[0].tobytes() == outputs[0][row].tobytes()


@pytest.mark.parametrize(
    "name",
    ["tiny-f16", "31b-window", "31b-global", "12b-global", "tiny-f32", "tiny-q8", "31b-global-q8"],
)
def test_attention_row_does_not_feel_later_rows(gpu: Gpu, name: str) -> None:
    """Keys and values past a row's end, as large as they come, change none of its bits."""
    cache, end = CACHES[name], 200
    case = attention_case(cache, 8, end, seed=6)
    narrow = attention_case(cache, 1, end, seed=6)
    keys, values = (cache_values(plane) for plane in case.operands[2:])
    values *= 1e-3
    # both as stored rows of the same floats: a q8_0 row of decoded values is not always that row
    case.operands[2:] = [stored_rows(plane, cache.kv) for plane in (keys, values)]
    values[:, end - 7 : end] = 60000
    keys[:, end - 7 : end] *= -2
    loud = [*case.operands[:2], stored_rows(keys, cache.kv), stored_rows(values, cache.kv)]
    whole, _ = run(gpu, case, 8, loud)
    alone, _ = run(gpu, narrow, 1, [case.operands[0][:1], case.operands[1][:1], *case.operands[2:]])
    assert whole[0][0].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize(
    ("name", "rows", "end"),
    [("tiny-f16", 6, 129), ("31b-window", 8, 1100), ("31b-global", 6, 500), ("31b-global", 1, 5)],
)
def test_attention_to_a8(gpu: Gpu, name: str, rows: int, end: int) -> None:
    case = attention_case(CACHES[name], rows, end, 7, "a8")
    plain = attention_case(CACHES[name], rows, end, 7)
    outputs, _ = run(gpu, case, rows, case.operands)
    floats, _ = run(gpu, plain, rows, case.operands)
    case.tolerance = None
    check_a8(outputs[0], rounded(floats[0]), rows, case.types[0].max_shape[1], case)


def test_attention_of_unequal_rows(gpu: Gpu) -> None:
    """Ends in any order, one of them 0: nothing is visible and the row is zero."""
    for name in ("tiny-f16", "tiny-f32"):
        case = attention_case(CACHES[name], 6, 700, seed=8)
        case.operands[1] = np.array([700, 3, 0, 65, 640, 128], np.int32)
        outputs, _ = run(gpu, case, 6, case.operands)
        given = exact(case, case.operands)
        (want,) = Attention(1.0).reference(6, *given)
        close(outputs[0], want, case.tolerance or 0, f"attention {CACHES[name].kv}")
        check_rows(gpu, case, 6, outputs)


#: (cache, positions before the step, its rows): chunks of 64 rows at most; rings have 16 to spare.
CHUNKS = [
    *(("31b-window", first, rows) for first, rows in ((0, 64), (1000, 64), (1024, 33), (4100, 64))),
    ("12b-window", 1100, 64),
    *(("tiny-ring", first, rows) for first, rows in ((0, 64), (40, 1), (61, 64), (300, 50))),
    ("ring-f32", 99, 64),
    ("ring-q8", 61, 64),
    ("31b-window-q8", 1030, 64),
]


@pytest.mark.parametrize(("name", "first", "rows"), CHUNKS)
def test_attention_of_a_chunk_beside_its_ring(gpu: Gpu, name: str, first: int, rows: int) -> None:
    """The bits of a ring that holds the chunk, too; and the ring that such a one would be after."""
    cache, bound, end, rng = CACHES[name], 64, first + rows, np.random.default_rng(first)
    long, part = (dataclasses.replace(cache, rows=n) for n in (cache.span + bound, bound))
    shape = (cache.kv_heads, end, cache.d)
    every = [stored_rows(rng.standard_normal(shape, dtype=np.float32), cache.kv) for _ in "kv"]

    def planes(of: Cache, low: int, high: int) -> list[Array]:
        found = []
        for rows_of_all in every:
            plane = stored_rows(np.full(of.plane.max_shape, np.nan, np.float32), of.kv)
            at = np.arange(max(low, high - of.rows), high)
            plane[:, at % of.rows] = rows_of_all[:, at]
            found.append(plane)
        return found

    ends = np.zeros(bound, np.int32)
    ends[:rows] = np.arange(first + 1, end + 1)
    queries = normal(rng, bound, cache.heads * cache.d) * np.float32(3 / cache.d**0.5)
    op, (q, at, *_) = attention_types(cache, bound)

    def case(*held: tuple[Cache, list[Array]]) -> Case:
        types = (q, at, *(c.plane for c, _ in held for _ in "kv"), q)
        launches = cuda_attention.attention_launches(op, ARCH, *types)
        scratch = cuda_attention.attention_scratch_floats(op, ARCH, *types)
        given = [queries, ends, *(plane for _, both in held for plane in both)]
        return Case(op, types, launches, given, scratch=scratch, by_row=(0, 1))

    whole = case((long, planes(long, 0, end)))
    chunked = case((cache, planes(cache, 0, first)), (part, planes(part, first, end)))
    want, _ = run(gpu, whole, rows, whole.operands)
    got, after = run(gpu, chunked, rows, chunked.operands)
    assert np.isfinite(want[0][:rows]).all()
    assert got[0][:rows].tobytes() == want[0][:rows].tobytes()

    move = KvMove()
    types = (at, part.plane, part.plane, cache.plane, cache.plane)
    given = [ends - 1, *after[4:], *after[2:4]]
    _, moved = run(gpu, Case(move, types, move.lower_cuda(ARCH, *types), given), rows, given)
    for found, wanted in zip(moved[3:], planes(cache, 0, end), strict=True):
        assert found.tobytes() == wanted.tobytes()

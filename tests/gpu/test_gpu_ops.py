"""CUDA templates that are no matrix products, on a GPU, against the op's NumPy reference.

What TVM schedules is in `test_gpu_tvm.py`.

Each case checks the values of all rows, that rows past T, guard bytes and read-only planes are
untouched, and that a row has the same bits alone, in any company and at any place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver
from gpu_driver import Gpu

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops import cuda_attention, cuda_kernels, cuda_state
from memra_compiler.ops.activation import Concat, GateMul
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.attention import Attention, KvAppend, NormRopeAppend
from memra_compiler.ops.base import Op, Sample
from memra_compiler.ops.chain import Advance, Begin, DraftToken
from memra_compiler.ops.cuda import ARCHS, AnyLaunch
from memra_compiler.ops.norm import RMSNormAdd
from memra_compiler.ops.qkv import NormRopeQKV
from memra_compiler.ops.quantise import Quantise, RMSNormAddQuantise, RMSNormQuantise
from memra_compiler.ops.rope import NormRope
from memra_compiler.ops.settle import Accept, AdaptDepth, Commit, Rollback
from memra_compiler.ops.state import Positions, ReadRow, ReadTokens, WriteRows
from memra_runtime.artifact import BATCH_ROWS, slot

pytestmark = pytest.mark.gpu

ARCH = ARCHS["sm_90a"]
STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i32": np.int32}
POISON = 0x7E  # as a float 8.4e37, as a half NaN
#: Largest error, relative to the largest value, by the coarsest type that is written.
TOLERANCE = {"f32": 3e-6, "f16": 1e-3, "bf16": 8e-3, "i32": 0}

Array = np.ndarray


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    try:
        return Gpu()
    except RuntimeError as error:  # no driver, or no device
        pytest.skip(f"no GPU: {error}")


def rows_of(bound: int, *shape: int, dtype: str = "f32") -> TensorType:
    return TensorType((Sym("T", bound), *shape), dtype)


@dataclass
class Case:
    """A kernel, its operands as stored, and which of them are split into partial planes."""

    op: Op
    types: tuple[TensorType, ...]
    launches: tuple[AnyLaunch, ...]
    operands: list[Array]
    planes: tuple[int, ...] = ()
    splits: int = 1
    scratch: int = 0
    tolerance: float | None = None
    #: Operands with a row for each row of the step; the others are planes and weights.
    by_row: tuple[int, ...] = field(default=(0,))

    @property
    def bound(self) -> int:
        return self.types[self.by_row[0]].max_shape[0]

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return self.types[len(self.operands) :]


def empty(type: TensorType, bound: int) -> Array:
    """A poisoned output: whole tiles for a8, else `bound` rows."""
    if type.dtype == "a8":
        size = -(-bound // 8) * type.max_shape[1] * 10
        return np.full(size, POISON, np.uint8)
    shape = (bound, *type.max_shape[1:])
    size = int(np.prod(shape)) * np.dtype(STORAGE[type.dtype]).itemsize
    return np.full(size, POISON, np.uint8).view(STORAGE[type.dtype]).reshape(shape)


def split_planes(x: Array, splits: int, rng: np.random.Generator) -> Array:
    """x as partial planes of whole tiles of eight rows, whose float32 sum in order is x."""
    tall = -(-len(x) // 8) * 8
    if splits == 1:
        return x
    out = np.full((splits, tall, *x.shape[1:]), np.nan, np.float32)
    rest = x.astype(np.float32)
    for i in range(splits - 1):
        out[i, : len(x)] = rng.integers(-8, 8, x.shape) / 4
    total = out[0, : len(x)].copy()
    for i in range(1, splits - 1):
        total = total + out[i, : len(x)]
    out[splits - 1, : len(x)] = rest - total
    return out


def joined(x: Array, splits: int) -> Array:
    """What the kernel reads: the planes added in order, in float32."""
    if splits == 1:
        return x
    total = x[0].copy()
    for i in range(1, splits):
        total = total + x[i]
    return total


def run(gpu: Gpu, case: Case, rows: int, operands: Sequence[Array]) -> tuple[list[Array], ...]:
    """Run the case; returns its outputs and its operands afterwards."""
    outputs = [empty(type, case.bound) for type in case.outputs]
    scratch = [np.full(case.scratch, np.nan, np.float32)] if case.scratch else []
    arrays = [*operands, *outputs, *scratch]
    pointers = [gpu.upload(a) for a in arrays]
    gpu.run(case.launches, case.op.name, ARCH, rows, pointers)
    after = [gpu.download(p, a) for p, a in zip(pointers, arrays, strict=True)]
    for pointer in pointers:
        driver.cuMemFree(pointer)
    count = len(operands)
    return after[count : count + len(outputs)], after[:count]


def unpack_a8(data: Array, inputs: int) -> tuple[Array, Array]:
    """a8 tiles as float64 [rows, inputs] and scales [rows, inputs / 32]; checks the sums."""
    pieces = inputs // 64
    tiles = data.reshape(-1, pieces * 640)
    values, scales = [], []
    for tile in tiles:
        q = tile[: pieces * 512].view(np.int8).reshape(pieces, 8, 4, 4, 4)
        q = q.transpose(1, 0, 3, 2, 4).reshape(8, inputs)  # row; piece, r, t, e
        entries = tile[pieces * 512 :].reshape(inputs // 32, 4, 16)
        d = entries[:, :, :8].copy().view(np.float32).reshape(-1, 8).T
        sums = entries[:, :, 8:].copy().view(np.int16).reshape(-1, 8, 2).transpose(1, 0, 2)
        wanted = q.astype(np.int32).reshape(8, -1, 2, 16).sum(axis=3)
        np.testing.assert_array_equal(sums, wanted)
        values.append(q * np.repeat(d.astype(np.float64), 32, axis=1))
        scales.append(d)
    return np.concatenate(values), np.concatenate(scales)


def exact(case: Case, operands: Sequence[Array]) -> list[Array]:
    """Operands as the reference takes them."""
    found = []
    for i, array in enumerate(operands):
        value = joined(array, case.splits) if i in case.planes else array
        found.append(value if value.dtype == np.int32 else value.astype(np.float64))
    return found


def check_values(case: Case, rows: int, outputs: Sequence[Array], after: Sequence[Array]) -> None:
    given = exact(case, case.operands)
    if isinstance(case.op, Attention):
        wanted = [attention_reference(case.op, rows, *given)]
    else:
        wanted = list(case.op.reference(rows, *given))
    for got, want, type in zip(outputs, wanted, case.outputs, strict=True):
        if type.dtype == "a8":
            check_a8(got, want, rows, type.max_shape[1], case)
            continue
        close(got[:rows], want, case.tolerance or TOLERANCE[type.dtype])
        untouched = got[rows:].reshape(-1).view(np.uint8)
        assert (untouched == POISON).all(), "rows past T were written"
    for i, (got, want) in enumerate(zip(after, given, strict=True)):
        if case.op.operand(i).writes:
            type = case.types[i]
            unknown = np.isnan(case.operands[i].astype(np.float64))
            still = np.isnan(want) & unknown if want.dtype != np.int32 else unknown
            close(
                np.where(still, 0, got.astype(np.float64)),
                np.where(still, 0, want),
                TOLERANCE[type.dtype],
            )
            assert np.isnan(got.astype(np.float64))[still].all(), "a row nobody wrote has changed"
        else:
            assert got.tobytes() == case.operands[i].tobytes(), "a read-only operand was written"


def close(got: Array, want: Array, tolerance: float) -> None:
    scale = max(1.0, float(np.abs(want).max())) if want.size else 1.0
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=0, atol=tolerance * scale
    )


def check_a8(got: Array, want: Array, rows: int, inputs: int, case: Case) -> None:
    """Rows within half a step of the values; the scale is a 127th of the largest; zeros past T.

    `want` is already quantised by the reference, so a value may sit one step off.
    """
    values, scales = unpack_a8(got, inputs)
    step = np.repeat(scales[:rows].astype(np.float64), 32, axis=1)
    slack = (case.tolerance or 1e-5) * np.abs(want).max()
    assert (np.abs(values[:rows] - want) <= 1.01 * step + slack).all()
    blocks = np.abs(want).reshape(rows, -1, 32).max(axis=2)
    np.testing.assert_allclose(scales[:rows] * 127, blocks, rtol=1e-5, atol=slack)
    off = np.abs(values[:rows] - want) > 0.01 * step + slack
    assert off.mean() < (0.2 if case.tolerance else 0.002), "too many values round another way"
    assert not values[rows:].any(), "rows past T are not zero"
    assert not scales[rows:].any(), "rows past T are not zero"


def take_rows(case: Case, operands: Sequence[Array], order: Sequence[int]) -> list[Array]:
    """Operands whose row i is row order[i]; rows beyond are poisoned."""
    moved = []
    for i, array in enumerate(operands):
        if i not in case.by_row:
            moved.append(array.copy())
            continue
        tall = case.splits > 1 and i in case.planes
        rows = array if not tall else np.moveaxis(array, 0, 1)
        new = np.full(rows.shape, -3, rows.dtype) if rows.dtype == np.int32 else (
            np.full(rows.shape, np.nan, rows.dtype)
        )  # fmt: skip
        new[: len(order)] = rows[list(order)]
        moved.append(new if not tall else np.ascontiguousarray(np.moveaxis(new, 0, 1)))
    return moved


def row_bytes(case: Case, output: Array, type: TensorType, row: int) -> bytes:
    if type.dtype == "a8":
        values, scales = unpack_a8(output, type.max_shape[1])
        return values[row].tobytes() + scales[row].tobytes()
    return output[row].tobytes()


def check_rows(gpu: Gpu, case: Case, rows: int, whole: Sequence[Array]) -> None:
    """A row has the same bits in a prefix of the rows, and alone as the first row."""
    for row in sorted({0, rows // 2, rows - 1}):
        for order in (list(range(row + 1)), [row]):
            part, _ = run(gpu, case, len(order), take_rows(case, case.operands, order))
            for got, want, type in zip(part, whole, case.outputs, strict=True):
                alone = row_bytes(case, got, type, len(order) - 1)
                assert alone == row_bytes(case, want, type, row), f"row {row} of {rows}: {order}"


def check_case(gpu: Gpu, case: Case, counts: Sequence[int]) -> None:
    for rows in counts:
        outputs, after = run(gpu, case, rows, case.operands)
        check_values(case, rows, outputs, after)
        if case.outputs:
            check_rows(gpu, case, rows, outputs)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "f32") -> Array:
    return rng.standard_normal(shape).astype(np.float32).astype(STORAGE[dtype])


def weight(rng: np.random.Generator, size: int, dtype: str = "f32") -> Array:
    return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32).astype(STORAGE[dtype])


COUNTS = {1: (1,), 3: (1, 3), 6: (1, 6), 8: (1, 2, 7, 8), 16: (1, 8, 9, 16)}
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
    op, types = RMSNormQuantise(), (x, w, wide)
    launches = k.rmsnorm_launches(op, ARCH, *types, splits=splits)
    cases.append(Case(op, types, launches, [planes, weights[0]], (0,), splits))
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
    for case in cases:
        check_case(gpu, case, COUNTS[bound])


@pytest.mark.parametrize(("bound", "size", "splits", "dtype"), SIZES)
def test_element_wise(gpu: Gpu, bound: int, size: int, splits: int, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, wide = rows_of(bound, size), rows_of(bound, size, dtype="a8")
    rows, other = normal(rng, bound, size) * 4, normal(rng, bound, size)
    planes, others = (split_planes(a, splits, rng) for a in (rows, other))
    zeros = rows.copy()
    zeros[:, :32] = 0
    k = cuda_kernels
    op: Op = Quantise()
    for given in (planes, split_planes(zeros, splits, rng)):
        launches = k.quantise_launches(op, ARCH, x, wide, splits=splits)
        check_case(gpu, Case(op, (x, wide), launches, [given], (0,), splits), COUNTS[bound])
    for act in ("gelu_tanh", "silu"):
        for out in (x, wide):
            op = GateMul(act)
            launches = k.gate_mul_launches(op, ARCH, x, x, out, splits=splits)
            case = Case(op, (x, x, out), launches, [planes, others], (0, 1), splits,
                        by_row=(0, 1))  # fmt: skip
            if out is wide:  # the op itself gives floats
                outputs, _ = run(gpu, case, bound, case.operands)
                (want,) = op.reference(bound, *exact(case, case.operands))
                check_a8(outputs[0], rounded(want), bound, size, case)
                check_rows(gpu, case, bound, outputs)
            else:
                check_case(gpu, case, COUNTS[bound])


def rounded(x: Array) -> Array:
    from memra_compiler.ops.quantise import quantise_reference

    return quantise_reference(x)


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
    outputs, _ = run(gpu, case, bound, given)
    check_a8(outputs[0], rounded(np.concatenate(given, axis=1)), bound, first + second, case)
    check_rows(gpu, case, bound, outputs)


HEADS = [(8, 32, 16, 256, 4, "f16"), (8, 32, 4, 512, 2, "f16"), (16, 16, 1, 512, 1, "bf16"),
         (6, 4, 2, 64, 1, "f32"), (3, 2, 2, 32, 3, "bf16"), (3, 6, 3, 96, 1, "f16"),
         (8, 8, 4, 128, 2, "f16")]  # fmt: skip


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
    caches = [np.full(plane.max_shape, np.nan, STORAGE[kv]) for _ in range(2)]
    k, counts = cuda_kernels, COUNTS[bound]

    op: Op = NormRope()
    launches = k.norm_rope_launches(op, ARCH, q, turns, w, q, splits=splits)
    check_case(gpu, Case(op, (q, turns, w, q), launches, [queries, angles, weights[0]], (0,),
                         splits, by_row=(0, 1)), counts)  # fmt: skip
    for v_norm in ("unit", "none"):
        op = NormRopeAppend(v_norm=v_norm)
        types = (key, key, turns, w, at, plane, plane)
        launches = k.norm_rope_append_launches(op, ARCH, *types, splits=splits)
        given = [keys, values, angles, weights[0], positions, *caches]
        check_case(gpu, Case(op, types, launches, given, (0, 1), splits), counts)
        op = NormRopeQKV(v_norm=v_norm)
        types = (q, key, key, turns, w, w, at, plane, plane, q)
        launches = k.norm_rope_qkv_launches(op, ARCH, *types, splits=splits)
        given = [queries, keys, values, angles, *weights, positions, *caches]
        check_case(gpu, Case(op, types, launches, given, (0, 1, 2), splits, by_row=(0, 1, 2, 3, 6)),
                   counts)  # fmt: skip
    op = KvAppend()
    types = (key, key, at, plane, plane)
    launches = k.kv_append_launches(op, ARCH, *types, splits=splits)
    given = [keys, values, positions, *caches]
    check_case(gpu, Case(op, types, launches, given, (0, 1), splits), counts)


# -- attention -------------------------------------------------------------------------------------


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
]  # fmt: skip


def attention_reference(op: Attention, rows: int, *arrays: Array) -> Array:
    """`Attention.reference`, a K/V head at a time."""
    q, ends, k_cache, v_cache = arrays
    kv_heads, limit, size = k_cache.shape
    q = q[:rows].reshape(rows, kv_heads, -1, size)
    out = np.zeros_like(q)
    low = min((max(0, e - op.span) if op.span else 0) for e in ends[:rows])
    at = np.arange(low, max(ends[:rows]))
    for n in range(kv_heads):
        keys, values = k_cache[n, at % limit], v_cache[n, at % limit]
        for t in range(rows):
            first = max(0, ends[t] - op.span) if op.span else 0
            part = slice(first - low, ends[t] - low)
            score = q[t, n] @ keys[part].T * op.scale
            share = np.exp(score - score.max(axis=1, keepdims=True))
            out[t, n] = share @ values[part] / share.sum(axis=1, keepdims=True)
    return out.reshape(rows, -1)


def attention_case(cache: Cache, bound: int, end: int, seed: int, out: str = "f32") -> Case:
    """Rows that end at `end`, and before it by one each; unwritten cache rows are NaN."""
    rng = np.random.default_rng(seed)
    q, at = rows_of(bound, cache.heads * cache.d), rows_of(bound, dtype="i32")
    ends = np.maximum(end - np.arange(bound)[::-1], 1).astype(np.int32)
    planes = [np.full(cache.plane.max_shape, np.nan, np.float32) for _ in range(2)]
    written = np.arange(max(0, end - cache.rows), end) % cache.rows
    shape = (cache.kv_heads, len(written), cache.d)
    for plane in planes:
        plane[:, written] = rng.standard_normal(shape, dtype=np.float32)
    stored = [plane.astype(STORAGE[cache.kv]) for plane in planes]
    queries = normal(rng, bound, cache.heads * cache.d) * np.float32(3 / cache.d**0.5)
    op = Attention(1.0, cache.span)
    types = (q, at, cache.plane, cache.plane, TensorType(q.shape, out))
    return Case(
        op,
        types,
        cuda_attention.attention_launches(op, ARCH, *types),
        [queries, ends, *stored],
        scratch=cuda_attention.attention_scratch_floats(op, ARCH, *types),
        tolerance={"f32": 1e-5, "f16": 3e-3, "bf16": 1e-3}[cache.kv],
        by_row=(0, 1),
    )


@pytest.mark.parametrize(("name", "rows", "end"), ATTENTION)
def test_attention(gpu: Gpu, name: str, rows: int, end: int) -> None:
    case = attention_case(CACHES[name], rows, end, seed=end + rows)
    outputs, after = run(gpu, case, rows, case.operands)
    assert isinstance(case.op, Attention)
    want = attention_reference(case.op, rows, *exact(case, case.operands))
    close(outputs[0], want, case.tolerance or 0)
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


@pytest.mark.parametrize("name", ["tiny-f16", "31b-window", "31b-global", "12b-global", "tiny-f32"])
def test_attention_row_does_not_feel_later_rows(gpu: Gpu, name: str) -> None:
    """Keys and values past a row's end, as large as they come, change none of its bits."""
    cache, end = CACHES[name], 200
    case = attention_case(cache, 8, end, seed=6)
    narrow = attention_case(cache, 1, end, seed=6)
    small = np.float32(1e-3)
    case.operands[3] = (case.operands[3].astype(np.float32) * small).astype(STORAGE[cache.kv])
    loud = [a.copy() for a in case.operands]
    loud[3][:, end - 7 : end] = 60000
    loud[2][:, end - 7 : end] *= -2
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
        close(outputs[0], want, case.tolerance or 0)
        check_rows(gpu, case, 6, outputs)


# -- the greedy choice and the device block --------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "vocab", "splits", "suppress"),
    [
        (8, 262144, 1, (5, 258882, 258883)),
        (8, 4096, 3, ()),
        (16, 1024, 1, (0,)),
        (1, 262144, 1, ()),
        (3, 64, 1, (0, 3, 63)),
    ],
)
def test_argmax(gpu: Gpu, bound: int, vocab: int, splits: int, suppress: tuple[int, ...]) -> None:
    rng = np.random.default_rng(9)
    logits, out = rows_of(bound, vocab), rows_of(bound, dtype="i32")
    op = ArgMax(suppress)
    values = normal(rng, bound, vocab) * 5
    for token in suppress:
        values[:, token] = 50
    last, first = vocab - 1, next(i for i in range(vocab) if i not in suppress)
    values[0, [last, vocab // 2, first]] = 40  # a tie: the lowest id wins
    if bound > 2:
        values[1] = -np.abs(values[1])
        values[1, vocab // 2] = -0.0
        values[1, vocab // 2 + 1] = 0.0
        values[2] = -np.inf
    if bound > 6:
        values[3, vocab // 3] = np.nan
        values[4, last] = np.inf
        values[5, 17] = -np.inf
        values[6] = np.finfo(np.float32).min
    case = Case(
        op,
        (logits, out),
        cuda_state.argmax_launches(op, ARCH, logits, out, splits=splits),
        [split_planes(values, splits, rng)],
        (0,),
        splits,
        scratch=cuda_state.argmax_scratch_floats(op, logits),
    )
    if splits > 1:  # infinities do not survive a difference of planes
        values[~np.isfinite(values)] = 0
        case.operands = [split_planes(values, splits, rng)]
    check_case(gpu, case, COUNTS[bound])


STATE_OPS: dict[type[Op], Any] = {
    Positions: cuda_state.positions_launches,
    ReadTokens: cuda_state.read_tokens_launches,
    ReadRow: cuda_state.read_row_launches,
    WriteRows: cuda_state.write_rows_launches,
    Begin: cuda_state.begin_launches,
    DraftToken: cuda_state.draft_token_launches,
    Advance: cuda_state.advance_launches,
    Accept: cuda_state.accept_launches,
    Rollback: cuda_state.rollback_launches,
    Commit: cuda_state.commit_launches,
    AdaptDepth: cuda_state.adapt_depth_launches,
}
STATE_CASES = [
    pytest.param(cls, sample, id=f"{cls.name}-{i}")
    for cls in STATE_OPS
    for i, sample in enumerate(cls.samples())
]


def sample_operands(op: Op, sample: Sample) -> list[Array]:
    rng = np.random.default_rng(7)
    given = dict(sample.values)
    stored = []
    for i, type in enumerate(sample.types):
        name = op.operand(i).name
        value = given[name](rng) if name in given else rng.standard_normal(type.max_shape)
        stored.append(np.asarray(value).astype(STORAGE[type.dtype]))
    return stored


@pytest.mark.parametrize(("cls", "sample"), STATE_CASES)
def test_state_op_is_exact(gpu: Gpu, cls: type[Op], sample: Sample) -> None:
    op = cls(**dict(sample.attrs))
    given = sample_operands(op, sample)
    outputs = op.infer(*sample.types)
    bound = max([sample.rows, *(t.max_shape[0] for t in outputs)])
    types = (*sample.types, *outputs)
    case = Case(op, types, STATE_OPS[cls](op, ARCH, *types), given)
    made = [empty(t, bound) for t in outputs]
    pointers = [gpu.upload(a) for a in (*given, *made)]
    gpu.run(case.launches, op.name, ARCH, sample.rows, pointers)
    after = [gpu.download(p, a) for p, a in zip(pointers, (*given, *made), strict=True)]
    want = [a.copy() for a in given]
    results = op.reference(sample.rows, *want)
    for got, expected in zip(after, want, strict=False):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(after[len(given) :], results, strict=True):
        np.testing.assert_array_equal(got[: sample.rows], expected)
        assert (got[sample.rows :].reshape(-1).view(np.uint8) == POISON).all()


def settle_states() -> Iterator[dict[str, int]]:
    base = {"capacity": 100, "depth_cap": 7, "floor_short": 4, "floor_deep": 1,
            "floor_boundary": 50, "depth_initial": 3, "ring_count": 4093, "rounds": 3}  # fmt: skip
    for position in (0, 7, 49, 93, 99):
        for drafted in (0, 1, 7, 15):
            for adaptive in (0, 1):
                yield base | {"position": position, "drafted": drafted, "adaptive": adaptive}


@pytest.mark.parametrize("agree", [0, 3, 15])
@pytest.mark.parametrize(("skip", "shift", "fresh"), [(False, 0, False), (True, 1, True)])
def test_settle_is_its_four_ops(gpu: Gpu, agree: int, skip: bool, shift: int, fresh: bool) -> None:
    parts = Accept(), Rollback(skip), Commit(shift), AdaptDepth(fresh)
    sample = Commit.samples()[0]
    types = (*sample.types[:3], TensorType((BATCH_ROWS, 5376)), TensorType((5376,)),
             TensorType((4096,), "i32"), sample.types[6])  # fmt: skip
    launches = cuda_state.settle_launches(parts[1], parts[2], parts[3], ARCH, *types)
    rng = np.random.default_rng(agree)
    for slots in settle_states():
        state = np.zeros(types[0].max_shape, np.int32)
        for name, value in slots.items():
            state[slot(name)] = value
        choice = rng.integers(5, 50, BATCH_ROWS).astype(np.int32)
        batch = np.r_[7, choice[:-1]].astype(np.int32)
        batch[agree + 1 :] += 1
        eos = np.array([choice[2], 1, -1, -1, -1, -1, -1, -1], np.int32)
        given = [state, batch, choice, normal(rng, BATCH_ROWS, 5376), normal(rng, 5376),
                 rng.integers(0, 9, 4096).astype(np.int32), eos]  # fmt: skip
        pointers = [gpu.upload(a) for a in given]
        gpu.run(launches, "settle", ARCH, 1, pointers)
        after = [gpu.download(p, a) for p, a in zip(pointers, given, strict=True)]
        for pointer in pointers:
            driver.cuMemFree(pointer)
        want = [a.copy() for a in given]
        parts[0].reference(1, *want[:3])
        parts[1].reference(1, want[0])
        parts[2].reference(1, *want)
        parts[3].reference(1, want[0])
        for got, expected in zip(after, want, strict=True):
            np.testing.assert_array_equal(got, expected)

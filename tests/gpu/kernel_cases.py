"""What tests of single kernels share: a case, how it is run, and everything it must satisfy.

Each case checks the values of all rows, that rows past T, guard bytes and read-only planes are
untouched, and that a row has the same bits alone, in any company and at any place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from gpu_driver import ARCH, Gpu
from scheduled_bundle import Bundled
from worst_errors import note

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.base import Op
from memra_compiler.ops.cuda import AnyLaunch
from memra_compiler.ops.kv_rows import cache_values, encode_rows
from memra_compiler.ops.quantise import quantise_reference

STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i32": np.int32,
           "head_row": np.int32, "q8_0_rows": np.uint8}  # fmt: skip
POISON = 0x7E  # as a float 8.4e37, as a half NaN
#: Largest error, relative to the largest value, by the coarsest type that is written.
TOLERANCE = {"f32": 3e-6, "f16": 1e-3, "bf16": 8e-3, "i32": 0, "head_row": 0,
             "q8_0_rows": 9e-3}  # fmt: skip

Array = np.ndarray


def rows_of(bound: int, *shape: int, dtype: str = "f32") -> TensorType:
    return TensorType((Sym("T", bound), *shape), dtype)


def stored_rows(values: Array, dtype: str) -> Array:
    """Rows of a cache as they are stored."""
    return encode_rows(values) if dtype == "q8_0_rows" else values.astype(STORAGE[dtype])


@dataclass
class Case:
    """A kernel, its operands as stored, and which of them are split into partial planes."""

    op: Op
    types: tuple[TensorType, ...]
    launches: tuple[AnyLaunch | Bundled, ...]
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
    gpu.free(pointers)
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
        as_stored = value.dtype in (np.int32, np.uint8)  # bytes are cache rows
        found.append(value.copy() if as_stored else value.astype(np.float64))
    return found


def check_values(case: Case, rows: int, outputs: Sequence[Array], after: Sequence[Array]) -> None:
    given = exact(case, case.operands)
    wanted = case.op.reference(rows, *given)
    for got, want, type in zip(outputs, wanted, case.outputs, strict=True):
        if type.dtype == "a8":
            check_a8(got, want, rows, type.max_shape[1], case)
            continue
        close(got[:rows], want, case.tolerance or TOLERANCE[type.dtype], case.op.name)
        untouched = got[rows:].reshape(-1).view(np.uint8)
        assert (untouched == POISON).all(), "rows past T were written"
    for i, (got, want) in enumerate(zip(after, given, strict=True)):
        if case.op.operand(i).writes:
            type = case.types[i]
            if type.dtype == "q8_0_rows":
                assert (got != want).mean() < 0.01, "too many bytes of cache rows differ"
                used = type.max_shape[-1] // 16 * 17
                assert not (got != want)[..., used:].any(), "what fills up a row is not zero"
            got, want, before = (cache_values(x) for x in (got, want, case.operands[i]))
            still = np.isnan(want) & np.isnan(before)
            close(
                np.where(still, 0, got), np.where(still, 0, want), TOLERANCE[type.dtype],
                case.op.name,
            )  # fmt: skip
            assert np.isnan(got)[still].all(), "a row nobody wrote has changed"
        else:
            assert got.tobytes() == case.operands[i].tobytes(), "a read-only operand was written"


def close(got: Array, want: Array, tolerance: float, family: str) -> None:
    """No element is off by more than `tolerance` of the largest (at least 1)."""
    scale = max(1.0, float(np.abs(want).max())) if want.size else 1.0
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):  # equal infinities are no difference
        off = np.where(got == want, 0, np.abs(got - want))
    note(family, float(np.max(off, initial=0)) / scale, tolerance)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


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


def check_cases(gpu: Gpu, cases: Sequence[Case], counts: Sequence[int]) -> None:
    """Everything a case must satisfy, at each number of rows."""
    gpu.prepare([(launch, case.op.name) for case in cases for launch in case.launches], ARCH)
    for case in cases:
        for rows in counts:
            outputs, after = run(gpu, case, rows, case.operands)
            check_values(case, rows, outputs, after)
            if case.outputs:
                check_rows(gpu, case, rows, outputs)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "f32") -> Array:
    return rng.standard_normal(shape).astype(np.float32).astype(STORAGE[dtype])


def weight(rng: np.random.Generator, size: int, dtype: str = "f32") -> Array:
    return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32).astype(STORAGE[dtype])


#: Rows that are run, by the number a kernel is compiled for.
COUNTS = {
    1: (1,), 3: (1, 3), 6: (1, 6), 8: (1, 2, 7, 8), 16: (1, 8, 9, 16), 64: (1, 17, 64),
}  # fmt: skip


def rounded(x: Array) -> Array:
    """Values as int8 rows hold them."""
    return quantise_reference(x)

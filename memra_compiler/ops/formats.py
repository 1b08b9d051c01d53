"""Weight storage formats: how sixteen stored elements become float32, and their NumPy meaning.

Weights stay in memory as the file stores them; kernels decode them chunk by chunk.
Source: block layouts of llama.cpp, ggml/src/ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_compiler.ir.types import BLOCK_FORMATS, DTYPE_BYTES, TensorType
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel

#: Sixteens of a block as float32x16, by their number. What they share is computed once.
Chunks = Callable[[int], Expr]
#: read(kernel, weights, byte offset of the block)
Reader = Callable[[Kernel, Buffer, Expr], Chunks]

FLOAT_FORMATS = ("f32", "f16", "bf16")
WEIGHT_FORMATS = (*FLOAT_FORMATS, *BLOCK_FORMATS)
LINE_BYTES = 64


def _bytes(k: Kernel, w: Buffer, at: Expr) -> Expr:
    """Sixteen bytes as int32."""
    return k.cast(k.load(w, at, LANES), "int32", LANES)


def spread_half(k: Kernel, w: Buffer, at: Expr) -> Expr:
    """A float16 at an even byte offset, as float32 in every lane.

    Spread before it is widened: a lone float16 would be inserted into a register that the last
    block still uses, and blocks would wait for each other.
    """
    half = k.splat(k.reinterpret(k.load(w, at, 2), "uint16"), "uint16")
    return k.let(k.cast(k.reinterpret(half, "float16", LANES), "float32", LANES))


def _int(k: Kernel, value: int) -> Expr:
    return k.splat(value, "int32")


def _float(k: Kernel, q: Expr) -> Expr:
    return k.cast(q, "float32", LANES)


def _by_lane(k: Kernel, below: int, a: Expr, b: Expr) -> Expr:
    """`a` in lanes before `below`, `b` in the others."""
    return k.select(k.iota() < _int(k, below), a, b)


def _spread(k: Kernel, vector: Expr, lane: int) -> Expr:
    """One lane in every lane."""
    return k.shuffle([vector], [lane] * LANES)


def _read_q8_0(k: Kernel, w: Buffer, at: Expr) -> Chunks:
    scale = spread_half(k, w, at)

    def chunk(c: int) -> Expr:
        q = k.reinterpret(k.load(w, at + 2 + LANES * c, LANES), "int8", LANES)
        return _float(k, q) * scale

    return chunk


def _read_q4_0(k: Kernel, w: Buffer, at: Expr) -> Chunks:
    scale, q = spread_half(k, w, at), k.let(_bytes(k, w, at + 2))

    def chunk(c: int) -> Expr:
        nibble = q >> _int(k, 4) if c else q & _int(k, 15)
        return _float(k, nibble - _int(k, 8)) * scale

    return chunk


def _read_k(k: Kernel, w: Buffer, at: Expr, q: Callable[[int], Expr]) -> Chunks:
    """A q4_k or q5_k block, `q` being its integers: q * scale - minimum, both by sub-block of 32.

    Twelve bytes hold eight 6-bit scales and eight 6-bit minima. They are unpacked together; the
    lanes are scales 0-3, minima 0-3, scales 4-7, minima 4-7, the latter two split over two bytes.
    """
    packed = k.let(k.load(w, at, LANES))
    first, last = list(range(4, 12)), list(range(12, 16))
    low = k.cast(k.shuffle([packed], [*first, *last, *last]), "int32", LANES)
    high = k.cast(k.shuffle([packed], [*first, *first]), "int32", LANES)
    low = low >> _by_lane(k, 12, _int(k, 0), _int(k, 4))
    low = low & _by_lane(k, 8, _int(k, 63), _int(k, 15))
    high = (high >> _int(k, 2)) & _by_lane(k, 8, _int(k, 0), _int(k, 48))
    scale, minimum = spread_half(k, w, at), k.splat(0.0) - spread_half(k, w, at + 2)
    by_four = [*range(4), *range(20, 24)]
    unit = k.shuffle([scale, minimum], [*by_four, *by_four])
    scales = k.let(_float(k, low | high) * unit)

    def chunk(c: int) -> Expr:
        lane = c // 2 % 4 + 8 * (c // 8)
        return k.fma(_float(k, q(c)), _spread(k, scales, lane), _spread(k, scales, lane + 4))

    return chunk


def _k_nibbles(k: Kernel, w: Buffer, at: Expr, c: int) -> Expr:
    sub = c // 2
    q = _bytes(k, w, at + 32 * (sub // 2) + LANES * (c % 2))
    return q >> _int(k, 4) if sub % 2 else q & _int(k, 15)


def _move(k: Kernel, q: Expr, left: int) -> Expr:
    """Shift left, or right if `left` is negative."""
    return q << _int(k, left) if left >= 0 else q >> _int(k, -left)


def _read_q4_k(k: Kernel, w: Buffer, at: Expr) -> Chunks:
    return _read_k(k, w, at, lambda c: _k_nibbles(k, w, at + 16, c))


def _read_q5_k(k: Kernel, w: Buffer, at: Expr) -> Chunks:
    high = [k.let(_bytes(k, w, at + 16 + LANES * side)) for side in range(2)]

    def q(c: int) -> Expr:
        bit = _move(k, high[c % 2], 4 - c // 2) & _int(k, 16)
        return _k_nibbles(k, w, at + 48, c) | bit

    return _read_k(k, w, at, q)


def _read_q6_k(k: Kernel, w: Buffer, at: Expr) -> Chunks:
    scales = k.reinterpret(k.load(w, at + 192, LANES), "int8", LANES)
    scales = k.let(_float(k, scales) * spread_half(k, w, at + 208))
    high = [k.let(_bytes(k, w, at + 128 + LANES * part)) for part in range(4)]

    def chunk(c: int) -> Expr:
        half, quarter, side = c // 8, (c % 8) // 2, c % 2
        low = _bytes(k, w, at + 64 * half + 32 * (quarter % 2) + LANES * side)
        low = low >> _int(k, 4) if quarter // 2 else low & _int(k, 15)
        bits = _move(k, high[2 * half + side], 4 - 2 * quarter) & _int(k, 48)
        return _float(k, (low | bits) - _int(k, 32)) * _spread(k, scales, c)

    return chunk


READERS: dict[str, Reader] = {
    "q4_0": _read_q4_0,
    "q8_0": _read_q8_0,
    "q4_k": _read_q4_k,
    "q5_k": _read_q5_k,
    "q6_k": _read_q6_k,
}


def decode_step(k: Kernel, w: Buffer, row: Expr, number: Expr) -> Chunks:
    """Step `number` of row `row` of a weight `[rows, width]`."""
    at = k.let(_place(w, row, number))
    if w.format in FLOAT_FORMATS:
        return lambda c: k.floats(w, at + LANES * c)
    return READERS[w.format](k, w, at)


def prefetch_step(k: Kernel, w: Buffer, row: Expr, number: Expr) -> None:
    """Ask for the cache lines of a step, which may lie past the end."""
    at = k.let(_place(w, row, number))
    stored = BLOCK_FORMATS[w.format][1] if w.format in BLOCK_FORMATS else step(w.format)
    line = LINE_BYTES // DTYPE_BYTES.get(w.format, 1)
    for start in range(0, stored, line):
        k.prefetch(w, at + start)


def _place(w: Buffer, row: Expr, number: Expr) -> Expr:
    """Where a step begins, in elements of the buffer: bytes of a block format."""
    width = w.type.max_shape[1]
    if w.format in FLOAT_FORMATS:
        return row * width + number * step(w.format)
    return row * w.type.row_bytes + number * BLOCK_FORMATS[w.format][1]


def decode(k: Kernel, w: Buffer, row: Expr, width: int, column: Expr, chunk: int) -> Expr:
    """Elements `[column + 16 chunk, ... + 16)` of row `row` of `w [rows, width]`, as float32.

    `column` is a multiple of `step(format)`; `chunk` counts sixteens inside that step.
    """
    return decode_step(k, w, row, k.floor_div(column, step(w.format)))(chunk)


def step(format: str) -> int:
    """Elements that share one decoding step: a block, or 32 for float formats."""
    return BLOCK_FORMATS[format][0] if format in BLOCK_FORMATS else 32


def dequantise(data: npt.NDArray[np.uint8], type: TensorType) -> npt.NDArray[np.float64]:
    """Stored bytes as float64 values of shape `type.shape`: the reference of every decoder."""
    shape = type.max_shape
    if type.dtype == "f32":
        return data.view(np.float32).reshape(shape).astype(np.float64)
    if type.dtype in ("i32", "i64"):  # token ids, which float64 holds exactly
        return data.view(f"int{8 * DTYPE_BYTES[type.dtype]}").reshape(shape).astype(np.float64)
    if type.dtype == "f16":
        return data.view(np.float16).reshape(shape).astype(np.float64)
    if type.dtype == "bf16":
        bits = data.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape).astype(np.float64)
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, type.dtype.upper())
    values: Any = gguf.quants.dequantize(data.reshape(-1, type.row_bytes), kind)
    return np.asarray(values, np.float64).reshape(shape)


def random_bytes(type: TensorType, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Stored bytes of plausible random weights (about unit size) in the given format."""
    if type.dtype in FLOAT_FORMATS:
        values = rng.standard_normal(type.elements).astype(np.float32)
        if type.dtype == "f32":
            return values.view(np.uint8)
        if type.dtype == "f16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = BLOCK_FORMATS[type.dtype]
    data = rng.integers(0, 256, (type.elements // block, size), dtype=np.uint8)
    places = {"q4_0": [0], "q8_0": [0], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208]}[type.dtype]
    typical = {"q4_0": 0.2, "q8_0": 0.02, "q4_k": 0.005, "q5_k": 0.0025, "q6_k": 0.002}[type.dtype]
    for at in places:
        scales = (typical * rng.uniform(0.5, 1.5, len(data))).astype(np.float16)
        data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(-1)

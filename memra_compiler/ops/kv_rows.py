"""Rows of key and value caches: what each format stands for, and how a CPU kernel handles them.

Float caches hold values rounded to nearest even. `q8_0` caches hold blocks of 32 values along the
head, llama.cpp's q8_0:

    d = f16(max|x| / 127)        q = rint(x * (127 / max|x|)), half to even        x ~ f16(q * d)

llama.cpp multiplies by 1 / (max|x| / 127) and rounds halves away from zero, so a q may differ by
one where x lies at the middle of two steps. Products q * d are exact in float32 and are rounded to
f16 because tensor cores take f16. A block with a NaN or an infinity is NaN throughout; one whose d
is zero in f16 is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memra_compiler.ir.types import CACHE_BLOCKS, TensorType
from memra_compiler.ops.base import Array
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.formats import spread_half
from memra_compiler.ops.quantise import emit_quantised, quantised_blocks

BLOCK = CACHE_BLOCKS["q8_0_rows"]
#: What storing a row in a format does to its values, and what reading gives; for numeric classes.
STORES = {
    "q8_0_rows": "round to q8_0: f16(max/127) per 32, nearest even",
}
READS = {"q8_0_rows": "f16(q8_0)"}


def stores(cache: TensorType) -> str:
    """How values are rounded into a cache."""
    return STORES.get(cache.dtype, f"round to {cache.dtype}")


def reads(cache: TensorType) -> str:
    """What the values of a cache are."""
    return READS.get(cache.dtype, cache.dtype)


# -- reference -------------------------------------------------------------------------------------


def head_width(plane: Array) -> int:
    """Elements of a row of a plane as the interpreter holds it: bytes are those of `q8_0`."""
    size = int(plane.shape[-1])
    if plane.dtype != np.uint8:
        return size
    return size * 16 // 17 // BLOCK * BLOCK  # a row is 17/16 of its elements, and some zeros


def encode_rows(x: Array) -> Array:
    """Rows [..., d] as the bytes of a `q8_0` cache."""
    d = x.shape[-1]
    out = np.zeros((*x.shape[:-1], TensorType((d,), "q8_0_rows").row_bytes), np.uint8)
    q, scale = quantised_blocks(x, np.float16)
    out[..., :d] = q.reshape(x.shape).astype(np.int8).view(np.uint8)
    out[..., d : d + d // BLOCK * 2] = np.ascontiguousarray(scale[..., 0]).view(np.uint8)
    return out


def cache_values(plane: Array) -> Array:
    """The values [..., d] of rows of a plane, in float64."""
    if plane.dtype != np.uint8:
        return plane.astype(np.float64)
    d = head_width(plane)
    q = plane[..., :d].copy().view(np.int8).astype(np.float32)
    scale = plane[..., d : d + d // BLOCK * 2].copy().view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (q * np.repeat(scale, BLOCK, axis=-1)).astype(np.float16)
    return rounded.astype(np.float64)


def store_rows_reference(plane: Array, rows: Array, positions: Array) -> None:
    """Write `rows [T, n, d]` at their positions."""
    stored = encode_rows(rows) if plane.dtype == np.uint8 else rows.astype(plane.dtype)
    for row, position in zip(stored, positions, strict=False):
        plane[:, int(position) % plane.shape[1]] = row


# -- CPU -------------------------------------------------------------------------------------------


def row_step(cache: TensorType) -> int:
    """Elements of a flat cache from one row to the next."""
    return cache.stored_shape[-1]


def emit_row_values(k: Kernel, cache: Buffer, row: Expr, column: Expr | int) -> Expr:
    """Sixteen values from `column`, a multiple of 16, of the row that begins at `row`."""
    if cache.format not in CACHE_BLOCKS:
        return k.floats(cache, row + column)
    at = row + cache.type.max_shape[-1] + k.floor_div(k.index(column), BLOCK) * 2
    q = k.reinterpret(k.load(cache, row + column, LANES), "int8", LANES)
    value = k.cast(q, "float32", LANES) * spread_half(k, cache, at)
    return k.cast(k.cast(value, "float16", LANES), "float32", LANES)


def emit_row(k: Kernel, cache: Buffer, row: Expr, values: Callable[[Expr], Expr]) -> None:
    """Round a row into a cache at `row`; `values(c)` are its sixteen values from column c."""
    size = cache.type.max_shape[-1]
    if cache.format not in CACHE_BLOCKS:
        with k.loop(size // LANES) as i:
            k.put_floats(cache, row + i * LANES, values(i * LANES))
        return
    with k.loop(size // BLOCK) as b:
        low, high = (k.let(values(b * BLOCK + at)) for at in (0, LANES))
        d, q = emit_quantised(k, low, high, "float16")
        for i, part in enumerate(q):
            k.store(cache, row + b * BLOCK + i * LANES, part, LANES)
        k.store(cache, row + size + b * 2, k.reinterpret(d, "uint8", 2), 2)
    for at in range(size + size // BLOCK * 2, cache.type.row_bytes):
        k.store(cache, row + at, k.const(0, "uint8"))

"""Weight storage formats: how sixteen stored elements become float32, and their NumPy meaning.

Weights stay in memory as the file stores them; kernels decode them chunk by chunk.
Source: block layouts of llama.cpp, ggml/src/ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_compiler.ir.types import BLOCK_FORMATS, TensorType
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel

#: decode(kernel, weights, byte offset of the block, chunk) -> float32x16
Decoder = Callable[[Kernel, Buffer, Expr, int], Expr]

FLOAT_FORMATS = ("f32", "f16", "bf16")
WEIGHT_FORMATS = (*FLOAT_FORMATS, *BLOCK_FORMATS)


def _bytes(k: Kernel, w: Buffer, at: Expr) -> Expr:
    """Sixteen bytes as int32."""
    return k.cast(k.load(w, at, LANES), "int32", LANES)


def _half(k: Kernel, w: Buffer, at: Expr) -> Expr:
    """A float16 at an even byte offset, as float32."""
    return k.cast(k.reinterpret(k.load(w, at, 2), "float16"), "float32")


def _byte(k: Kernel, w: Buffer, at: Expr) -> Expr:
    return k.cast(k.load(w, at), "int32")


def _int(value: int, k: Kernel) -> Expr:
    return k.splat(value, "int32")


def _scaled(k: Kernel, q: Expr, scale: Expr) -> Expr:
    return k.cast(q, "float32", LANES) * k.splat(scale)


def _decode_q8_0(k: Kernel, w: Buffer, at: Expr, chunk: int) -> Expr:
    q = k.reinterpret(k.load(w, at + 2 + LANES * chunk, LANES), "int8", LANES)
    return _scaled(k, q, _half(k, w, at))


def _decode_q4_0(k: Kernel, w: Buffer, at: Expr, chunk: int) -> Expr:
    q = _bytes(k, w, at + 2)
    nibble = q >> _int(4, k) if chunk else q & _int(15, k)
    return _scaled(k, nibble - _int(8, k), _half(k, w, at))


def _k_scale_min(k: Kernel, w: Buffer, at: Expr, sub: int) -> tuple[Expr, Expr]:
    """The 6-bit scale and minimum of sub-block `sub` of a q4_k or q5_k block."""
    scales = at + 4
    if sub < 4:
        return _byte(k, w, scales + sub) & 63, _byte(k, w, scales + sub + 4) & 63
    low = _byte(k, w, scales + sub + 4)
    scale = (low & 15) | ((_byte(k, w, scales + sub - 4) >> 6) << 4)
    return scale, (low >> 4) | ((_byte(k, w, scales + sub) >> 6) << 4)


def _decode_k(k: Kernel, w: Buffer, at: Expr, chunk: int, q: Expr) -> Expr:
    scale, minimum = _k_scale_min(k, w, at, chunk // 2)
    d = _half(k, w, at) * k.cast(scale, "float32")
    m = _half(k, w, at + 2) * k.cast(minimum, "float32")
    negative = k.const(0.0) - m
    return k.fma(k.cast(q, "float32", LANES), k.splat(d), k.splat(negative))


def _k_nibbles(k: Kernel, w: Buffer, at: Expr, chunk: int) -> Expr:
    sub = chunk // 2
    q = _bytes(k, w, at + 32 * (sub // 2) + LANES * (chunk % 2))
    return q >> _int(4, k) if sub % 2 else q & _int(15, k)


def _decode_q4_k(k: Kernel, w: Buffer, at: Expr, chunk: int) -> Expr:
    return _decode_k(k, w, at, chunk, _k_nibbles(k, w, at + 16, chunk))


def _decode_q5_k(k: Kernel, w: Buffer, at: Expr, chunk: int) -> Expr:
    high = _bytes(k, w, at + 16 + LANES * (chunk % 2)) >> _int(chunk // 2, k)
    high = (high & _int(1, k)) << _int(4, k)
    return _decode_k(k, w, at, chunk, _k_nibbles(k, w, at + 48, chunk) | high)


def _decode_q6_k(k: Kernel, w: Buffer, at: Expr, chunk: int) -> Expr:
    half, quarter, side = chunk // 8, (chunk % 8) // 2, chunk % 2
    low = _bytes(k, w, at + 64 * half + 32 * (quarter % 2) + LANES * side)
    low = low >> _int(4, k) if quarter // 2 else low & _int(15, k)
    high = _bytes(k, w, at + 128 + 32 * half + LANES * side) >> _int(2 * quarter, k)
    q = (low | ((high & _int(3, k)) << _int(4, k))) - _int(32, k)
    scale = k.reinterpret(k.load(w, at + 192 + 8 * half + 2 * quarter + side), "int8")
    return _scaled(k, q, _half(k, w, at + 208) * k.cast(scale, "float32"))


DECODERS: dict[str, Decoder] = {
    "q4_0": _decode_q4_0,
    "q8_0": _decode_q8_0,
    "q4_k": _decode_q4_k,
    "q5_k": _decode_q5_k,
    "q6_k": _decode_q6_k,
}


def decode(k: Kernel, w: Buffer, row: Expr, width: int, column: Expr, chunk: int) -> Expr:
    """Elements `[column + 16 chunk, ... + 16)` of row `row` of `w [rows, width]`, as float32.

    `column` is a multiple of `step(format)`; `chunk` counts sixteens inside that step.
    """
    if w.format in FLOAT_FORMATS:
        return k.floats(w, row * width + column + LANES * chunk)
    block, size = BLOCK_FORMATS[w.format]
    at = row * (width // block * size) + (column // block) * size
    return DECODERS[w.format](k, w, at, chunk)


def step(format: str) -> int:
    """Elements that share one decoding step: a block, or 32 for float formats."""
    return BLOCK_FORMATS[format][0] if format in BLOCK_FORMATS else 32


def dequantise(data: npt.NDArray[np.uint8], type: TensorType) -> npt.NDArray[np.float64]:
    """Stored bytes as float64 values of shape `type.shape`: the reference of every decoder."""
    shape = type.max_shape
    if type.dtype == "f32":
        return data.view(np.float32).reshape(shape).astype(np.float64)
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

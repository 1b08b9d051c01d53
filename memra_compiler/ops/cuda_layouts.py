"""NumPy meaning of the CUDA layouts: for tests, and for synthetic weights that skip the repacking.

Weights lie in the tiles of templates/lib/dequant_*.cuh, activations as templates/lib/a8.cuh and
templates/lib/bf16.cuh say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from memra_compiler.ir.types import BLOCK_FORMATS, TensorType
from memra_compiler.ops.cuda import TILE_ROWS

#: Stored or repacked bytes, uint8.
Bytes = npt.NDArray[Any]


def _groups(q: Bytes) -> Bytes:
    """[N, K] codes as [tile, piece, g, t, block, half, element, side]; row 8 side + g of a tile."""
    outputs, inputs = q.shape
    split = q.reshape(outputs // 16, 2, 8, inputs // 64, 2, 2, 4, 4)
    return np.transpose(split, (0, 3, 2, 6, 4, 5, 7, 1))


def _nibbles(q: Bytes) -> Bytes:
    """The low four bits of codes, both rows of a lane in a byte: [tile, piece, 512]."""
    low = _groups(q & 15)
    packed: Bytes = low[..., 0] | low[..., 1] << 4
    return packed.reshape(*packed.shape[:2], 512)


def _scale_pairs(d: Bytes) -> Bytes:
    """f16 scales [N, K/32, 2 bytes] as [tile, piece, g, side, block]: [tile, piece, 64]."""
    tiles, pieces = d.shape[0] // 16, d.shape[1] // 2
    split = d.reshape(tiles, 2, 8, pieces, 2, 2)
    return split.transpose(0, 3, 2, 1, 4, 5).reshape(tiles, pieces, 64)


def _join(parts: Sequence[Bytes], pieces: int) -> Bytes:
    """Parts [tile, piece, bytes] as units: the `pieces` pieces of a part follow each other."""
    units = [p.reshape(p.shape[0], -1, pieces * p.shape[2]) for p in parts]
    return np.concatenate(units, axis=2)


def _repack_q4_0(stored: Bytes) -> Bytes:
    nibbles = stored[:, :, 2:]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    return _join([_nibbles(q.reshape(len(q), -1)), _scale_pairs(stored[:, :, :2])], 1)


def _repack_q8_0(stored: Bytes) -> Bytes:
    q = _groups(stored[:, :, 2:].reshape(len(stored), -1))
    lanes = q.transpose(0, 1, 4, 2, 3, 5, 7, 6)  # tile, piece, block, g, t, half, side, element
    return _join([lanes.reshape(*q.shape[:2], 1024), _scale_pairs(stored[:, :, :2])], 1)


def _repack_q6_k(stored: Bytes) -> Bytes:
    rows, blocks = stored.shape[:2]
    low = stored[:, :, :128].reshape(rows, blocks, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=3).reshape(rows, blocks, 2, 4, 32)
    high = stored[:, :, 128:192].reshape(rows, blocks, 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    q = (low | high << 4).reshape(rows, -1)
    top = _groups(q >> 4)
    shifts = np.array([[0, 2], [4, 6]], np.uint8).reshape(2, 1, 2)
    packed = np.bitwise_or.reduce(np.bitwise_or.reduce(top << shifts, axis=7), axis=5)
    tops = packed.reshape(*packed.shape[:2], 256)
    scales = stored[:, :, 192:208].reshape(rows // 16, 2, 8, blocks * 4, 4)
    scales = scales.transpose(0, 3, 2, 1, 4).reshape(rows // 16, blocks * 4, 64)
    d = stored[:, :, 208:].reshape(rows // 16, 2, 8, blocks, 2).transpose(0, 3, 2, 1, 4)
    whole = _join([_nibbles(q), tops, scales], 4)
    return np.concatenate([whole, d.reshape(rows // 16, blocks, 32)], axis=2)


def _repack_k(stored: Bytes, fifth: bool) -> Bytes:
    rows, blocks = stored.shape[:2]
    nibbles = stored[:, :, -128:].reshape(rows, blocks, 4, 1, 32)
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=3).reshape(rows, blocks, 8, 32)
    parts = []
    if fifth:
        bits = stored[:, :, 16:48].reshape(rows, blocks, 1, 32)
        q = q | (bits >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1) << 4
    codes = q.reshape(rows, -1)
    parts.append(_nibbles(codes))
    if fifth:
        top = _groups(codes >> 4)
        shifts = np.arange(8, dtype=np.uint8).reshape(2, 2, 1, 2)
        packed = np.bitwise_or.reduce(top << shifts, axis=7)
        packed = np.bitwise_or.reduce(np.bitwise_or.reduce(packed, axis=5), axis=4)
        parts.append(packed.reshape(*packed.shape[:2], 128))
    s = stored[:, :, 4:16].astype(np.uint32)
    scale = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], axis=2)
    minimum = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], axis=2)
    both = np.stack([scale.reshape(rows, blocks, 4, 2), minimum.reshape(rows, blocks, 4, 2)], 3)
    bits = both.reshape(rows, blocks, 16, 1) >> np.arange(6, dtype=np.uint32) & 1
    packed = np.packbits(bits.reshape(rows, blocks, 96).astype(np.uint8), 2, "little")
    heads = np.concatenate([stored[:, :, :4], packed], axis=2).reshape(rows // 16, 16, blocks, 16)
    by_unit = heads.transpose(0, 2, 1, 3).reshape(rows // 16, blocks, 256)
    return np.concatenate([_join(parts, 4), by_unit], axis=2)


def _repack_half(stored: Bytes) -> Bytes:
    rows = len(stored)
    q = stored.reshape(rows // 16, 2, 8, -1, 4, 4, 2, 4)  # ..., piece, sixteen, t, pair, 4 bytes
    return q.transpose(0, 3, 4, 2, 5, 6, 1, 7).reshape(rows // 16, -1, 2048)


def repack_reference(data: Bytes, type: TensorType) -> Bytes:
    """Stored bytes in the tiled layout: what the launch of `repack_launches` writes."""
    outputs, inputs = type.max_shape
    if type.dtype in ("f16", "bf16"):
        return _repack_half(data.reshape(outputs, -1)).reshape(-1)
    block, size = BLOCK_FORMATS[type.dtype]
    stored = data.reshape(outputs, inputs // block, size)
    if type.dtype in ("q4_k", "q5_k"):
        return _repack_k(stored, type.dtype == "q5_k").reshape(-1)
    repack = {"q4_0": _repack_q4_0, "q8_0": _repack_q8_0, "q6_k": _repack_q6_k}[type.dtype]
    return repack(stored).reshape(-1)


def a8_quantise(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Rows of floats on the grid of the int8 class: q [T, K] and d [T, K/32].

    A block that is not finite has d = NaN and q = 0.
    """
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    finite = np.isfinite(amax)
    d = np.where(finite, amax / np.float32(127), np.float32(np.nan))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0)).astype(np.float32)
    q = np.clip(np.rint(np.where(finite, blocks, 0) * inverse), -127, 127).astype(np.int8)
    return q.reshape(x.shape), d[..., 0]


def _padded_rows(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    rows = np.zeros((math.ceil(len(x) / TILE_ROWS) * TILE_ROWS, x.shape[1]), np.float32)
    rows[: len(x)] = x
    return rows


def a8_reference(x: npt.NDArray[np.float32]) -> Bytes:
    """Rows of floats in the layout of templates/lib/a8.cuh."""
    q, d = a8_quantise(_padded_rows(x))
    tiles, pieces = len(q) // 8, q.shape[1] // 64
    values = q.reshape(tiles, 8, pieces, 4, 4, 4).transpose(0, 2, 1, 4, 3, 5)
    sums = q.reshape(len(q), -1, 16).astype(np.int16).sum(axis=2, dtype=np.int16)
    tokens = np.empty((tiles, pieces * 2, 4, 2, 2), np.uint32)  # block, pair, {d, s}, row of pair
    scales = d.view(np.uint32).reshape(tiles, 4, 2, pieces * 2)
    tokens[..., 0, :] = scales.transpose(0, 3, 1, 2)
    packed = sums.view(np.uint32).reshape(tiles, 4, 2, pieces * 2)
    tokens[..., 1, :] = packed.transpose(0, 3, 1, 2)
    both = [values.reshape(tiles, -1).view(np.uint8), tokens.reshape(tiles, -1).view(np.uint8)]
    return np.concatenate(both, axis=1).reshape(-1)


def bf16_round(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Floats rounded to bf16, half to even."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def bf16_reference(x: npt.NDArray[np.float32]) -> Bytes:
    """Rows of floats in the layout of templates/lib/bf16.cuh."""
    bits = (bf16_round(_padded_rows(x)).view(np.uint32) >> 16).astype(np.uint16)
    tiles, blocks = len(bits) // 8, bits.shape[1] // 32
    split = bits.reshape(tiles, 8, blocks, 2, 4, 4)  # tile, g, block, half, t, element
    return np.ascontiguousarray(split.transpose(0, 2, 1, 4, 3, 5)).reshape(-1).view(np.uint8)

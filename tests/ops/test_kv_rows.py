"""Rows of a q8_0 cache: a CPU kernel writes the bytes of the definition, which is llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from test_every_op import CompiledOp

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.attention import Attention, KvAppend
from memra_compiler.ops.kv_rows import cache_values, encode_rows, head_width

WIDTHS = (32, 64, 96, 128, 256, 512)


def rows_of(d: int) -> np.ndarray:
    """[T, n, d] at all scales; in further rows what a format must not trip over."""
    rng = np.random.default_rng(d)
    x = rng.standard_normal((8, 2, d)) * 10.0 ** rng.integers(-4, 4, (8, 2, d // 32)).repeat(32, -1)
    x[1, 0, :32], x[2, 1, 3], x[3, 1, 9], x[4, 0, 31] = 0, np.nan, -np.inf, np.nan
    x[5, 0], x[6, 1] = x[5, 0] * 1e-30, x[6, 1] * 1e-9  # scales that f16 cannot hold, or barely
    x[7, 0, :32] = 1e38
    return x.astype(np.float32)


@pytest.mark.parametrize("d", WIDTHS)
def test_appended_bytes_are_those_of_the_definition(d: int, tmp_path: Path) -> None:
    rows = rows_of(d)
    plane = TensorType((2, 9, d), "q8_0_rows")
    wide = TensorType((8, 2 * d))
    kernel = CompiledOp(KvAppend(), (wide, wide, TensorType((8,), "i32"), plane, plane), tmp_path)
    caches = [np.full(plane.stored_shape, 0xB3, np.uint8) for _ in range(2)]
    positions = np.array([7, 8, 9, 10, 11, 12, 13, 14], np.int32)
    kernel(8, rows, rows[::-1].copy(), positions, *caches)
    for cache, given in zip(caches, (rows, rows[::-1]), strict=True):
        want = np.full_like(cache, 0xB3)
        want[:, positions % 9] = encode_rows(given).swapaxes(0, 1)
        np.testing.assert_array_equal(cache, want)
    assert plane.nbytes == caches[0].size
    assert plane.row_bytes % 16 == 0


def test_values_are_near_and_bad_blocks_are_nan() -> None:
    rows = rows_of(128)[:6]
    got = cache_values(encode_rows(rows))
    blocks, found = rows.reshape(6, 2, 4, 32), got.reshape(6, 2, 4, 32)
    bad = ~np.isfinite(blocks).all(axis=-1)
    assert bad.sum() == 3
    assert np.isnan(found[bad]).all()
    top = np.abs(blocks[~bad]).max(axis=-1, keepdims=True)
    step = (0.5 / 127 + 2.0**-10) * top  # half a step; the scale and the product in f16
    assert (np.abs(found[~bad] - blocks[~bad]) <= step + 127 * 2.0**-25).all()
    assert not got[5, 0].any()


def test_values_are_rounded_to_f16_and_not_before() -> None:
    x = np.linspace(-3, 2.9, 64, dtype=np.float32)
    stored = encode_rows(x)
    q = stored[:64].view(np.int8).astype(np.float64)
    d = stored[64:68].view(np.float16).astype(np.float64).repeat(32)
    want = (q * d).astype(np.float16)
    np.testing.assert_array_equal(cache_values(stored), want.astype(np.float64))
    assert (want != q * d).any()


def test_blocks_are_those_of_llama_cpp() -> None:
    """Scales bit by bit; integers, but for halves and the last bit of a scale's inverse."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0).reshape(64, 8, 34)
    ours = encode_rows(x)
    np.testing.assert_array_equal(ours[:, 256:].reshape(64, 8, 2), theirs[:, :, :2])
    q = ours[:, :256].view(np.int8).reshape(64, 8, 32).astype(int)
    off = np.abs(q - theirs[:, :, 2:].copy().view(np.int8))
    assert off.max() <= 1
    assert off.mean() < 1e-3


def test_every_width_is_known_from_its_bytes() -> None:
    for d in range(32, 2049, 32):
        plane = TensorType((1, 2, d), "q8_0_rows")
        assert d + d // 16 <= plane.row_bytes < d + d // 16 + 16
        assert head_width(np.zeros(plane.stored_shape, np.uint8)) == d


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(IRError, match="stores blocks of 32, but a row has 80"):
        TensorType((2, 8, 80), "q8_0_rows")


def test_classes_say_what_is_stored_and_what_is_read() -> None:
    q, at, plane = TensorType((3, 64)), TensorType((3,), "i32"), TensorType((1, 8, 64), "q8_0_rows")
    assert KvAppend().numeric_class(q, q, at, plane, plane) == (
        "round to q8_0: f16(max/127) per 32, nearest even"
    )
    assert Attention().numeric_class(q, at, plane, plane).startswith("f32 x f16(q8_0)->f32 over 64")

"""NaN and infinity are found in every format, and named with their place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from weight_files import BF16, DRAFT, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, TARGET, gguf

from memra_runtime.checkpoint import check_finite, find_nonfinite, open_checkpoint
from memra_runtime.errors import MemraError

NAN, INF = b"\x00\x7e", b"\x00\xfc"  # f16: NaN, minus infinity

BLOCKED = [
    (Q8_0, 32, 34, 0), (Q4_0, 32, 18, 0), (Q4_K, 256, 144, 0), (Q4_K, 256, 144, 2),
    (Q5_K, 256, 176, 0), (Q5_K, 256, 176, 2), (Q6_K, 256, 210, 208),
]  # fmt: skip


@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize(("kind", "per_block", "block", "offset"), BLOCKED)
def test_block_scales(
    tmp_path: Path, kind: int, per_block: int, block: int, offset: int, bad: bytes
) -> None:
    rows, blocks = 5, 3
    raw = bytearray(b"\xff\x7b" * (rows * blocks * block // 2))  # 65504, the largest finite f16
    path = tmp_path / "w.gguf"
    path.write_bytes(gguf({}, [("w", (rows, blocks * per_block), kind, bytes(raw))]))
    with open_checkpoint(path) as checkpoint:
        assert find_nonfinite(checkpoint, checkpoint.tensors["w"]) is None
    at = 10 * block + offset
    raw[at : at + 2] = bad
    path.write_bytes(gguf({}, [("w", (rows, blocks * per_block), kind, bytes(raw))]))
    with open_checkpoint(path) as checkpoint:
        found = find_nonfinite(checkpoint, checkpoint.tensors["w"])
    assert found is not None
    assert "block 10 (row 3)" in found


@pytest.mark.parametrize(
    ("kind", "size", "bad"),
    [(F32, 4, b"\0\0\xc0\x7f"), (F16, 2, NAN), (BF16, 2, b"\xc0\x7f"), (BF16, 2, b"\x80\xff")],
)
def test_plain_floats(tmp_path: Path, kind: int, size: int, bad: bytes) -> None:
    raw = bytearray(6 * 7 * size)
    raw[16 * size : 17 * size] = bad
    path = tmp_path / "w.gguf"
    path.write_bytes(gguf({}, [("w", (6, 7), kind, bytes(raw))]))
    with open_checkpoint(path) as checkpoint:
        found = find_nonfinite(checkpoint, checkpoint.tensors["w"])
        assert found is not None
        assert "row 2, column 2" in found
        with pytest.raises(MemraError, match=r"weights-not-finite.*row 2, column 2"):
            check_finite(checkpoint, checkpoint.tensors.values())


def test_a_place_past_the_first_chunk_is_right(tmp_path: Path) -> None:
    values = np.zeros((3, 1 << 20), dtype="<f4")
    values[2, 123_456] = np.inf
    path = tmp_path / "w.gguf"
    path.write_bytes(gguf({}, [("w", values.shape, F32, values.tobytes())]))
    with open_checkpoint(path) as checkpoint:
        found = find_nonfinite(checkpoint, checkpoint.tensors["w"])
    assert found == "`w` (f32) has NaN or infinity in row 2, column 123456"


@pytest.mark.parametrize("path", [TARGET, DRAFT], ids=["target", "draft"])
def test_the_demo_models_are_finite(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        check_finite(checkpoint, checkpoint.tensors.values())

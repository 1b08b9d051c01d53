"""Find NaN and infinity in stored weights, reading block scales only where there are blocks.

One NaN scale makes every logit NaN. Quantised values are finite whenever their scales are, so a
q4_k tensor needs 4 of its 144 bytes looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count

import numpy as np

from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.checkpoint.formats import BLOCKS, TensorInfo
from memra_runtime.errors import Diagnostic, MemraError

#: Byte offsets of the f16 scales in a block. Source: ggml, `ggml-common.h`.
_SCALES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
#: Integer type of the bits, and the bits of the exponent: all set means NaN or infinity.
_FLOATS = {"f16": ("<u2", 0x7C00), "bf16": ("<u2", 0x7F80), "f32": ("<u4", 0x7F800000)}
_CHUNK_BYTES = 8 << 20


def find_nonfinite(checkpoint: Checkpoint, info: TensorInfo) -> str | None:
    """Return where a tensor has its first NaN or infinity, or None.

    Formats without floating-point scales known here (integers, other block formats) give None.
    """
    if info.format in _FLOATS:
        dtype, mask = _FLOATS[info.format]
        raw = checkpoint.data(info.name)
        step = _CHUNK_BYTES
        for start in range(0, raw.size, step):
            at = _first(raw[start : start + step].view(dtype), mask)
            if at is not None:
                value = start // np.dtype(dtype).itemsize + at
                row, column = divmod(value, max(1, info.shape[-1] if info.shape else 1))
                place = f"row {row}, column {column}"
                return f"`{info.name}` ({info.format}) has NaN or infinity in {place}"
        return None
    if info.format not in _SCALES:
        return None
    block = BLOCKS[info.format]
    blocks = checkpoint.data(info.name).reshape(-1, block.nbytes)
    step = _CHUNK_BYTES // block.nbytes
    for start in range(0, len(blocks), step):
        for offset in _SCALES[info.format]:
            scales = np.ascontiguousarray(blocks[start : start + step, offset : offset + 2])
            at = _first(scales.view("<u2").ravel(), 0x7C00)
            if at is not None:
                index = start + at
                row = index // max(1, info.shape[-1] // block.elements)
                return (
                    f"`{info.name}` ({info.format}) has a NaN or infinite scale in block {index} "
                    f"(row {row})"
                )
    return None


def check_finite(checkpoint: Checkpoint, tensors: Iterable[TensorInfo]) -> None:
    """Look at every given tensor. Raises: MemraError listing each that is not finite.

    This reads the whole file, mostly waiting for its pages, so several threads share it.
    """
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        looked = pool.map(lambda info: find_nonfinite(checkpoint, info), tensors)
        found = [what for what in looked if what]
    if found:
        hints = ("the file is damaged or was quantised wrongly; fetch or quantise it again",)
        place = str(checkpoint.path)
        raise MemraError(
            tuple(
                Diagnostic("weights-not-finite", what, place, hints=hints if last else ())
                for what, last in zip(found, [*[False] * (len(found) - 1), True], strict=True)
            )
        )


def _first(bits: np.ndarray, mask: int) -> int | None:
    hit = (bits & mask) == mask
    return int(hit.argmax()) if hit.any() else None

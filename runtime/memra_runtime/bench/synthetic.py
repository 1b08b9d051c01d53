"""Made-up weights in the formats of an artifact: speed without a weight file.

Kernels stream the same bytes whatever they mean, so a GPU can be measured before tens of gigabytes
are downloaded. All tensors of a format share one pool of random blocks with a small scale, so rows
stay finite; the text means nothing and drafts are never right, unless forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import HEAD_IDS, HEAD_ROWS, WeightEntry, load_manifest
from memra_runtime.checkpoint import BLOCKS
from memra_runtime.device import Device, Progress
from memra_runtime.model import (
    check_processor,
    device_class,
    make_weight,
    plan_memory,
    refuse_memory,
    stored_floats,
)

#: Typical size of a weight.
WEIGHT = 0.02
#: Random blocks that a pool repeats.
_BLOCKS = 1 << 18
#: Of a block: the byte of its f16 scale, and what the largest code times the rest comes to.
_SCALES = {
    "q4_0": (0, 8), "q8_0": (0, 127), "q4_k": (0, 15 * 63), "q5_k": (0, 31 * 63),
    "q6_k": (208, 32 * 64),
}  # fmt: skip


def synthetic_device(folder: Path, progress: Progress | None = None) -> Device:
    """Load an artifact with made-up weights. Raises: MemraError where it does not fit here."""
    manifest = load_manifest(folder)
    check_processor(manifest, folder)
    made = device_class(manifest, folder)
    refuse_memory(plan_memory(manifest))
    weights = synthetic_weights(manifest.weights)
    options = {} if manifest.target == "cpu" else {"progress": progress}
    device = made(manifest, folder, weights, **options)
    if manifest.head is not None:  # a trimmed head: which tokens its rows are decides no time
        ids = device.plane(HEAD_IDS)
        ids[...] = np.arange(len(ids))
        device.plane(HEAD_ROWS)[...] = manifest.head.ranked
    return device


def synthetic_weights(entries: Sequence[WeightEntry]) -> list[npt.NDArray[np.uint8]]:
    """Stored bytes of each weight: ones or token ids for vectors, random blocks for matrices."""
    rng = np.random.default_rng(0)
    largest: dict[str, int] = {}
    for entry in entries:
        if not entry.made and len(entry.shape) > 1:
            largest[entry.format] = max(largest.get(entry.format, 0), entry.bytes)
    pools = {format: _pool(rng, format, size) for format, size in largest.items()}

    def one(entry: WeightEntry) -> npt.NDArray[np.uint8]:
        if entry.made:
            return make_weight(entry)
        if len(entry.shape) > 1:
            return pools[entry.format][: entry.bytes]
        if entry.format in ("i32", "i64"):
            return np.arange(*entry.shape, dtype=f"int{entry.format[1:]}").view(np.uint8)
        return stored_floats(np.ones(entry.shape, np.float32), entry.format)

    return [one(entry) for entry in entries]


def _pool(rng: np.random.Generator, format: str, size: int) -> npt.NDArray[np.uint8]:
    elements, block = BLOCKS[format]
    count = min(_BLOCKS, -(-size // block))
    if elements == 1:
        blocks = stored_floats(rng.normal(0, WEIGHT, count).astype(np.float32), format)
    else:
        raw = rng.integers(0, 256, (count, block), np.uint8)
        at, most = _SCALES[format]
        raw[:, at : at + 2] = np.frombuffer(np.float16(4 * WEIGHT / most).tobytes(), np.uint8)
        if format in ("q4_k", "q5_k"):
            raw[:, 2:4] = 0  # no minimum
        if format == "q6_k":
            raw[:, 192:208] = 64
        blocks = raw.reshape(-1)
    return np.resize(blocks, size)

"""Weights to the GPU: streamed through pinned memory, repacked on the device, never held twice.

A tensor is copied in chunks into a staging buffer and repacked from there into its place in the
slab. While one chunk is on its way, the next is read from the mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import LaunchEntry, Manifest
from memra_runtime.device.cuda_driver import (
    Context,
    Event,
    Kernel,
    LaunchShape,
    Memory,
    PinnedBuffer,
    Stream,
)
from memra_runtime.errors import fail

CHUNK_BYTES = 64 << 20
ALIGN = 256

#: Told after each tensor: bytes done, bytes in all.
Progress = Callable[[int, int], None]


def _quiet(done: int, total: int) -> None:
    """Report no progress."""


class Uploader:
    """Two pinned chunks that take turns."""

    def __init__(self, stream: Stream, largest: int) -> None:
        size = min(CHUNK_BYTES, largest)
        self.stream = stream
        self._buffers = [PinnedBuffer(size) for _ in range(2)]
        self._events = [Event(), Event()]
        self._used = [False, False]
        self._turn = 0

    def send(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        """Queue a copy of `data` to the device; returns when the file has been read."""
        chunk = len(self._buffers[0].bytes)
        for at in range(0, len(data), chunk):
            part = data[at : at + chunk]
            buffer, event = self._buffers[self._turn], self._events[self._turn]
            if self._used[self._turn]:
                event.wait()  # until the copy that used this buffer is done
            buffer.bytes[: len(part)] = part
            self.stream.copy_in(address + at, buffer, len(part))
            event.record(self.stream)
            self._used[self._turn] = True
            self._turn = 1 - self._turn


def upload_weights(
    manifest: Manifest,
    weights: Sequence[npt.NDArray[np.uint8]],
    functions: Mapping[str, Any],
    context: Context,
    stream: Stream,
    progress: Progress = _quiet,
) -> tuple[Memory, list[int]]:
    """Put every weight on the device in the layout its kernels want; returns slab and addresses.

    Raises: MemraError when the device has too little memory, with the numbers.
    """
    repacks = {entry.weight: entry for entry in manifest.repacks}
    sizes = [entry.device_bytes for entry in manifest.weights]
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // ALIGN) * ALIGN
    staged = [w.nbytes for w, e in zip(weights, manifest.weights, strict=True) if e.id in repacks]
    staging_bytes = max(staged, default=1)
    need, free = total + staging_bytes, context.free_memory()
    if need > free:
        fail(
            "memory",
            f"the weights need {total:,} bytes and {staging_bytes:,} to repack them; "
            f"{context.name} has {free:,} free",
            hints=("lower `runtime.max_context`, or use smaller weights",),
        )
    slab = Memory(total, "allocating the weights")
    staging = Memory(staging_bytes, "allocating the staging buffer")
    uploader = Uploader(stream, max(w.nbytes for w in weights))
    done, everything = 0, sum(w.nbytes for w in weights)
    for entry, data, offset in zip(manifest.weights, weights, offsets, strict=True):
        flat = data.reshape(-1)
        repack = repacks.get(entry.id)
        if repack is None:
            uploader.send(slab.address + offset, flat)
        else:
            uploader.send(staging.address, flat)
            _repack(repack, functions, context, [staging.address, slab.address + offset]).launch(
                stream, 1
            )
        done += data.nbytes
        progress(done, everything)
    stream.wait("uploading the weights")
    return slab, [slab.address + offset for offset in offsets]


def _repack(
    entry: LaunchEntry, functions: Mapping[str, Any], context: Context, pointers: list[int]
) -> Kernel:
    grid = [context.multiprocessors if g == "sms" else int(g) for g in entry.grid]
    shape = LaunchShape((grid[0], grid[1], grid[2]), entry.block, entry.shared_bytes, False)
    return Kernel(functions[entry.symbol], entry.symbol, shape, pointers)

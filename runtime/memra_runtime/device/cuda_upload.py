"""Weights to the GPU: streamed through pinned memory, repacked on the device, never held twice.

A tensor is copied in chunks into a staging buffer and repacked from there into its place in the
slab. While one chunk is on its way, the next is read from the mapped file, by several threads: most
of reading is page faults, of which one thread can take a few gigabytes a second only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from os import cpu_count
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import HEAD_GROUP, LaunchEntry, Manifest
from memra_runtime.device import Progress
from memra_runtime.device.cuda_driver import (
    Context,
    Event,
    Kernel,
    LaunchShape,
    Memory,
    PinnedBuffer,
    Stream,
)

CHUNK_BYTES = 64 << 20
ALIGN = 256
#: What one thread copies from a mapped file at a time, and the most threads that do.
READ_BYTES = 4 << 20
READERS = min(8, cpu_count() or 1)


class Uploader:
    """Two pinned chunks that take turns."""

    def __init__(self, stream: Stream, largest: int) -> None:
        size = min(CHUNK_BYTES, largest)
        self.stream = stream
        self._buffers = [PinnedBuffer(size) for _ in range(2)]
        self._events = [Event(), Event()]
        self._used = [False, False]
        self._turn = 0
        self._readers = ThreadPoolExecutor(READERS)

    def send(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        """Queue a copy of `data` to the device; returns when the file has been read."""
        chunk = len(self._buffers[0].bytes)
        for at in range(0, len(data), chunk):
            part = data[at : at + chunk]
            buffer, event = self._buffers[self._turn], self._events[self._turn]
            if self._used[self._turn]:
                event.wait()  # until the copy that used this buffer is done
            self._read(buffer.bytes, part)
            self.stream.copy_in(address + at, buffer, len(part))
            event.record(self.stream)
            self._used[self._turn] = True
            self._turn = 1 - self._turn

    def _read(self, buffer: npt.NDArray[np.uint8], part: npt.NDArray[np.uint8]) -> None:
        """Copy `part` of a mapped file to the start of `buffer`; NumPy copies without the GIL."""
        pieces = [
            slice(at, min(at + READ_BYTES, len(part))) for at in range(0, len(part), READ_BYTES)
        ]
        list(self._readers.map(lambda piece: np.copyto(buffer[piece], part[piece]), pieces))

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown()


def upload_weights(
    manifest: Manifest,
    weights: Sequence[npt.NDArray[np.uint8]],
    functions: Mapping[str, Any],
    context: Context,
    stream: Stream,
    progress: Progress | None = None,
) -> tuple[Memory, list[int]]:
    """Put every weight on the device in the layout its kernels want; returns slab and addresses.

    That there is memory for it was checked by `memra_runtime.model.refuse_memory`.
    """
    repacks = {entry.weight: entry for entry in manifest.repacks}
    offsets, total = [], 0
    for entry in manifest.weights:
        offsets.append(total)
        total += -(-entry.device_bytes // ALIGN) * ALIGN
    slab = Memory(total, "allocating the weights")
    staging = Memory(manifest.staging_bytes, "allocating the staging buffer")
    uploader = Uploader(stream, max(w.nbytes for w in weights))
    tell = progress or (lambda _done, _total: None)
    done, everything = 0, sum(w.nbytes for w in weights)
    tell(done, everything)
    try:
        for entry, data, offset in zip(manifest.weights, weights, offsets, strict=True):
            flat, place = data.reshape(-1), slab.address + offset
            if repack := repacks.get(entry.id):
                uploader.send(staging.address, flat)
                pointers = [staging.address, place]
                _repack(repack, functions, context, pointers).launch(stream, 1)
            else:
                uploader.send(place, flat)
            done += data.nbytes
            tell(done, everything)
    finally:
        uploader.close()
    stream.wait("uploading the weights")
    return slab, [slab.address + offset for offset in offsets]


class RowWriter:
    """Replaces rows of a trimmed head in place, in the layout that its kernels want.

    The smallest part that a repacking launch takes is a group of `HEAD_GROUP` rows. Buffers are
    made once, so that nothing is allocated between replays.
    """

    def __init__(
        self,
        manifest: Manifest,
        addresses: Sequence[int],
        functions: Mapping[str, Any],
        context: Context,
        stream: Stream,
    ) -> None:
        assert manifest.head is not None
        at, entry = next(
            (i, w) for i, w in enumerate(manifest.weights) if w.id == manifest.head.weight
        )
        groups = entry.shape[0] // HEAD_GROUP
        self.weight = entry.id
        self._address, self._size = addresses[at], entry.device_bytes // groups
        self._functions, self._context, self._stream = functions, context, stream
        self._pinned = PinnedBuffer(entry.bytes // groups)
        whole = next((r for r in manifest.repacks if r.weight == entry.id), None)
        self._repack, self._staging = None, None
        if whole is not None:
            blocks, *rest = whole.grid
            self._repack = replace(whole, grid=(int(blocks) // groups, *rest))
            self._staging = Memory(entry.bytes // groups, "allocating a buffer for learned rows")

    def write(self, rows: npt.NDArray[np.uint8], first: int, last: int) -> None:
        """Send the groups that hold rows `[first, last)` of all `rows`, as stored; returns when
        they are there."""
        size = len(self._pinned.bytes)
        for group in range(first // HEAD_GROUP, -(-last // HEAD_GROUP)):
            at = group * HEAD_GROUP
            self._pinned.bytes[:] = rows[at : at + HEAD_GROUP].reshape(-1)
            place = self._address + group * self._size
            if self._repack is None or self._staging is None:
                self._stream.copy_in(place, self._pinned, size)
            else:
                self._stream.copy_in(self._staging.address, self._pinned, size)
                pointers = [self._staging.address, place]
                _repack(self._repack, self._functions, self._context, pointers).launch(
                    self._stream, 1
                )
            self._stream.wait("writing rows of the drafter's head")


def _repack(
    entry: LaunchEntry, functions: Mapping[str, Any], context: Context, pointers: list[int]
) -> Kernel:
    grid = [context.multiprocessors if g == "sms" else int(g) for g in entry.grid]
    shape = LaunchShape((grid[0], grid[1], grid[2]), entry.block, entry.shared_bytes, False)
    return Kernel(functions[entry.symbol], entry.symbol, shape, pointers)

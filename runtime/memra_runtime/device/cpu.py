"""The CPU device: one arena in memory, weights in place in their mapped files, one shared library.

Source: entry functions take the arena and an array of DLTensor structs (`dlpack.h`), of which only
the data pointers are read.
"""

from __future__ import annotations

import copy
import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm_ffi

from memra_runtime.artifact import LIBRARY, Manifest, PlaneEntry, ValueEntry, slot
from memra_runtime.device import DTYPES
from memra_runtime.device.memory import (
    HostBytes,
    Kept,
    Spans,
    available_memory,
    weights_fingerprint,
)

#: Size of a DLTensor in 64-bit words; the data pointer is the first.
_DLTENSOR_WORDS = 6
_ALIGN = 64


def load_library(path: Path) -> Any:
    """Load a shared library, also where another one of this name was loaded before.

    The dynamic linker takes a name it has seen for the library it has seen; through a link with a
    name of its own it looks at the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / path.name
        link.symlink_to(path.resolve())
        return tvm_ffi.load_module(str(link))


class CpuDevice:
    """Runs an artifact's programs. Every plane and kept value is a view of the arena."""

    #: A sequence is one function of the library, which runs to its end without the host.
    whole = True
    #: The host looks into the arena itself.
    reads = 0

    def __init__(
        self, manifest: Manifest, folder: Path, weights: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        self.manifest = manifest
        self.burst_tokens = 1  # a round a call: tokens appear as they are made
        self._weights = list(weights)  # the mapped files must outlive the table
        table = np.zeros((len(weights), _DLTENSOR_WORDS), np.uint64)
        table[:, 0] = [w.ctypes.data for w in weights]
        self._table = table
        self.weights_id = weights_fingerprint(manifest, weights)
        self._module = load_library(folder / LIBRARY)
        self._functions: dict[str, Any] = {}
        self._make_arena()

    def _make_arena(self) -> None:
        size = self.manifest.arena_bytes
        raw = np.zeros(size + _ALIGN, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        self._arena = raw[start : start + size]
        self._arguments = tuple(ctypes.c_void_p(a.ctypes.data) for a in (self._arena, self._table))
        self._planes = {p.id: self._view(p) for p in self.manifest.planes}
        self.state: npt.NDArray[np.int32] = self._planes["state"]
        self.launches = self.texts = 0

    def _view(self, place: PlaneEntry | ValueEntry) -> npt.NDArray[Any]:
        dtype = np.dtype(DTYPES[place.dtype])
        size = int(np.prod(place.shape)) * dtype.itemsize
        view = self._arena[place.offset : place.offset + size].view(dtype)
        return view.reshape(place.shape)

    def plane(self, name: str) -> npt.NDArray[Any]:
        """The elements of a plane, shared with the programs."""
        return self._planes[name]

    def value(self, program: str, name: str) -> npt.NDArray[Any]:
        """A result that `program` left in the arena; the next program may overwrite it."""
        for place in self.manifest.values:
            if (place.program, place.id) == (program, name):
                return self._view(place)
        raise KeyError(f"{program} keeps no value {name}")

    def write_rows(self, weight: str, rows: npt.NDArray[np.uint8], first: int, last: int) -> None:
        """Replace rows of a trimmed head; where the host's copy is the one in use, none is left."""
        at = next(i for i, w in enumerate(self.manifest.weights) if w.id == weight)
        held = self._weights[at].reshape(rows.shape)
        if not np.shares_memory(held, rows):
            held[first:last] = rows[first:last]

    def launch(self, name: str) -> None:
        """Run a sequence, or one program as `run_NAME`."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module[name]
        function(*self._arguments)
        self.launches += 1

    def runs(self, sequence: str) -> str:
        """How a sequence runs here."""
        return f"cpu: one call a {'token' if sequence == 'plain' else 'round'}"

    def start(self, name: str) -> None:
        """Run a burst to its end."""
        self.launch(name)

    def done(self) -> bool:
        """A burst has ended when `start` returns."""
        return True

    def get(self, counter: str) -> int:
        """Read a counter of the device block."""
        return int(self.state[slot(counter)])

    def put(self, counters: Mapping[str, int]) -> None:
        """Write counters of the device block; only between rounds."""
        for name, value in counters.items():
            self.state[slot(name)] = value

    def memory(self) -> int:
        """Bytes of the arena."""
        return len(self._arena)

    def free(self) -> int | None:
        """What this machine has left."""
        return available_memory()

    def another(self) -> CpuDevice:
        """A device with an arena of its own, over the same weights and library."""
        twin = copy.copy(self)
        twin._make_arena()
        return twin

    def keep(self, spans: Spans) -> HostBytes:
        """Copy parts of the arena aside."""
        return HostBytes(np.concatenate([self._arena[at : at + size] for at, size in spans]))

    def put_back(self, spans: Spans, kept: Kept) -> None:
        """Write what was kept, here or elsewhere."""
        data, at = kept.bytes(), 0
        for offset, size in spans:
            self._arena[offset : offset + size] = data[at : at + size]
            at += size

"""Memory of this machine, and bytes of an arena that are kept aside."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import Manifest
from memra_runtime.errors import fail

#: Parts of an arena: byte offset and size of each.
Spans = Sequence[tuple[int, int]]

#: Bytes of a weight that are looked at, at its start, in its middle and at its end.
_LOOK = 1024


class Kept(Protocol):
    """A copy of parts of an arena, one behind the other, on the device it was made on."""

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The copy in the host's memory."""


@dataclass(frozen=True)
class HostBytes:
    """Kept bytes that lie in the host's memory."""

    data: npt.NDArray[np.uint8]

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The bytes themselves."""
        return self.data


def kib(path: str, key: str) -> int | None:
    """A line `KEY N kB` of a file of Linux, in bytes; None where it is not known."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def available_memory() -> int | None:
    """Bytes that this machine could give to a process; None where it is not known."""
    return kib("/proc/meminfo", "MemAvailable:")


def gib(size: int) -> str:
    """Bytes in the unit a person reads."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def refuse_more(what: str, need: int, available: int | None, hint: str) -> None:
    """Refuse to take memory that is not there. Raises: MemraError with the numbers."""
    if available is not None and need > available:
        fail("memory", f"{what} needs {gib(need)}, {gib(available)} are free", hints=(hint,))


def weights_fingerprint(manifest: Manifest, weights: Sequence[npt.NDArray[np.uint8]]) -> str:
    """Tells targets apart by size and by three kilobytes of every tensor; reads no more.

    The rows of a text are the target's alone. A drafter, and a head of it that learns, can change
    how fast a text goes on, and nothing else.
    """
    digest = hashlib.blake2b(digest_size=16)
    for entry, data in zip(manifest.weights, weights, strict=True):
        if not entry.id.startswith("target."):
            continue
        flat = data.reshape(-1)
        digest.update(f"{entry.id} {flat.size}\n".encode())
        for at in (0, max(0, flat.size // 2), max(0, flat.size - _LOOK)):
            digest.update(flat[at : at + _LOOK].tobytes())
    return digest.hexdigest()

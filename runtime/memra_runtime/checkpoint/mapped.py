"""A read-only memory map of one file, and what a file that we cannot read looks like."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np

from memra_runtime.errors import fail


class MappedFile:
    """The bytes of a file as a read-only uint8 array; nothing is read until it is touched."""

    def __init__(self, path: Path) -> None:
        """Map `path`.

        Raises: MemraError if there is no such file, it cannot be read or it is empty.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                file.seek(0, 2)
                self.size = file.tell()
                if self.size == 0:
                    fail(
                        "weights-empty",
                        f"`{path.name}` is empty (0 bytes)",
                        str(path),
                        hints=("the download was cut off; fetch the file again",),
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            fail("weights-not-found", f"there is no `{path}`", str(path), hints=_siblings(path))
        except OSError as error:
            fail("weights-unreadable", f"`{path.name}` cannot be read: {error.strerror}", str(path))
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def buffer(self) -> mmap.mmap:
        """The map itself, for `struct` and slicing."""
        return self._map

    def close(self) -> None:
        """Unmap, or leave it to the last array that still looks into the map."""
        self.bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def _siblings(path: Path) -> tuple[str, ...]:
    """Hint at files of the same kind beside a path that does not exist."""
    if not path.parent.is_dir():
        return (f"the folder `{path.parent}` does not exist either",)
    suffix = path.suffix or ".gguf"
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == suffix)
    return (f"that folder has: {', '.join(names[:8])}",) if names else ()


def looks_like(head: bytes) -> str:
    """Name what a file is by its first bytes (64 are enough), for error messages."""
    lowered = head.lstrip().lower()
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, as PyTorch's `.bin` and `.pt` files are"
    if head.startswith((b"\x80\x02", b"\x80\x04")):
        return "a Python pickle, as old PyTorch files are"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer: the text that stands in for a file not yet fetched"
    if lowered.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, such as a login or error page saved in place of the file"
    if head[8:9] == b"{" and head[6:8] == b"\x00\x00":
        return "a safetensors file"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg", b"ggml", b"ggjt"):
        return "a ggml file from before GGUF (2023)"
    if lowered.startswith((b"{", b"[")):
        return "a JSON text"
    if head.startswith(b"\x1f\x8b"):
        return "a gzip archive"
    if head.startswith(b"\x89HDF"):
        return "an HDF5 file"
    return f"data of no kind known here (first bytes {head[:8].hex(' ')})"

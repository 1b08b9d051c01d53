"""Arrays of strings in a GGUF header, decoded when they are asked for.

A vocabulary has a quarter of a million strings, and most users of a weight file read none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from memra_runtime.errors import fail


class Strings(Sequence[str]):
    """An array of strings that is decoded when an entry is asked for."""

    def __init__(self, place: str, key: str, raw: bytes, ends: np.ndarray) -> None:
        """`raw` is the array as stored, 8 bytes of length before each string; `ends` [n]."""
        self._place, self._key, self._raw = place, key, raw
        self._ends: list[int] = ends.tolist()

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self._ends))[index]
        start = self._ends[index - 1] + 8 if index else 8
        try:
            return self._raw[start : self._ends[index]].decode()
        except UnicodeDecodeError:
            fail("weights-damaged", f"`{self._key}[{index}]` is not UTF-8 text", self._place)

    def __iter__(self) -> Iterator[str]:
        raw, start = self._raw, 8
        try:
            for end in self._ends:
                yield raw[start:end].decode()
                start = end + 8
        except UnicodeDecodeError:
            fail("weights-damaged", f"`{self._key}` has a string that is not UTF-8", self._place)

    def __repr__(self) -> str:
        return f"Strings({self._key!r}, {len(self)} entries)"

"""Rows as bytes: hidden rows, kept values and cache rows, and the plain run they must equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import Manifest, PlaneEntry
from memra_runtime.device import Device
from memra_runtime.session.text import round_rows


def digest(row: npt.NDArray[Any]) -> bytes:
    """A fingerprint of the bits of a row."""
    return hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Row:
    """What the target left for one position: its hidden row, its kept values, its choice."""

    hidden: npt.NDArray[np.float32]
    values: Mapping[str, bytes]
    choice: int
    margin: float | None


@dataclass
class Trace:
    """A plain run: the tokens after a prompt, and by position every row that led to them."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    cache: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def token(self, position: int) -> int | None:
        """The token that plain decoding puts at `position`; None past the end of the run."""
        at = position - len(self.prompt)
        return self.tokens[at] if 0 <= at < len(self.tokens) else None

    def margin(self, position: int) -> float | None:
        """Logit margin of the choice that put its token at `position`."""
        row = self.rows.get(position - 1)
        return row.margin if row is not None else None


class RowReader:
    """Reads the rows that `verify` or `plain_step` has just left."""

    def __init__(self, device: Device) -> None:
        manifest = device.manifest
        self.device = device
        self.suppressed = list(manifest.spec["target"]["head"].get("suppress_tokens") or ())
        self.kept = {
            program: [v.id for v in manifest.values if v.program == program]
            for program in ("plain_step", "verify")
        }

    def read(self, program: str, count: int) -> list[Row]:
        hidden = self.device.plane("verified")[:count].copy()
        choice = self.device.plane("choice")[:count].tolist()
        values = {name: self.device.value(program, name) for name in self.kept[program]}
        logits = next((v for name, v in values.items() if name.endswith("logits")), None)
        return [
            Row(
                hidden[i],
                {name: digest(value[i]) for name, value in values.items()},
                int(choice[i]),
                self._margin(logits[i], int(choice[i])) if logits is not None else None,
            )
            for i in range(count)
        ]

    def _margin(self, logits: npt.NDArray[Any], choice: int) -> float | None:
        if not 0 <= choice < len(logits):
            return None  # the kernel found no finite logit
        others = logits.astype(np.float32)
        others[[choice, *self.suppressed]] = -np.inf
        margin = float(logits[choice]) - float(others.max())
        return margin if isfinite(margin) else None


class CacheReader:
    """Fingerprints of cache rows, by plane and position.

    A ring keeps its window and the rows of a round; one that was rolled back has overwritten the
    oldest rows, so only those of the window are promised.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.planes = cache_planes(device.manifest)
        self.spare = round_rows(device.manifest)

    def read(self, plane: PlaneEntry) -> npt.NDArray[Any]:
        """The plane as it is now; a device that is not this memory is read only once."""
        return np.asarray(self.device.plane(plane.id))

    def visible(self, plane: PlaneEntry, end: int) -> range:
        """Positions whose rows `plane` must hold once `end` rows are committed."""
        span = plane.shape[1] - self.spare if plane.ring else plane.shape[1]
        return range(max(0, end - span), end)

    def at(self, positions: Sequence[int]) -> dict[tuple[str, int], bytes]:
        """Every plane's row at each position."""
        return self._rows({p.id: positions for p in self.planes})

    def all(self, end: int) -> dict[tuple[str, int], bytes]:
        """Every row that must be there once `end` rows are committed."""
        return self._rows({p.id: self.visible(p, end) for p in self.planes})

    def _rows(self, wanted: Mapping[str, Sequence[int]]) -> dict[tuple[str, int], bytes]:
        """Fingerprints by plane and position: the oldest position first, then in layer order."""
        data = {p.id: self.read(p) for p in self.planes}
        places = [(n, i) for i, p in enumerate(self.planes) for n in wanted[p.id]]
        names = [p.id for p in self.planes]
        return {
            (names[i], n): digest(data[names[i]][:, n % data[names[i]].shape[1]])
            for n, i in sorted(places)
        }

    def whole(self) -> bytes:
        """One fingerprint of all caches."""
        parts = [digest(self.read(p)) for p in self.planes]
        return hashlib.blake2b(b"".join(parts)).digest()

    def poison(self) -> None:
        """Fill every cache with NaN (all bits set): whoever reads a stale row will show it."""
        for plane in self.planes:
            data = np.empty(plane.shape, self.read(plane).dtype)
            data.view(np.uint8)[...] = 0xFF
            self.device.plane(plane.id)[...] = data

    def clear(self) -> None:
        """Fill every cache with zeros."""
        for plane in self.planes:
            self.device.plane(plane.id)[...] = 0


def cache_planes(manifest: Manifest) -> list[PlaneEntry]:
    """The key and value caches, in layer order."""
    return [p for p in manifest.planes if p.rollback == "truncate"]


def ring_edges(manifest: Manifest) -> list[int]:
    """Lengths at which a ring starts to forget: each window, and each ring's own size."""
    rows = {p.shape[1] for p in cache_planes(manifest) if p.ring}
    return sorted(rows | {r - round_rows(manifest) for r in rows})


def first_unequal(
    expected: Mapping[tuple[str, int], bytes], found: Mapping[tuple[str, int], bytes]
) -> tuple[str, int] | None:
    """The first cache row that both have and whose bits differ."""
    for place, bits in found.items():
        if place in expected and expected[place] != bits:
            return place
    return None


def bits_apart(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> str:
    """How two rows differ, in words."""
    x, y = a.view(np.uint32), b.view(np.uint32)
    count = int(np.count_nonzero(x != y))
    with np.errstate(all="ignore"):
        largest = float(np.nanmax(np.abs(a - b)))
    return f"{count} of {x.size} elements differ, by {largest:.3g} at most"


def same_bits(a: Sequence[Any] | npt.NDArray[Any], b: Sequence[Any] | npt.NDArray[Any]) -> bool:
    """Whether two arrays hold the same bytes."""
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()

"""A trimmed head while it runs: which token each row stands for, and tokens that are learned.

A drafter can only draft tokens whose rows its head holds. Spare rows are filled between launches,
in place: no address changes, so captured graphs stay valid. Nothing is ever evicted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import (
    HEAD_IDS,
    HEAD_ROWS,
    LEARNED_FILE,
    RANKS_FILE,
    HeadEntry,
    Manifest,
)
from memra_runtime.checkpoint import Checkpoint, TensorInfo, map_ids, ranks_digest, read_ranks
from memra_runtime.device import Device
from memra_runtime.errors import fail
from memra_runtime.sidecar import Sidecar

#: More tokens than any launch is asked for.
_LONGEST = 1 << 16


@dataclass
class TrimStats:
    """Rows of a trimmed head, and what became of tokens it lacked."""

    ranked: int
    spare: int
    used: int = 0
    from_sidecar: int = 0
    from_prompts: int = 0
    from_verify: int = 0
    #: Tokens that found no spare row, or no more of those that one prompt may fill.
    turned_away: int = 0

    def as_json(self) -> dict[str, int]:
        return asdict(self)

    def line(self) -> str:
        """One line for a reader."""
        if not self.spare:
            return f"{self.ranked} rows of frequent tokens, none to spare"
        parts = {"sidecar": self.from_sidecar, "prompts": self.from_prompts,
                 "verify": self.from_verify}  # fmt: skip
        learned = ", ".join(f"{count} from {name}" for name, count in parts.items() if count)
        text = f"{self.ranked} rows of frequent tokens, {self.used} of {self.spare} spare ones used"
        text += f" ({learned})" if learned else ""
        return text + (f"; {self.turned_away} tokens found no row" if self.turned_away else "")


class HeadTrim:
    """The rows of a trimmed head on one device, shared by all sessions of a model."""

    def __init__(
        self,
        entry: HeadEntry,
        table: npt.NDArray[np.uint8],
        ids: Sequence[int],
        capacity: int,
        *,
        vocab: int,
        learn: Sequence[str] = (),
        per_prompt: int = 0,
        sidecar: Sidecar | None = None,
    ) -> None:
        """`table` [rows, bytes of a row] is the file's tensor, `ids` the tokens of ranked rows.

        `capacity` is the rows of the weight; those that no token fills are zeros.
        """
        self.entry, self.vocab = entry, vocab
        self.learns, self.per_prompt = frozenset(learn), per_prompt
        self.sidecar = sidecar
        self.ids = np.full(capacity, -1, np.int32)
        #: What the device holds, as stored; a row is changed here first.
        self.rows: npt.NDArray[np.uint8] = np.zeros((capacity, table.shape[1]), np.uint8)
        self.stats = TrimStats(entry.ranked, entry.spare)
        self._table = table
        self._devices: list[weakref.ref[Device]] = []
        self._known = np.zeros(vocab, bool)
        self._count = 0
        self._learned: list[int] = []
        self._patience = 1
        # a head that the file has trimmed is taken row by row; any other by token id
        self._place(ids, range(len(ids)) if entry.map_names else ids)
        if sidecar is not None:
            self.stats.from_sidecar = self._fill(sidecar.read())

    @property
    def used(self) -> int:
        """Rows in use: ranked ones and filled spare ones."""
        return self._count

    @property
    def room(self) -> int:
        """Spare rows that are still free."""
        return self.entry.ranked + self.entry.spare - self._count

    def install(self, device: Device) -> None:
        """Tell a device, which was loaded with `rows`, what they stand for.

        Devices that share weights share the head, and each has a map of its own.
        """
        self._devices.append(weakref.ref(device))
        self._tell(device)

    def _write(self, first: int, last: int) -> None:
        """Bring rows `[first, last)`, and then the map, to the devices that are left."""
        self._devices = [ref for ref in self._devices if ref() is not None]
        devices = [device for ref in self._devices if (device := ref()) is not None]
        if devices:
            devices[0].write_rows(self.entry.weight, self.rows, first, last)
        for device in devices:
            self._tell(device)

    def _place(self, ids: Sequence[int], rows: Sequence[int]) -> None:
        """Put rows of the file behind those in use."""
        at = slice(self._count, self._count + len(ids))
        self.rows[at], self.ids[at] = self._table[list(rows)], ids
        self._known[list(ids)] = True
        self._count += len(ids)
        self.stats.used = self._count - self.entry.ranked

    def _fill(self, ids: Iterable[int], limit: int | None = None) -> int:
        """Fill spare rows with tokens that have none; returns how many were filled."""
        new = [i for i in dict.fromkeys(ids) if 0 <= i < self.vocab and not self._known[i]]
        room = self.room if limit is None else min(self.room, limit)
        self.stats.turned_away += max(0, len(new) - room)
        first, new = self._count, new[:room]
        if not new:
            return 0
        self._place(new, new)
        self._write(first, self._count)
        return len(new)

    def _tell(self, device: Device) -> None:
        """Write the map, then the number of rows in use."""
        device.plane(HEAD_IDS)[...] = self.ids
        device.plane(HEAD_ROWS)[...] = self._count

    def learn_prompt(self, ids: Sequence[int]) -> None:
        """Learn the tokens of a prompt, between launches; some of them, if they are many."""
        if "prompt" in self.learns:
            before = self._count
            self.stats.from_prompts += self._fill(ids, self.per_prompt)
            self._learned += self.ids[before : self._count].tolist()

    def learn_choices(self, ids: Sequence[int]) -> None:
        """Learn tokens that the target chose, between launches."""
        if "verify" in self.learns:
            before = self._count
            self.stats.from_verify += self._fill(ids)
            self._learned += self.ids[before : self._count].tolist()
            self._patience = 1 if self._count > before else min(2 * self._patience, _LONGEST)

    @property
    def launch_tokens(self) -> int:
        """Tokens that the next launch should ask for, so that learning does not come too late.

        Of a launch of many rounds, the choices of the last one are seen, and of the others what
        they committed. So launches are single rounds as long as there is something to learn, and
        twice as long after each that has taught nothing.
        """
        return self._patience if self.room and "verify" in self.learns else _LONGEST

    def save(self) -> str:
        """Append what was learned since loading to the sidecar; returns a line for a reader.

        Raises: MemraError if that fails, or if the head has no sidecar.
        """
        if self.sidecar is None:
            fail("sidecar", "the head has no sidecar", hints=("set `sidecar: true` in the spec",))
        added, held = self.sidecar.add(self._learned, self.entry.spare)
        self._learned.clear()
        return f"{added} learned ids added, {held} in {self.sidecar.path}"

    def permute(self, order: Sequence[int]) -> None:
        """Put the rows in use into another order, map and all: drafts must stay the same."""
        used = self._count
        assert sorted(order) == list(range(used))
        self.rows[:used], self.ids[:used] = self.rows[list(order)], self.ids[list(order)]
        self._write(0, used)


def make_trim(
    manifest: Manifest, folder: Path, tensor: TensorInfo, data: npt.NDArray[np.uint8],
    map_tensor: TensorInfo | None, draft: Checkpoint,
) -> HeadTrim:  # fmt: skip
    """The trimmed head of an artifact, from the tensor of its rows and its own or the file's map.

    Raises: MemraError for a map or a sidecar that is wrong.
    """
    entry = manifest.head
    assert entry is not None
    vocab = int(manifest.spec["target"]["vocab"])
    options: dict[str, Any] = manifest.spec["drafter"]["head"].get("trim") or {}
    if map_tensor is not None:
        ids = file_map(draft, map_tensor, entry.map_kind, vocab)
    else:
        ids = read_ranks(folder / RANKS_FILE, vocab)
    sidecar = None
    if options.get("sidecar"):
        sidecar = Sidecar(folder / LEARNED_FILE, ranks_digest(ids), vocab)
    capacity = next(w.shape[0] for w in manifest.weights if w.id == entry.weight)
    return HeadTrim(
        entry, data.reshape(tensor.shape[0], -1), ids, capacity, vocab=vocab,
        learn=options.get("learn", ()), per_prompt=options.get("per_prompt", 0), sidecar=sidecar,
    )  # fmt: skip


def file_map(file: Checkpoint, tensor: TensorInfo, kind: str, vocab: int) -> tuple[int, ...]:
    """The map of a head that its file has trimmed. Raises: MemraError."""
    storage = {"i32": "<i4", "i64": "<i8"}.get(tensor.format)
    if storage is None:
        fail("head-map", f"`{tensor.name}` is stored as {tensor.format}; a map holds i32 or i64",
             str(file.path))  # fmt: skip
    values = file.data(tensor.name).view(storage).astype(np.int64)
    return map_ids(values, kind, vocab, f"`{tensor.name}` in {file.path}")

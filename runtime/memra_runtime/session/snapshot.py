"""A snapshot: all that a text needs to go on, copied aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import Manifest, PlaneEntry
from memra_runtime.device import DTYPES, Device
from memra_runtime.device.memory import Kept, refuse_more
from memra_runtime.errors import fail
from memra_runtime.session.request import check_request
from memra_runtime.session.text import Text, continuation, least_kept


@dataclass(frozen=True)
class Snapshot:
    """A text at a round boundary.

    `rows` are the cache rows of its tokens as `row_spans` lists them. With the hidden row and the
    pending token, which no cache holds, a text that is kept whole goes on without running a row.
    It fits sessions of the same artifact (`build_key`) and weights (`weights_id`) only.
    """

    artifact: str
    weights: str
    text: Text
    state: npt.NDArray[np.int32]
    hidden: npt.NDArray[np.float32]
    pending: int
    rows: Kept

    @property
    def shown(self) -> list[int]:
        """The tokens that were shown; the pending one may be the last."""
        return [*self.text.tokens, self.pending][: self.text.shown]

    def describe(self, manifest: Manifest) -> str:
        """What it holds and what can be restored from it."""
        count, least = len(self.text.tokens), max(1, least_kept(manifest, self.text.written))
        return f"{count} tokens, of which the first {least} to {count} can be continued"


def cache_planes(manifest: Manifest) -> list[PlaneEntry]:
    """The planes that hold a row a token, in arena order. No other plane outlives a round."""
    return [p for p in manifest.planes if p.rollback == "truncate"]


def rows_held(plane: PlaneEntry, tokens: int) -> int:
    """Rows of a cache that a text of so many tokens uses: in a ring, all once it has turned."""
    return min(tokens, plane.shape[1])


def row_spans(manifest: Manifest, tokens: int) -> list[tuple[int, int]]:
    """Where in the arena the rows of a text lie: by plane, then by head."""
    spans = []
    for plane in cache_planes(manifest):
        heads, rows, width = plane.shape
        row = width * np.dtype(DTYPES[plane.dtype]).itemsize
        used = rows_held(plane, tokens) * row
        spans += [(plane.offset + head * rows * row, used) for head in range(heads)]
    return spans


def take(device: Device, text: Text) -> Snapshot:
    """Copy what the device holds of `text`. Raises: MemraError where there is no memory for it."""
    manifest = device.manifest
    spans = row_spans(manifest, len(text.tokens))
    need = sum(size for _, size in spans)
    refuse_more(f"a snapshot of {len(text.tokens)} tokens", need, device.free(),
                "drop another snapshot or session first")  # fmt: skip
    state = np.array(device.state)
    return Snapshot(
        manifest.build_key, device.weights_id, text.copy(), state,
        np.array(device.plane("hidden")), device.get("pending"), device.keep(spans),
    )  # fmt: skip


def rows_wanted(manifest: Manifest, snapshot: Snapshot, suffix: Sequence[int], keep: int | None,
                max_new: int) -> tuple[list[int], int]:  # fmt: skip
    """The text that a restored session holds, and the first row that runs.

    Raises: MemraError for what the snapshot cannot give back or the context cannot hold.
    """
    text = snapshot.text
    if not suffix and keep in (None, len(text.tokens)):
        tokens, start = list(text.tokens), len(text.tokens)
    else:
        tokens, start = continuation(manifest, text, snapshot.pending, suffix, keep)
    check_request(manifest, tokens, max_new)
    return tokens, start


def check_fits(snapshot: Snapshot, device: Device) -> None:
    """Refuse a snapshot of another artifact or of other weights. Raises: MemraError."""
    manifest = device.manifest
    pairs = (
        ("artifact", snapshot.artifact, manifest.build_key, "compiled from the same spec by the "
         "same version, for the same target"),
        ("weights", snapshot.weights, device.weights_id, "the files it was made with"),
    )  # fmt: skip
    for what, found, wanted, which in pairs:
        if found != wanted:
            fail(
                "foreign-session",
                f"the session was made with other {what} ({found[:12]}) than those loaded "
                f"({wanted[:12]}): its rows would be read as what they are not",
                hints=(f"load the same {what}: {which}", "or begin anew with its text"),
            )

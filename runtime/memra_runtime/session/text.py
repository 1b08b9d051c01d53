"""What the host knows of a text, and from where it can be continued.

A row is written once and for all by what its token was: those of a given text (a prompt, a suffix)
by `prefill`, its last one by a plain step, which also chooses the next token; those of produced
tokens by the round or step that committed them. Who continues a given text runs that last row
through `prefill` again, so however a given text was split, its rows have the same bits.

A windowed cache is a ring: position p lies in row p mod R, and a round writes rows that it may
reject. What was overwritten is gone, so a text cannot be cut back further than the rings reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from memra_runtime.artifact import Manifest
from memra_runtime.errors import fail


@dataclass
class Text:
    """The committed tokens of a session, one a row, and how its rows came to be.

    `shown` counts the tokens handed to the caller; the pending token may be one of them. `seams`
    are the ends of given texts: the row before each was left by a plain step. No row from
    `written` on was ever written.
    """

    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    seams: tuple[int, ...] = ()
    written: int = 0

    def copy(self) -> Text:
        return replace(self, tokens=list(self.tokens))

    @property
    def produced(self) -> int:
        """Index of the first token that was produced since a text was given last."""
        return self.seams[-1] if self.seams else 0

    def first_end(self, start: int, ends: Iterable[int]) -> int | None:
        """Index of the first end of sequence from `start` on, which is a produced token."""
        found = set(ends)
        return next((i for i in range(start, len(self.tokens)) if self.tokens[i] in found), None)


def round_rows(manifest: Manifest) -> int:
    """Rows of a round, by which each ring is larger than its window; 0 without any ring.

    A chunk of a prompt may have more: the ring gets them once they have been attended.
    """
    target = manifest.spec["target"]
    spare = []
    for plane in manifest.planes:
        if plane.rollback == "truncate" and plane.ring:
            kind = target["layers"][int(plane.id.split(".")[2])]
            (mixer,) = target["layer_kinds"][kind]["mixer"].values()
            spare.append(plane.shape[1] - int(mixer["window"]))
    return min(spare, default=0)


def least_kept(manifest: Manifest, written: int) -> int:
    """The fewest tokens that can be kept of a text: 0, or what the windows of its rings leave.

    A row at position s reads a window of W rows before it, and a ring of R = W + `round_rows` rows
    holds those from `written` - R on.
    """
    rings = [p for p in manifest.planes if p.rollback == "truncate" and p.ring]
    turned = any(written > p.shape[1] for p in rings)
    return max(0, written - round_rows(manifest)) if turned else 0


def continuation(
    manifest: Manifest, text: Text, pending: int, suffix: Sequence[int], keep: int | None
) -> tuple[list[int], int]:
    """The text with `suffix` behind its first `keep` tokens, and the first row of it to run.

    `keep` None: all that was shown. Raises: MemraError where that cannot be done.
    """
    have = len(text.tokens)
    kept, suffix = text.shown if keep is None else keep, list(suffix)
    if keep is None and kept > have:  # the pending token was shown, and has no row yet
        kept, suffix = have, [pending, *suffix]
    if not 1 <= kept <= have:
        fail(
            "restore",
            f"{kept} tokens cannot be kept of a text of {have}",
            hints=(f"keep 1 to {have}, or begin anew with `prime`",),
        )
    start = kept - 1 if kept in text.seams else kept
    least = least_kept(manifest, text.written)
    if start < least:
        rows = min(p.shape[1] for p in manifest.planes if p.rollback == "truncate" and p.ring)
        after = least + (least in text.seams)
        range_ = f"{after} to {have}" if after < have else f"all {have}"
        fail(
            "restore",
            f"{kept} tokens cannot be kept of {have}: a windowed cache holds {rows} rows, and of "
            f"the {text.written} written ones those before {text.written - rows} are gone",
            hints=(f"keep {range_} tokens, or begin anew with `prime`",),
        )
    if not suffix:
        fail(
            "suffix",
            f"there is no token to run behind the first {kept}: what the next one is drafted from "
            "is known only behind a row that runs",
            hints=("keep one token less, and give it as the suffix",
                   "a snapshot that is kept whole goes on without a suffix"),
        )  # fmt: skip
    return text.tokens[:kept] + suffix, start

"""The head of a drafter: all of the vocabulary, or the rows of frequent tokens only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memra_compiler.layers.base import DraftHead
from memra_compiler.layers.params import Params, Problem, Seq, param
from memra_compiler.ops.activation import SoftCap
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.head import BestRow, TokenOfRow
from memra_runtime.artifact import HEAD_GROUP, HEAD_IDS, HEAD_ROWS, HeadEntry

if TYPE_CHECKING:
    from memra_compiler.drafters.base import DraftPlace
    from memra_compiler.layers.build import ProgramBuilder

#: The weight that holds the rows of a trimmed head.
TRIMMED_HEAD = "drafter.trimmed_head"


@dataclass(frozen=True)
class Chosen:
    """What a head has chosen: a token, and the row of the logits that stands for it.

    `used` holds the plane that counts the rows in use, where not all are.
    """

    token: str
    logits: str
    row: str
    used: tuple[str, ...] = ()


class HeadTrim(Params):
    """Keep the rows of frequent tokens in the drafter's head, and learn others while running.

    The head is the largest matrix of a draft step. A token that it does not know can never be
    drafted, so a trim can cost acceptance; it never changes the text, since the target verifies
    with its whole vocabulary. Rows are copied as they are stored, in any format.
    """

    example: ClassVar[str] = (
        "head:\n"
        "  tied: true\n"
        "  trim: {ranks: frequent.txt, spare: 512, learn: [prompt, verify], sidecar: true}\n"
    )

    ranks: str = param(
        min_length=1,
        doc="File with the token ids to keep, one a line, most frequent first, relative to the "
        "spec that names it. Lines that begin with `#` say where it comes from. It is read when "
        "the spec is compiled; the artifact carries the ids.",
    )
    spare: int = param(
        512, ge=0, le=1 << 16, unit="rows", doc="Rows behind them for tokens that are learned."
    )
    learn: Seq[Literal["prompt", "verify"]] = param(
        ("prompt", "verify"),
        default_words="`[prompt, verify]`",
        doc="Which tokens to learn: those of a `prompt`, before it is read, and those that the "
        "target chooses (`verify`), after each launch. A learned token is never forgotten.",
    )
    per_prompt: int = param(
        256, ge=1, unit="rows", doc="Spare rows that one prompt may fill, so that others can learn."
    )
    sidecar: bool = param(
        False,
        doc="Whether memra-run keeps learned tokens in a file beside the artifact's ids, and "
        "loads them from there.",
    )

    def check(self) -> Iterator[Problem]:
        if len(set(self.learn)) != len(self.learn):
            yield Problem(("learn",), "`learn` lists something twice")
        if self.sidecar and not (self.spare and self.learn):
            path = ("spare",) if not self.spare else ("learn",)
            yield Problem(
                ("sidecar",),
                "there is nothing to keep in a sidecar: no token is ever learned",
                label="must be `false`",
                because=((path, f"`{path[0]}`"),),
            )


class HeadMap(Params):
    """The map of a drafter whose file has a trimmed head: which token each row stands for.

    It is the tensor `d2t` of the file. EAGLE-3 stores what must be added to a row's number
    (`offset`); others store the token id (`absolute`).
    """

    example: ClassVar[str] = "head: {tied: false, map: {rows: 32000, kind: offset}}\n"

    rows: int = param(ge=1, unit="rows", doc="Rows of the head in the drafter's file.")
    kind: Literal["absolute", "offset"] = param(
        doc="What the tensor holds: token ids, or token ids less the row's number."
    )


class TrimmableHead(DraftHead):
    """From the last hidden state of a drafter to the drafted token."""

    table: Literal["drafter", "target"] = param(
        "drafter",
        doc="Whose table a tied head is. `target`: the drafter has none and multiplies with the "
        "target's head, so both must be equally wide; with `trim`, that is a self-trim.",
    )
    trim: HeadTrim | None = param(None, doc="Keep some rows only, chosen by frequency.")
    map: HeadMap | None = param(None, doc="The file's head is trimmed already: its map.")

    def check(self) -> Iterator[Problem]:
        if self.trim and self.map:
            yield Problem(
                ("trim",), "a head that the file has trimmed already cannot be trimmed again",
                label="leave it out", because=((("map",), "`map`"),),
            )  # fmt: skip
        if self.map and self.tied:
            yield Problem(
                ("map",), "a tied head has a row for every token, so there is nothing to map",
                label="leave it out", because=((("tied",), "`tied`"),),
            )  # fmt: skip
        if self.table == "target" and not self.tied:
            yield Problem(
                ("table",), "a head of the drafter's own cannot be the target's table",
                label="must be `drafter`", because=((("tied",), "`tied`"),),
            )  # fmt: skip

    def entry(self, ranked: int, map_names: tuple[str, ...]) -> HeadEntry | None:
        """What an artifact must know of the head's rows; None if it has one for every token."""
        if self.map:
            return HeadEntry(TRIMMED_HEAD, self.map.rows, 0, map_names, self.map.kind)
        return HeadEntry(TRIMMED_HEAD, ranked, self.trim.spare) if self.trim else None

    def choose(self, b: ProgramBuilder, place: DraftPlace, x: str, width: int) -> Chosen:
        """Emit the head for the normed hidden state `x [1, width]`."""
        at = ("drafter", "head")
        section = "target" if self.table == "target" else "drafter"
        tied = place.target_head_tied if section == "target" else self.tied
        role = "embed" if tied else "head"
        of_rows = self.map.rows if self.map else place.vocab
        kept = self.map.rows if self.map else place.ranked + self.trim.spare if self.trim else 0
        rows = -(-kept // HEAD_GROUP) * HEAD_GROUP or place.vocab
        head = b.module.weight(
            section, role, (rows, width), "embed", path=at,
            trimmed=(TRIMMED_HEAD, of_rows) if kept else None,
        )  # fmt: skip
        logits = b.linear(x, head, label="drafter.head", path=at)
        if self.softcap is not None:
            logits = b.one(SoftCap(self.softcap), logits, label="drafter.softcap", path=at)
        if not kept:
            choice = b.one(ArgMax(), logits, label="drafter.choice", path=at)
            return Chosen(choice, logits, choice)
        used = b.module.plane(HEAD_ROWS, (1,), "i32")
        ids = b.module.plane(HEAD_IDS, (rows,), "i32")
        row = b.one(BestRow(), logits, used, label="drafter.row", path=at)
        choice = b.one(TokenOfRow(), row, ids, label="drafter.choice", path=at)
        return Chosen(choice, logits, row, (used,))

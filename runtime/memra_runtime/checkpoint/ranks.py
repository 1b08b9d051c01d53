"""The tokens that a trimmed head knows: ranks files, and maps in weight files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memra_runtime.errors import Diagnostic, MemraError, Position, fail

#: How a map from the rows of a head to token ids is stored.
MAP_KINDS = ("absolute", "offset")
#: Bad lines of a file that are worth a message each.
_SHOWN = 6
#: So many ids in ascending order are no accident.
_ORDERED = 64


def read_ranks(path: Path, vocab: int) -> tuple[int, ...]:
    """Read a ranks file: a token id a line; lines that begin with `#` say where it comes from.

    Raises: one MemraError with the first bad lines: no number, outside the vocabulary, there twice;
    or a file without ids, or one that lists them by number, which says nothing of frequency.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail("ranks", f"cannot read the ranks file: {error}", str(path))
    first: dict[int, int] = {}
    problems: list[Diagnostic] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("#"):
            continue
        wrong = ""
        if not (text.isascii() and text.isdigit()):
            wrong = f"`{text[:40]}` is not a token id" if text else "an empty line"
        elif int(text) >= vocab:
            wrong = f"token id {text} is outside the vocabulary of {vocab}"
        elif int(text) in first:
            wrong = f"token id {text} is there twice: in line {first[int(text)]}, too"
        else:
            first[int(text)] = number
        if wrong:
            hint = "one token id a line, most frequent first"
            problems.append(
                Diagnostic("ranks", wrong, Position(str(path), number), line, hints=(hint,))
            )
    if problems:
        rest = len(problems) - _SHOWN
        more = [Diagnostic("ranks", f"{rest} more bad lines", str(path))] if rest > 0 else []
        raise MemraError((*problems[:_SHOWN], *more))
    ids = tuple(first)
    if not ids:
        fail("ranks", "the ranks file holds no token id", str(path),
             hints=("one token id a line, most frequent first",))  # fmt: skip
    if len(ids) >= _ORDERED and list(ids) == sorted(ids):
        fail("ranks", "the token ids are in ascending order, which is no order of frequency",
             str(path), hints=("count tokens in text like that the model will write",))  # fmt: skip
    return ids


def ranks_digest(ids: Sequence[int]) -> str:
    """SHA-256 of a list of token ids, as hexadecimal text."""
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()


def map_ids(values: npt.NDArray[np.int64], kind: str, vocab: int, place: str) -> tuple[int, ...]:
    """Token ids of the rows of a head, from its map (a tensor `d2t`) of a kind of `MAP_KINDS`.

    Raises: MemraError for an id outside the vocabulary or of two rows.
    """
    wrong = _map_problem(values, kind, vocab)
    if wrong:
        other = MAP_KINDS[1 - MAP_KINDS.index(kind)]
        fits = not _map_problem(values, other, vocab)
        hint = f"its values make sense as `kind: {other}`" if fits else (
            "the drafter may belong to another model")  # fmt: skip
        fail("head-map", f"read as `{kind}`, the map of the drafter's head is wrong: {wrong}",
             place, hints=(hint,))  # fmt: skip
    return tuple(int(v) for v in _absolute(values, kind))


def _absolute(values: npt.NDArray[np.int64], kind: str) -> npt.NDArray[np.int64]:
    rows = np.arange(len(values), dtype=np.int64)
    return values + rows if kind == "offset" else values


def _map_problem(values: npt.NDArray[np.int64], kind: str, vocab: int) -> str:
    ids = _absolute(values, kind)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        row = int(outside[0])
        return (f"row {row} would be token {ids[row]}, outside the vocabulary of {vocab} "
                f"({len(outside)} such rows)")  # fmt: skip
    unique, counts = np.unique(ids, return_counts=True)
    twice = unique[counts > 1]
    if len(twice):
        rows = np.flatnonzero(ids == twice[0])
        return (f"token {twice[0]} belongs to rows {rows[0]} and {rows[1]} "
                f"({len(twice)} such tokens)")  # fmt: skip
    return ""

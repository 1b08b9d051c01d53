"""The sidecar of a trimmed head: learned token ids that outlive a process.

A text file beside the artifact's ids. Its first line says what the ids were learned for and what
they are, so that a foreign or damaged file is refused; an id a line follows.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memra_runtime.checkpoint import ranks_digest
from memra_runtime.errors import fail
from memra_runtime.files import replaced

_TITLE = "# memra learned ids 1"


@dataclass(frozen=True)
class Sidecar:
    """The file, and what its ids must have been learned for."""

    path: Path
    ranks: str
    vocab: int

    def read(self) -> list[int]:
        """The ids of the file, in the order in which they were learned; none if there is no file.

        Raises: MemraError for a file that is damaged, or was learned for another head.
        """
        try:
            text = self.path.read_text(encoding="ascii")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            self._refuse("corrupt", f"it cannot be read: {error}")
        title, _, body = text.partition("\n")
        facts = dict(w.split("=", 1) for w in title.removeprefix(_TITLE).split() if "=" in w)
        if not title.startswith(_TITLE) or facts.keys() != {"ranks", "vocab", "ids"}:
            self._refuse("corrupt", "its first line is not that of learned ids")
        lines = body.splitlines()
        if not all(line.isdigit() for line in lines):
            self._refuse("corrupt", "it holds a line that is no token id")
        ids = [int(line) for line in lines]
        if facts["ids"] != f"{len(ids)}:{ranks_digest(ids)}":
            self._refuse("corrupt", "its ids are not those that its first line tells of")
        if (facts["ranks"], facts["vocab"]) != (self.ranks, str(self.vocab)):
            self._refuse(
                "foreign",
                f"it was learned for ranks {facts['ranks'][:12]} and {facts['vocab']} tokens, the "
                f"artifact has ranks {self.ranks[:12]} and {self.vocab} tokens",
            )
        if len(set(ids)) != len(ids) or any(i >= self.vocab for i in ids):
            self._refuse("corrupt", "it holds an id twice or outside the vocabulary")
        return ids

    def add(self, ids: Sequence[int], limit: int) -> tuple[int, int]:
        """Append ids that the file lacks; returns how many were added, and how many it then holds.

        The file never holds more than `limit`. It is replaced as a whole, and one process at a
        time reads and replaces it, so that none loses what another has learned.

        Raises: MemraError if it cannot be written, or is not one of ours.
        """
        try:
            with self._alone():
                known = self.read()
                new = [i for i in dict.fromkeys(ids) if i not in set(known)]
                new = new[: max(0, limit - len(known))]
                if new:
                    self._replace([*known, *new])
        except OSError as error:
            fail(
                "sidecar",
                f"cannot save what was learned: {error}",
                str(self.path),
                hints=("make the folder writable, or set `sidecar: false` in the spec",),
            )
        return len(new), len(known) + len(new)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock on the folder: the file itself is replaced, so it cannot carry one."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _replace(self, ids: Sequence[int]) -> None:
        title = f"{_TITLE} ranks={self.ranks} vocab={self.vocab} ids={len(ids)}:{ranks_digest(ids)}"
        with replaced(self.path) as file:
            file.write(("\n".join([title, *map(str, ids)]) + "\n").encode("ascii"))

    def _refuse(self, what: str, why: str) -> None:
        fail(f"sidecar-{what}", f"the sidecar of learned ids is {what}: {why}", str(self.path),
             hints=("delete it: tokens are learned again",))  # fmt: skip

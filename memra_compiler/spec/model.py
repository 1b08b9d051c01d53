"""A valid spec: what the rest of the compiler reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

from memra_compiler.drafters.base import DrafterParams
from memra_compiler.drafters.head import HeadTrim, TrimmableHead
from memra_compiler.layers.params import Path
from memra_compiler.rounds.policy import RoundPolicy
from memra_compiler.spec.archs import ArchTable, Expected, arch_table
from memra_compiler.spec.marks import Document, lookup
from memra_compiler.spec.schema import Root, Runtime, Target
from memra_runtime.artifact import HeadEntry
from memra_runtime.checkpoint import ranks_digest, read_ranks
from memra_runtime.errors import Position


@dataclass(frozen=True)
class Spec:
    """A pipeline with every value resolved, and where each is written."""

    root: Root
    document: Document = field(repr=False)

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def target(self) -> Target:
        return self.root.target

    @property
    def drafter(self) -> DrafterParams:
        return self.root.drafter

    @property
    def round(self) -> RoundPolicy:
        return self.root.round

    @property
    def runtime(self) -> Runtime:
        return self.root.runtime

    def resolved(self) -> dict[str, Any]:
        """Return the spec as plain JSON data: defaults and `auto` filled in, layers expanded.

        Paths of files are left out, so the same model elsewhere has the same digest.
        """
        data = self.root.model_dump(mode="json", by_alias=True)
        data.pop("extends")
        for section in ("target", "drafter"):
            data[section].pop("weights")
        if self.trim is not None:
            data["drafter"]["head"]["trim"]["ranks"] = f"sha256:{ranks_digest(self.ranks)}"
        return data

    @property
    def trim(self) -> HeadTrim | None:
        """How the drafter's head is trimmed, if it is."""
        head = getattr(self.drafter, "head", None)
        return head.trim if isinstance(head, TrimmableHead) else None

    @property
    def head_entry(self) -> HeadEntry | None:
        """What an artifact must know of a trimmed head; None for a whole one."""
        head = getattr(self.drafter, "head", None)
        if not isinstance(head, TrimmableHead):
            return None
        names = self.arch("drafter").weight_names("d2t") if head.map else ()
        return head.entry(len(self.ranks), names)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Token ids of the ranks file, most frequent first; none for a head that is not trimmed.

        Raises: MemraError with the lines of the file that are wrong.
        """
        if self.trim is None:
            return ()
        path = named_path(self.document, ("drafter", "head", "trim", "ranks"))
        assert path is not None
        return read_ranks(path, self.target.vocab)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the resolved spec, as hexadecimal text."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def position(self, path: Path) -> Position:
        """Return where a value is written (a mapping: its key), or what encloses it in a file.

        A value set on the command line has no line; `place` names it.
        """
        while True:
            mapping = isinstance(lookup(self.document.data, path), dict)
            place = self.document.mark(path, key=mapping).place
            if isinstance(place, Position):
                return place
            path = path[:-1]

    def place(self, path: Path) -> Position | str:
        """Return where a value is written: a position, or `--set a.b.c`."""
        return self.document.mark(path).place

    def weights(self, section: str) -> FilePath | None:
        """Return the weight file that `target` or `drafter` names, None if it names none."""
        return weights_path(self.document, section)

    def arch(self, section: str) -> ArchTable:
        """Return the architecture table of `target` or `drafter`."""
        return arch_table(getattr(self, section).arch)

    def expected(self, section: str) -> list[Expected]:
        """Return what a weight file for `target` or `drafter` must say in its metadata."""
        return self.arch(section).expected(self)


def weights_path(document: Document, section: str) -> FilePath | None:
    """Return a section's weight file, taken relative to the spec file that names it."""
    return named_path(document, (section, "weights"))


def named_path(document: Document, path: Path) -> FilePath | None:
    """Return the file that a field names, relative to the spec file that it is written in."""
    name = lookup(document.data, path)
    if not isinstance(name, str) or not name:
        return None
    place = document.mark(path).place
    base = FilePath(place.file).parent if isinstance(place, Position) else FilePath()
    return base / name

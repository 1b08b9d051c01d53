"""Architecture tables: one file an architecture with a `TABLE`; nothing else lists it."""

from __future__ import annotations

import importlib
import pkgutil

from memra_compiler.spec.archs.table import (
    ArchTable,
    CheckpointLike,
    Checkpoints,
    Expected,
    Fact,
    Facts,
    TensorLike,
)

__all__ = [
    "ArchTable",
    "CheckpointLike",
    "Checkpoints",
    "Expected",
    "Fact",
    "Facts",
    "TensorLike",
    "arch_table",
    "known_archs",
]


def _tables() -> dict[str, ArchTable]:
    found: dict[str, ArchTable] = {}
    for info in pkgutil.iter_modules(__path__, f"{__name__}."):
        table = getattr(importlib.import_module(info.name), "TABLE", None)
        if table is not None:
            found[table.name] = table
    return dict(sorted(found.items()))


def known_archs(section: str) -> tuple[str, ...]:
    """Return the names that `arch:` of `target` or `drafter` accepts, aliases left out."""
    return tuple(name for name, table in _tables().items() if table.section == section)


def arch_table(name: str) -> ArchTable:
    """Return the table of an architecture, by any of its spellings.

    Raises: KeyError if there is none.
    """
    tables = _tables()
    for table in tables.values():
        if name in table.names:
            return table
    raise KeyError(name)

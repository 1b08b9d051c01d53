"""The spec language: YAML with positions, a typed schema, and errors that say what to do."""

from __future__ import annotations

from memra_compiler.spec.archs import (
    ArchTable,
    Checkpoints,
    Expected,
    arch_table,
    known_archs,
)
from memra_compiler.spec.load import load_spec, weight_files
from memra_compiler.spec.model import Spec

__all__ = [
    "ArchTable",
    "Checkpoints",
    "Expected",
    "Spec",
    "arch_table",
    "known_archs",
    "load_spec",
    "weight_files",
]

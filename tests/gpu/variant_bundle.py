"""Tiny models of every gemma4 variant, compiled for a GPU: `build/gpu/variants`.

Weights are made from their seed wherever they are needed; only artifacts are carried.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pair_bundle import FOLDER
from variant_support import RUNNING, Files, compile_variant, write_files


@dataclass(frozen=True)
class Run:
    """A variant in one class of activations."""

    name: str
    activations: str = "f32"

    @property
    def id(self) -> str:
        return f"{self.name}-{self.activations}"

    @property
    def artifact(self) -> Path:
        return FOLDER / "variants" / f"{self.id}.memra"

    def build(self, arch: str, scratch: Path, cache: Path) -> None:
        """Compile it for a GPU."""
        overrides = {"runtime.activations": self.activations}
        files = write_files(self.name, scratch / self.id)
        compile_variant(self.name, files, self.artifact, cache, overrides, f"cuda:{arch}")

    def files(self, folder: Path) -> Files:
        return write_files(self.name, folder)


RUNS = [
    *map(Run, RUNNING),
    *(Run(name, activations) for name in ("26b", "e4b") for activations in ("int8", "bf16")),
]

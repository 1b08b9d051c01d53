"""How a mistake is described: what is typed, what is broken, what the report must say."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from cli_tools import DRAFT, SPEC, TARGET, WEIGHTS, rewrite

Q8_BLOCK = 34  # bytes of a q8_0 block; the first two are its scale


@dataclass(frozen=True)
class Workshop:
    """A folder to break things in, and a sound artifact to copy from."""

    folder: Path
    artifact: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    def write(self, name: str, content: str | bytes) -> Path:
        raw = content.encode() if isinstance(content, str) else content
        self.path(name).write_bytes(raw)
        return self.path(name)

    def spec(self, old: str = "", new: str = "") -> Path:
        """The bundled spec with one change; its weights are named by absolute paths."""
        text = SPEC.read_text()
        assert old in text
        text = text.replace(old, new, 1) if old else text
        for file in (TARGET, DRAFT):
            text = text.replace(f"weights: {file.name}", f"weights: {file}")
        return self.write("spec.yaml", text)

    def cut(self, source: Path, size: int) -> Path:
        return self.write("cut.gguf", source.read_bytes()[:size])

    def gguf(self, source: Path, **changes: Any) -> Path:
        return rewrite(source, self.path("changed.gguf"), **changes)

    def broken(self, change: Callable[[Path], object]) -> Path:
        """A copy of the artifact that `change` has damaged."""
        folder = self.path("broken.cpu.memra")
        shutil.copytree(self.artifact, folder)
        change(folder)
        return folder

    def manifest(self, **values: object) -> Path:
        def change(folder: Path) -> None:
            path = folder / "manifest.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

        return self.broken(change)


@dataclass(frozen=True)
class Case:
    """`name`: one mistake; `says`: fragments of its report; `reports`: how many may be found."""

    name: str
    command: str
    typed: Callable[[Workshop], Sequence[str | Path]]
    code: str
    says: tuple[str, ...]
    reports: int = 1
    launched: bool = False
    """Run it as a process: its environment matters, or it starts the compiler."""


def flip(name: str) -> Callable[[Path], None]:
    """Flip a bit in the middle of a file of the artifact."""

    def change(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / name).write_bytes(raw)

    return change


def nan_scale(data: Any) -> Any:
    """Make the first block's scale of a q8_0 matrix NaN."""
    raw = data.reshape(-1, Q8_BLOCK).copy()
    raw[0, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
    return raw.reshape(data.shape)


def infinite(data: Any) -> Any:
    return np.where(np.arange(len(data)) == 3, np.inf, data).astype(np.float32)


def other_tokens() -> dict[str, Any]:
    """Another tokenizer of the same size: two tokens change places."""
    tokens = gguf.GGUFReader(DRAFT).fields["tokenizer.ggml.tokens"].contents()
    tokens[300], tokens[301] = tokens[301], tokens[300]
    return {"tokenizer.ggml.tokens": tokens}


def zipped(w: Workshop) -> Path:
    with zipfile.ZipFile(w.path("model.gguf"), "w") as archive:
        archive.writestr("model", "x")
    return w.path("model.gguf")


def folder_with(w: Workshop, name: str) -> Path:
    w.path("folder").mkdir()
    (w.path("folder") / name).write_text("{}")
    return w.path("folder")


def compiling(
    name: str, typed: Callable[[Workshop], Sequence[str | Path]], code: str, *says: str, **rest: Any
) -> Case:
    return Case(name, "memra-compile", typed, code, says, **rest)


def compiling_spec(name: str, old: str, new: str, code: str, *says: str, reports: int = 1) -> Case:
    return compiling(name, lambda w: [w.spec(old, new)], code, "spec.yaml:", *says, reports=reports)


def compiling_with(
    name: str, weights: Callable[[Workshop], Path], code: str, *says: str, reports: int = 1
) -> Case:
    def typed(w: Workshop) -> list[str | Path]:
        return [w.spec(), "--weights", weights(w)]

    return compiling(name, typed, code, *says, reports=reports)


def running(
    name: str, typed: Callable[[Workshop], Sequence[str | Path]], code: str, *says: str, **rest: Any
) -> Case:
    """A run of the sound artifact with its weights, and what else is typed."""

    def whole(w: Workshop) -> list[str | Path]:
        return [w.artifact, *WEIGHTS, *typed(w)]

    return Case(name, "memra-run", whole, code, says, **rest)


def running_with(
    name: str,
    target: Callable[[Workshop], Path],
    draft: Callable[[Workshop], Path],
    code: str,
    *says: str,
    reports: int = 1,
) -> Case:
    def typed(w: Workshop) -> list[str | Path]:
        return [w.artifact, "--weights", target(w), "--draft", draft(w), "-p", "a"]

    return Case(name, "memra-run", typed, code, says, reports)


def running_broken(name: str, artifact: Callable[[Workshop], Path], code: str, *says: str) -> Case:
    return Case(name, "memra-run", lambda w: [artifact(w), *WEIGHTS, "-p", "a"], code, says)


def sound_target(w: Workshop) -> Path:
    return TARGET


def sound_draft(w: Workshop) -> Path:
    return DRAFT

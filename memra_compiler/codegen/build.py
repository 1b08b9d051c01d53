"""From a planned module to an artifact on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from memra_compiler.codegen.cache import KernelCache, content_key
from memra_compiler.codegen.cpu import compile_entries, link
from memra_compiler.codegen.kernels import Progress, compile_kernels
from memra_compiler.codegen.toolchain import Linker, host_cpu, host_features, processor_name
from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ir.text import print_module
from memra_compiler.ops.base import Cost
from memra_runtime.artifact import (
    LEARNED_FILE,
    LIBRARY,
    RANKS_FILE,
    ExpectEntry,
    HeadEntry,
    IgnoreEntry,
    Manifest,
    PlaneEntry,
    ProgramEntry,
    ValueEntry,
    WeightEntry,
    file_digest,
    load_manifest,
)
from memra_runtime.errors import MemraError, Position, fail

IR_TEXT = "module.mir"


@dataclass(frozen=True)
class SpecFacts:
    """What the manifest says of the spec."""

    resolved: Mapping[str, Any]
    digest: str
    expect: tuple[ExpectEntry, ...]
    ignore: tuple[IgnoreEntry, ...] = ()
    #: Token ids of a trimmed head, and what the manifest says of it.
    ranks: tuple[int, ...] = ()
    head: HeadEntry | None = None


class Tools(Protocol):
    """A target's code generator, as the artifact's writer sees it."""

    @property
    def target(self) -> str: ...

    def identity(self) -> str:
        """Everything outside the module that decides the code, for the artifact's key."""

    def write(self, module: Module, key: str, folder: Path, progress: Progress) -> Parts:
        """Generate the code of a module into `folder`."""


@dataclass(frozen=True)
class Parts:
    """What a target adds to a manifest: its files, and fields by name."""

    files: tuple[str, ...]
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Toolchain:
    """The CPU target: TVM and LLVM, one shared library."""

    linker: Linker
    cache: KernelCache
    target: str = "cpu"

    def identity(self) -> str:
        return f"{known_cpu(self.cache)} {host_features()!r}"

    def write(self, module: Module, key: str, folder: Path, progress: Progress) -> Parts:
        cpu = known_cpu(self.cache)
        kernels = compile_kernels(module, cpu, self.cache, progress)
        code, source = self.cache.get(key, ".o"), self.cache.get(key, ".tir")
        if code is None or source is None:
            symbols = {k.name: k.name for k in kernels}
            code, text = compile_entries(module, symbols, list(module.weights), cpu)
            source = text.encode()
            self.cache.put(key, ".tir", source)
            self.cache.put(key, ".o", code)
        objects = [k.object for k in kernels]
        link(self.linker, [*objects, self.cache.path(key, ".o")], folder / LIBRARY)
        sources = folder / "sources"
        sources.mkdir()
        for kernel in kernels:
            (sources / f"{kernel.name}.tir").write_text(kernel.source, encoding="utf-8")
        (sources / "programs.tir").write_bytes(source)
        fields = {
            "cpu": cpu,
            "cpu_features": host_features(),
            "kernels": tuple(k.name for k in kernels),
        }
        return Parts((LIBRARY,), fields)


def build_artifact(
    module: Module, facts: SpecFacts, folder: Path, tools: Tools, progress: Progress
) -> tuple[Manifest, bool]:
    """Write the artifact of `module` to `folder`; returns it and whether work was needed.

    The folder appears whole or not at all: it is written aside and moved into place.

    Raises: MemraError when the folder cannot be written or is something else.
    """
    text = print_module(without_folders(module))
    product = f"{version('memra')} {facts.expect!r} {facts.ignore!r}"
    key = content_key(text, facts.digest, product, tools.target, tools.identity())
    known = _up_to_date(folder, key)
    if known is not None:
        return known, False
    _check_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        fail("output", f"cannot write the artifact: {error}", str(folder))
    try:
        parts = tools.write(module, key, aside, progress)
        (aside / IR_TEXT).write_text(text, encoding="utf-8")
        if facts.ranks:
            ids = "".join(f"{i}\n" for i in facts.ranks)
            (aside / RANKS_FILE).write_text(ids, encoding="ascii")
            parts = replace(parts, files=(*parts.files, RANKS_FILE))
        manifest = _manifest(module, facts, key, aside, tools.target, parts)
        (aside / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        _keep_learned(facts, folder, aside)
        _replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return manifest, True


def _keep_learned(facts: SpecFacts, folder: Path, aside: Path) -> None:
    """Let a new artifact inherit what the old one has learned, if it was for the same ranks."""
    learned, ranks = folder / LEARNED_FILE, folder / RANKS_FILE
    if (
        learned.is_file()
        and ranks.is_file()
        and file_digest(ranks) == (file_digest(aside / RANKS_FILE) if facts.ranks else "")
    ):
        shutil.copy2(learned, aside / LEARNED_FILE)


def without_folders(module: Module) -> Module:
    """The module with file names only in its positions: an artifact is the same wherever it is."""

    def bare(position: Position | None) -> Position | None:
        return position and replace(position, file=Path(position.file).name)

    def rewrite(program: Program) -> Program:
        nodes = tuple(replace(node, position=bare(node.position)) for node in program.nodes)
        return replace(program, nodes=nodes)

    weights = {n: replace(w, position=bare(w.position)) for n, w in module.weights.items()}
    return replace(module, weights=weights).with_programs(rewrite)


def known_cpu(cache: KernelCache) -> str:
    """LLVM's name of this processor; remembered, because asking LLVM loads all of TVM."""
    key = content_key("host cpu", repr(host_features()), processor_name())
    known = cache.get(key, ".cpu")
    if known is not None:
        return known.decode()
    cpu = host_cpu()
    cache.put(key, ".cpu", cpu.encode())
    return cpu


def _manifest(
    module: Module, facts: SpecFacts, key: str, folder: Path, target: str, parts: Parts
) -> Manifest:
    weights = tuple(
        WeightEntry(
            name,
            w.source,
            w.names,
            w.type.max_shape,
            w.type.dtype,
            w.type.nbytes,
            w.made,
            stacked=w.stacked,
            of_rows=w.of_rows,
        )
        for name, w in module.weights.items()
    )
    planes = []
    for name, plane in module.planes.items():
        at, shape = module.arena[f"@{name}"], plane.type.stored_shape
        planes.append(PlaneEntry(name, at, shape, plane.type.dtype, plane.rollback, plane.ring))
    values = []
    for program in module.programs.values():
        for name in program.results:
            at, type = module.arena[f"{program.name}/%{name}"], program.values[name]
            values.append(ValueEntry(program.name, name, at, type.max_shape, type.dtype))
    sequences = {
        s.name: tuple((c.program, c.repeat) for c in s.calls) for s in module.sequences.values()
    }
    common: dict[str, Any] = {
        "name": module.name,
        "target": target,
        "cpu": "",
        "cpu_features": (),
        "spec": facts.resolved,
        "spec_digest": facts.digest,
        "build_key": key,
        "versions": {"memra": version("memra"), "tvm": version("apache-tvm")},
        "arena_bytes": module.arena[""],
        "weight_bytes": sum(w.bytes for w in weights),
        "files": {name: file_digest(folder / name) for name in (*parts.files, IR_TEXT)},
        "weights": weights,
        "planes": tuple(planes),
        "values": tuple(values),
        "expect": facts.expect,
        "head": facts.head,
        "ignore": facts.ignore,
        "programs": tuple(_cost(module, name) for name in module.programs),
        "sequences": sequences,
        "loops": {s.name: s.loop for s in module.sequences.values() if s.loop},
        "kernels": (),
    }
    return Manifest(**(common | dict(parts.fields)))


def node_cost(module: Module, program: Program, node: Node) -> Cost:
    """What a node must move and compute at its program's largest row count and a full context."""
    types = (t.in_rows for t in module.operand_types(program, node))
    return node.op.cost(program.rows.bound, *types)


def _cost(module: Module, name: str) -> ProgramEntry:
    program = module.programs[name]
    costs = [node_cost(module, program, node) for node in program.nodes]
    return ProgramEntry(
        name, len(program.nodes), program.rows.bound, sum(c.bytes for c in costs),
        sum(c.flops for c in costs), program.fault,
    )  # fmt: skip


def _up_to_date(folder: Path, key: str) -> Manifest | None:
    if not (folder / "manifest.json").is_file():
        return None
    try:
        manifest = load_manifest(folder)
    except MemraError:
        return None  # broken or old: it is built anew
    return manifest if manifest.build_key == key else None


def _check_folder(folder: Path) -> None:
    """Refuse to replace what is not an artifact, whole or broken."""
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / IR_TEXT).is_file()):
        return
    manifest = folder / "manifest.json"
    text = manifest.read_bytes() if manifest.is_file() else b""
    if folder.exists() and b'"build_key"' not in text:
        fail(
            "output",
            f"`{folder}` exists and is not an artifact; it is left alone",
            str(folder),
            hints=("choose another folder with -o",),
        )


def _replace(aside: Path, folder: Path) -> None:
    """Move `aside` to `folder`, whose old content goes away only once the new one is whole."""
    os.chmod(aside, 0o755)
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        os.replace(folder, old / folder.name)
        os.replace(aside, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(aside, folder)

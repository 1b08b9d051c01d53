"""From a planned module to an artifact on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memra_compiler.codegen.cache import KernelCache, content_key
from memra_compiler.codegen.cpu import compile_entries, link
from memra_compiler.codegen.kernels import Progress, compile_kernels
from memra_compiler.codegen.toolchain import Linker, host_cpu, host_features, processor_name
from memra_compiler.ir.graph import Module
from memra_compiler.ir.text import print_module
from memra_runtime.artifact import (
    ExpectEntry,
    Manifest,
    PlaneEntry,
    ProgramEntry,
    ValueEntry,
    WeightEntry,
    file_digest,
    load_manifest,
)
from memra_runtime.errors import MemraError, fail

LIBRARY = "programs.so"
IR_TEXT = "module.mir"


@dataclass(frozen=True)
class SpecFacts:
    """What the manifest says of the spec."""

    resolved: Mapping[str, Any]
    digest: str
    expect: tuple[ExpectEntry, ...]


@dataclass(frozen=True)
class Toolchain:
    """What the artifact is built with."""

    linker: Linker
    cache: KernelCache


def build_artifact(
    module: Module, facts: SpecFacts, folder: Path, tools: Toolchain, progress: Progress
) -> tuple[Manifest, bool]:
    """Write the CPU artifact of `module` to `folder`; returns it and whether work was needed.

    The folder appears whole or not at all: it is written aside and moved into place.

    Raises: MemraError when the folder cannot be written or is something else.
    """
    cpu = known_cpu(tools.cache)
    text = print_module(module)
    key = content_key(text, facts.digest, cpu, repr(host_features()))
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
        manifest = _write(module, text, key, facts, aside, tools, progress, cpu)
        _replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return manifest, True


def known_cpu(cache: KernelCache) -> str:
    """LLVM's name of this processor; remembered, because asking LLVM loads all of TVM."""
    key = content_key("host cpu", repr(host_features()), processor_name())
    known = cache.get(key, ".cpu")
    if known is not None:
        return known.decode()
    cpu = host_cpu()
    cache.put(key, ".cpu", cpu.encode())
    return cpu


def _write(
    module: Module,
    text: str,
    key: str,
    facts: SpecFacts,
    folder: Path,
    tools: Toolchain,
    progress: Progress,
    cpu: str,
) -> Manifest:
    kernels = compile_kernels(module, cpu, tools.cache, progress)
    entries = tools.cache.get(key, ".o"), tools.cache.get(key, ".tir")
    if entries[0] is None or entries[1] is None:
        code, source = compile_entries(
            module, {k.name: k.name for k in kernels}, list(module.weights), cpu
        )
        tools.cache.put(key, ".tir", source.encode())
        tools.cache.put(key, ".o", code)
    else:
        source = entries[1].decode()
    objects = [k.object for k in kernels]
    link(tools.linker, [*objects, tools.cache.path(key, ".o")], folder / LIBRARY)
    sources = folder / "sources"
    sources.mkdir()
    for kernel in kernels:
        (sources / f"{kernel.name}.tir").write_text(kernel.source, encoding="utf-8")
    (sources / "programs.tir").write_text(source, encoding="utf-8")
    (folder / IR_TEXT).write_text(text, encoding="utf-8")
    manifest = _manifest(module, facts, key, folder, cpu)
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _manifest(module: Module, facts: SpecFacts, key: str, folder: Path, cpu: str) -> Manifest:
    weights = tuple(
        WeightEntry(name, w.source, w.names, w.type.max_shape, w.type.dtype, w.type.nbytes, w.made)
        for name, w in module.weights.items()
    )
    planes = []
    for name, plane in module.planes.items():
        at, shape = module.arena[f"@{name}"], plane.type.max_shape
        planes.append(PlaneEntry(name, at, shape, plane.type.dtype, plane.rollback, plane.ring))
    values = []
    for program in module.programs.values():
        for name in program.results:
            at, type = module.arena[f"{program.name}/%{name}"], program.values[name]
            values.append(ValueEntry(program.name, name, at, type.max_shape, type.dtype))
    sequences = {
        s.name: tuple((c.program, c.repeat) for c in s.calls) for s in module.sequences.values()
    }
    return Manifest(
        name=module.name,
        target="cpu",
        cpu=cpu,
        cpu_features=host_features(),
        spec=facts.resolved,
        spec_digest=facts.digest,
        build_key=key,
        versions={"memra": version("memra"), "tvm": version("apache-tvm")},
        arena_bytes=module.arena[""],
        weight_bytes=sum(w.bytes for w in weights),
        files={name: file_digest(folder / name) for name in (LIBRARY, IR_TEXT)},
        weights=weights,
        planes=tuple(planes),
        values=tuple(values),
        expect=facts.expect,
        programs=tuple(_cost(module, name) for name in module.programs),
        sequences=sequences,
        kernels=tuple(dict.fromkeys(node.kernel for _, node in module.nodes())),
    )


def _cost(module: Module, name: str) -> ProgramEntry:
    program = module.programs[name]
    rows = program.rows.bound
    costs = [n.op.cost(rows, *module.operand_types(program, n)) for n in program.nodes]
    return ProgramEntry(
        name, len(program.nodes), rows, sum(c.bytes for c in costs), sum(c.flops for c in costs),
        program.fault,
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
    if folder.exists() and not (folder / "manifest.json").is_file() and (
        not folder.is_dir() or any(folder.iterdir())
    ):  # fmt: skip
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

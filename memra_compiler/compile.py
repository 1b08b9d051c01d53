"""Compile a spec: load, build, run the passes, generate code, write the artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memra_compiler.codegen.build import SpecFacts, build_artifact
from memra_compiler.codegen.cache import DEFAULT_CACHE
from memra_compiler.codegen.kernels import Progress
from memra_compiler.codegen.targets import tools_for
from memra_compiler.ir.graph import Module
from memra_compiler.passes.pipeline import Watch, run_passes
from memra_compiler.rounds.programs import build_module
from memra_compiler.spec import Spec, load_spec, weight_files
from memra_compiler.spec.archs import Checkpoints
from memra_runtime.artifact import ExpectEntry, IgnoreEntry, Manifest
from memra_runtime.checkpoint import open_checkpoint


@dataclass(frozen=True)
class CompileOptions:
    """What a compilation may be told. `weights` and `draft` replace the files the spec names."""

    target: str = "cpu"
    weights: Path | None = None
    draft: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    cache: Path = DEFAULT_CACHE


@dataclass(frozen=True)
class Compiled:
    """A finished compilation."""

    manifest: Manifest
    folder: Path
    fresh: bool


def _quiet(name: str, done: int, total: int, cached: bool) -> None:
    """Report no progress."""


def load(spec: Path, options: CompileOptions) -> tuple[Spec, Checkpoints]:
    """Load a spec against its weight files, where they are at hand."""
    named = weight_files(spec, overrides=options.overrides)
    files = {"target": options.weights, "drafter": options.draft}
    opened = {}
    for section, given in files.items():
        path = given or named.get(section)
        # a file that only the spec names may be absent: its `formats` stand in
        if path is not None and (given is not None or path.exists()):
            opened[section] = open_checkpoint(path)
    checkpoints = Checkpoints(**opened)
    return load_spec(spec, overrides=options.overrides, checkpoints=checkpoints), checkpoints


def lower(
    spec: Spec,
    checkpoints: Checkpoints,
    *,
    target: str = "cpu",
    until: str = "",
    watch: Watch | None = None,
) -> Module:
    """Build the module of a spec for a target and run the passes."""
    return run_passes(build_module(spec, checkpoints, target), until=until, watch=watch)


def spec_facts(spec: Spec) -> SpecFacts:
    """What the artifact remembers of its spec, for checking weight files at load."""
    expect = tuple(
        ExpectEntry(
            "draft" if section == "drafter" else section,
            e.keys,
            tuple(e.value) if isinstance(e.value, list) else e.value,
            ".".join(map(str, e.path)),
        )
        for section in ("target", "drafter")
        for e in spec.expected(section)
    )
    ignore = tuple(
        IgnoreEntry("draft" if section == "drafter" else section, pattern, reason)
        for section in ("target", "drafter")
        for pattern, reason in spec.arch(section).ignored(spec).items()
    )
    return SpecFacts(spec.resolved(), spec.digest, expect, ignore, spec.ranks, spec.head_entry)


def compile_spec(
    path: Path, output: Path | None, options: CompileOptions, progress: Progress = _quiet
) -> Compiled:
    """Compile `path` to `output` (default: `NAME.TARGET.memra` in the current folder).

    Raises: MemraError.
    """
    tools = tools_for(options.target, options.cache)  # first: it may lack a linker
    spec, checkpoints = load(path, options)
    module = lower(spec, checkpoints, target=options.target)
    folder = output or Path(f"{spec.name}.{options.target.replace(':', '-')}.memra")
    manifest, fresh = build_artifact(module, spec_facts(spec), folder, tools, progress)
    return Compiled(manifest, folder, fresh)

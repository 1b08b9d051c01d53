"""Where memra-inspect gets a pipeline from: a spec, lowered now, or a compiled artifact."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from memra_compiler.cli.facts import Pipeline
from memra_compiler.cli.options import check_spec_file
from memra_compiler.compile import CompileOptions, load
from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Module
from memra_compiler.ir.text import parse_module, print_module
from memra_compiler.ops.base import discover
from memra_compiler.passes.pipeline import NAMES, run_passes
from memra_compiler.rounds.programs import build_module
from memra_runtime.artifact import load_manifest
from memra_runtime.errors import fail

#: The module before any pass, beside the names of the passes.
BUILD = "build"
STAGES = (BUILD, *NAMES)


@dataclass(frozen=True)
class Inspected:
    """A pipeline, with the module and the seconds of every stage that is known."""

    pipeline: Pipeline
    stages: dict[str, Module] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def text(self, stage: str) -> str:
        return print_module(self.stages[stage])


def check_stage(name: str) -> None:
    """Refuse what is not the name of a pass. Raises: MemraError."""
    if name not in STAGES:
        from difflib import get_close_matches

        near = get_close_matches(name, STAGES, 1)
        hints = (f"did you mean `{near[0]}`?",) if near else ()
        fail(
            "pass",
            f"`{name}` is not the name of a pass",
            f"--after {name}",
            hints=(*hints, f"passes, in order: {', '.join(STAGES)}"),
        )


def inspect_spec(path: Path, options: CompileOptions) -> Inspected:
    """Lower a spec, keeping the module after each pass. Raises: MemraError."""
    check_spec_file(path)
    spec, checkpoints = load(path, options)
    start = time.perf_counter()
    module = build_module(spec, checkpoints)
    stages, seconds = {BUILD: module}, {BUILD: time.perf_counter() - start}

    def watch(name: str, result: Module, spent: float) -> None:
        stages[name], seconds[name] = result, spent

    final = run_passes(module, watch=watch)
    return Inspected(Pipeline(spec.resolved(), spec.digest, final), stages, seconds)


def inspect_artifact(folder: Path) -> Inspected:
    """Read the IR that an artifact keeps: that after the last pass. Raises: MemraError."""
    manifest = load_manifest(folder)
    path = folder / "module.mir"
    try:
        module = parse_module(path.read_text(encoding="utf-8"), discover())
    except (OSError, UnicodeDecodeError, IRError) as error:
        fail(
            "artifact-corrupt",
            f"the IR of the artifact cannot be read: {error}",
            str(path),
            hints=("compile the spec again",),
        )
    return Inspected(Pipeline(manifest.spec, manifest.spec_digest, module), {NAMES[-1]: module})

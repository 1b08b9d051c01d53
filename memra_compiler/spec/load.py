"""Load a spec: read, fill in `auto`, validate, and report everything wrong at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from memra_compiler.layers.base import stack_problems
from memra_compiler.layers.params import Path
from memra_compiler.spec.archs import Checkpoints, Fact
from memra_compiler.spec.auto import collect_facts, contradictions, resolve_auto
from memra_compiler.spec.checks import Sections, check_arch, check_sections
from memra_compiler.spec.marks import MISSING, lookup, written_layers
from memra_compiler.spec.merge import read_document
from memra_compiler.spec.model import Spec, weights_path
from memra_compiler.spec.report import Report
from memra_compiler.spec.schema import Root
from memra_runtime.errors import MemraError

SECTIONS = ("target", "drafter", "round", "runtime")


def load_spec(
    path: str | FilePath,
    *,
    overrides: Mapping[str, str] | None = None,
    checkpoints: Checkpoints | None = None,
) -> Spec:
    """Load a spec file.

    `overrides` maps dotted paths to YAML text, as in `--set round.depth.max=3`. `checkpoints` are
    the weight files at hand: they fill in `auto`, and what they contradict is an error.

    Raises: MemraError with all diagnostics, in the order of the file.
    """
    report = Report(read_document(path, overrides))
    files = checkpoints or Checkpoints()
    facts = collect_facts(report, files)
    data = report.document.data
    # contradictions first: once filled in, an `auto` agrees by construction with its own file
    contradictions(report, facts, lambda at: _written(data, at))
    resolve_auto(report, facts, files)
    if len(facts) > 1:  # but the two files may disagree about the target
        contradictions(report, facts[1:], lambda at: _written(data, at))
    root = _validate(report)
    if root is not None:
        _check_defaults(report, facts, root)
    if report.found or root is None:
        raise MemraError(report.sorted())
    spec = Spec(root, report.document)
    _ = spec.ranks  # a bad ranks file is told with the spec, not in the middle of compiling
    return spec


def weight_files(
    path: str | FilePath, *, overrides: Mapping[str, str] | None = None
) -> dict[str, FilePath]:
    """Return the weight files that a spec names, by section, without validating the spec.

    Raises: MemraError if the file cannot be read.
    """
    document = read_document(path, overrides)
    found = {section: weights_path(document, section) for section in ("target", "drafter")}
    return {section: file for section, file in found.items() if file is not None}


def _validate(report: Report) -> Root | None:
    data = report.document.data
    try:
        root = Root.model_validate(data)
    except ValidationError as error:
        report.validation(error)
        root = None
    if root is not None and not report.settled:
        sections = Sections(root.target, root.drafter, root.round, root.runtime)
    else:
        sections = Sections(**{name: _section(data, name) for name in SECTIONS})
        for name in ("target", "drafter"):
            _partial(report, name)
    for problem in check_sections(sections):
        report.problem(problem)
    return root


def _section(data: dict[str, Any], name: str) -> Any:
    """Return one section if it is valid by itself, so that rules about it can still be checked."""
    field = Root.model_fields[name]
    adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
    try:
        return adapter.validate_python(data.get(name))
    except ValidationError:
        return None


def _partial(report: Report, name: str) -> None:
    """Check architecture and layer names of a section whose other fields may be wrong."""
    section = report.document.data.get(name)
    section = section if isinstance(section, dict) else {}
    if isinstance(section.get("arch"), str):
        for problem in check_arch(name, section["arch"]):
            report.problem(problem)
    kinds, layers = section.get("layer_kinds"), written_layers(section)
    if isinstance(kinds, dict) and kinds and layers:
        for problem in stack_problems([str(kind) for kind in kinds], layers):
            report.problem(problem, (name,))


def _written(data: dict[str, Any], path: Path) -> Any:
    """Return what the spec says at a path; types that cannot be compared are left to validation."""
    value = lookup(data, path)
    comparable = value is not MISSING and value != "auto" and not isinstance(value, dict)
    return value if comparable or (path[-1] == "layers" and value != "auto") else MISSING


def _check_defaults(report: Report, facts: list[dict[Path, Fact]], root: Root) -> None:
    """A default that nobody wrote can contradict the weights, too."""
    written = report.document.data
    data = root.model_dump(mode="json", by_alias=True)

    def unwritten(path: Path) -> Any:
        return lookup(data, path) if lookup(written, path) is MISSING else MISSING

    contradictions(report, facts, unwritten)

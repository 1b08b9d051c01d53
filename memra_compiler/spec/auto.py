"""What checkpoints know about a spec: fill in `auto`, and contradict what does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from memra_compiler.layers.params import Path
from memra_compiler.spec.archs import ArchTable, CheckpointLike, Checkpoints, Fact, arch_table
from memra_compiler.spec.fields import dotted, locate
from memra_compiler.spec.marks import MISSING, lookup, written_layers
from memra_compiler.spec.report import Report

AUTO = "auto"


def collect_facts(report: Report, checkpoints: Checkpoints) -> list[dict[Path, Fact]]:
    """Return the facts of each checkpoint, the target's first; report what cannot be expressed."""
    found = []
    for section in ("target", "drafter"):
        checkpoint: CheckpointLike | None = getattr(checkpoints, section)
        table = _table(lookup(report.document.data, (section, "arch"), None))
        if checkpoint is None or table is None:
            continue
        if checkpoint.arch not in table.names:
            other = getattr(checkpoints, "drafter" if section == "target" else "target")
            swapped = other is not None and other.arch in table.names
            report.add(
                "weights-mismatch",
                (section, "arch"),
                f"the spec wants a `{table.name}` model, but {checkpoint.path} is "
                f"`{checkpoint.arch}`",
                label=f"the weights are `{checkpoint.arch}`",
                hints=("the target's and the drafter's files are swapped",) if swapped else (),
            )
            continue
        facts = table.facts(checkpoint, report.document.data)
        for problem in facts.problems:
            report.problem(problem)
        found.append(facts.values)
    return found


def _table(arch: object) -> ArchTable | None:
    try:
        return arch_table(arch) if isinstance(arch, str) else None
    except KeyError:
        return None


def resolve_auto(report: Report, facts: list[dict[Path, Fact]], checkpoints: Checkpoints) -> None:
    """Replace every `auto` of the raw spec by what a checkpoint says, or report it."""
    data = report.document.data
    known: dict[Path, Fact] = {}
    for values in reversed(facts):  # the target's facts win
        known.update(values)
    for path in list(_auto_paths(data, ())):
        slot = locate(data, path)
        if slot is None or not slot.auto:
            continue  # validation says what the field accepts
        if path in known:
            parent = lookup(data, path[:-1])
            value = known[path].value
            parent[path[-1]] = list(value) if isinstance(value, list) else value
            report.filled[path] = known[path].origin
            continue
        report.settled.add(path)
        section = str(path[0])
        if getattr(checkpoints, section, None) is None:
            report.add(
                "auto",
                path,
                f"`{dotted(path)}` is `auto`, but there is no checkpoint to read it from",
                label="needs a weight file",
                hints=(
                    f"name the file in `{section}.weights`, give it with `--weights`, or write "
                    "the value",
                ),
            )
        else:
            file = getattr(checkpoints, section).path
            report.add(
                "auto",
                path,
                f"`{dotted(path)}` is `auto`, but {file} does not say it",
                label="write the value",
                hints=("it may depend on other fields that are wrong",) if report.found else (),
            )


def _auto_paths(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _auto_paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _auto_paths(item, (*path, index))
    elif value == AUTO:
        yield path


def contradictions(
    report: Report, facts: list[dict[Path, Fact]], value_at: Callable[[Path], Any]
) -> None:
    """Report every value that a checkpoint contradicts; `value_at` returns MISSING to skip one."""
    for values in facts:
        for path, fact in values.items():
            value = value_at(path)
            if value is MISSING or path in report.settled or _agree(path, value, fact.value):
                continue
            report.settled.add(path)
            if path[-1] == "layers":
                _layers_differ(report, path, value, fact)
                continue
            report.add(
                "weights-mismatch",
                path,
                f"`{dotted(path)}` is {_show(value)} in the spec, but {_show(fact.value)} in the "
                "weights",
                label=f"the weights say {_show(fact.value)}",
                notes=(f"{_show(fact.value)} comes from {fact.origin}",),
                hints=(f"write `{path[-1]}: {_show(fact.value)}` or `{path[-1]}: auto`",),
            )


def _agree(path: Path, written: Any, known: Any) -> bool:
    if path[-1] == "layers":
        names = written_layers({"layers": written})
        return names is None or names == known
    if isinstance(written, bool) or isinstance(known, bool):
        return written is known
    if isinstance(written, int | float) and isinstance(known, int | float):
        return math.isclose(written, known, rel_tol=1e-6)
    if isinstance(written, list) and isinstance(known, list):
        return sorted(map(str, written)) == sorted(map(str, known))
    return bool(written == known)


def _layers_differ(report: Report, path: Path, value: Any, fact: Fact) -> None:
    written = written_layers({"layers": value}) or []
    if len(written) != len(fact.value):
        report.add(
            "weights-mismatch",
            path,
            f"the spec has {len(written)} layers, the weights have {len(fact.value)}",
            label=f"must be {len(fact.value)} layers",
            notes=(f"the layers come from {fact.origin}",),
        )
        return
    index = next(i for i, (a, b) in enumerate(zip(written, fact.value, strict=True)) if a != b)
    report.add(
        "weights-mismatch",
        (*path, index),
        f"layer {index} is `{written[index]}` in the spec, but `{fact.value[index]}` by the "
        "weights",
        label=f"layer {index} is `{fact.value[index]}`",
        notes=(f"the layers come from {fact.origin}",),
    )


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.7g}"
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)

"""Facts of a pipeline as tables: memory and launches, weights, times of passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memra_compiler.cli.pages import flops, number
from memra_runtime.cli.app import amount, size


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns as wide as their content; the first `left` columns and the last are left-aligned.

    A head that ends in `<` makes its column left-aligned, too.
    """
    lefts = [i < left or head.endswith("<") for i, head in enumerate(heads)]
    cells = [[head.rstrip("<") for head in heads], *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, lefts, strict=True)
        ).rstrip()
        for row in cells
    ]


def plan_page(facts: Mapping[str, Any]) -> str:
    """Memory plan and launch plan."""
    memory = facts["memory"]
    lines = [
        f"arena    {memory['arena_bytes']:,} bytes ({size(memory['arena_bytes'])})",
        f"weights  {memory['weight_bytes']:,} bytes ({size(memory['weight_bytes'])}), mapped from "
        "their files",
        "",
    ]
    planes = [
        (
            f"@{p['plane']}", f"{p['offset']:,}", f"{p['bytes']:,}", p["type"], p["rollback"],
            " ".join(filter(None, ("ring" if p["ring"] else "", p["kind"]))),
        )
        for p in facts["planes"]
    ]  # fmt: skip
    planes.append(
        (
            "(working memory)", f"{memory['working_offset']:,}", f"{memory['working_bytes']:,}",
            "shared by the programs", "", "",
        )
    )  # fmt: skip
    lines += table(("plane", "offset", "bytes", "type<", "rollback<", "cache of<"), planes)
    lines += ["", *_sequences(facts["sequences"]), ""]
    programs = [
        (
            p["program"], str(p["rows"]), str(p["launches"]), str(p["kernels"]),
            size(p["bytes"]), flops(p["flops"]),
        )
        for p in facts["programs"]
    ]  # fmt: skip
    lines += table(("program", "rows", "launches", "kernels", "moves", "computes"), programs)
    lines += ["", f"distinct kernels: {facts['distinct_kernels']}"]
    faults = facts["planted_faults"]
    if faults:
        lines.append(f"planted faults, for memra-check: {', '.join(faults)}")
    return "\n".join(lines)


def _sequences(sequences: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    rows = []
    for name, calls in sequences.items():
        steps = [f"{c['program']} x {c['repeat']}" if c["repeat"] else c["program"] for c in calls]
        rows.append((name, ", ".join(steps)))
    return table(("one call", "runs<"), rows)


def weights_page(facts: Mapping[str, Any]) -> str:
    """Every weight, and parameter totals."""
    rows = [
        (
            w["id"], "x".join(map(str, w["shape"])), w["format"], f"{w['bytes']:,}",
            " | ".join(w["names"]),
        )
        for w in facts["weights"]
    ]  # fmt: skip
    lines = table(("weight", "shape<", "format<", "bytes", "names in files<"), rows)
    lines.append("")
    lines += [
        f"{source:<7} {total['parameters']:,} parameters ({number(total['parameters'])}) in "
        f"{amount(total['tensors'], 'tensor')}, {total['bytes']:,} bytes ({size(total['bytes'])})"
        for source, total in facts["totals"].items()
    ]
    return "\n".join(lines)


def times_page(seconds: Mapping[str, float]) -> str:
    """Milliseconds by pass."""
    rows = [(name, f"{1e3 * spent:.1f} ms") for name, spent in seconds.items()]
    rows.append(("total", f"{1e3 * sum(seconds.values()):.1f} ms"))
    return "\n".join(table(("pass", "time"), rows))

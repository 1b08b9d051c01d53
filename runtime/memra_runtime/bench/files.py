"""The CSV file and the figure."""

from __future__ import annotations

import csv
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memra_runtime.bench.results import BenchResult
from memra_runtime.errors import fail

#: Columns of a round, with colours that are told apart in print and by colour-blind readers.
_COLUMNS = {"draft": "#E69F00", "verify": "#0072B2", "rest": "#999999", "gaps": "#D55E00"}


def write_csv(result: BenchResult, path: Path) -> None:
    """Write one number a line: section, item, quantity (its name ends in the unit), value."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("section", "item", "quantity", "value"))
            writer.writerows(result.table())
    except OSError as error:
        fail("output", f"`{path}` cannot be written: {error.strerror}", str(path))


def require_plot() -> None:
    """Refuse before anything is measured. Raises: MemraError without matplotlib."""
    if find_spec("matplotlib") is None:
        fail(
            "no-matplotlib",
            "a figure needs matplotlib, which is not installed",
            "--plot",
            hints=('install it: pip install "memra[bench]"', "or write the numbers with `--csv`"),
        )


def write_plot(result: BenchResult, path: Path) -> None:
    """Draw rounds by depth and speed by depth; the numbers go to a CSV file beside it."""
    require_plot()
    import_module("matplotlib").use("Agg")  # no display is needed
    plt = import_module("matplotlib.pyplot")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _draw_rounds(left, result)
    _draw_speeds(right, result)
    figure.suptitle(f"{result.artifact} on {result.machine}, context {result.context_tokens}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        fail("output", f"the figure cannot be written: {error}", str(path))
    finally:
        plt.close(figure)
    write_csv(result, path.with_suffix(".csv"))


def _draw_rounds(axes: Any, result: BenchResult) -> None:
    depths = [r.depth_tokens for r in result.rounds]
    base = [0.0] * len(depths)
    for name, colour in _COLUMNS.items():
        heights = [max(0.0, getattr(r, f"{name}_ms")) for r in result.rounds]
        axes.bar(depths, heights, bottom=base, color=colour, label=name)
        base = [b + h for b, h in zip(base, heights, strict=True)]
    # below the bars where launching whole saves, which is when `gaps` is negative
    whole = [r.round_ms for r in result.rounds]
    axes.plot(depths, whole, "kD", markersize=4, label="round, launched whole")
    axes.axhline(result.plain_step_ms, color="black", linestyle="--", label="plain step")
    axes.set(xlabel="draft depth (tokens)", ylabel="time of a round (ms)", xticks=depths)
    axes.legend()


def _draw_speeds(axes: Any, result: BenchResult) -> None:
    names = [s.mode for s in result.streams]
    speeds = [s.speed_tok_s for s in result.streams]
    low = [s.speed_tok_s - s.min_tok_s for s in result.streams]
    high = [s.max_tok_s - s.speed_tok_s for s in result.streams]
    axes.bar(names, speeds, yerr=[low, high], color="#009E73", capsize=3)
    axes.set(ylabel="tok/s")
    axes.tick_params(axis="x", labelrotation=30)

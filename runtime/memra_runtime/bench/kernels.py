"""Each distinct kernel of a program alone, beside the bytes its launches must move (CUDA only)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from memra_runtime.artifact import Manifest
from memra_runtime.bench.costs import launch_bytes, program
from memra_runtime.bench.measure import Floor
from memra_runtime.bench.results import KernelResult
from memra_runtime.bench.timers import KernelTimer

#: Programs that stream weights; the kernels of the others take microseconds.
PROGRAMS = ("plain_step", "verify", "draft", "prefill")
WARM, REPEAT = 2, 9


def kernel_results(
    manifest: Manifest, timer: KernelTimer, floor: Floor, context: int, restore: Callable[[], None]
) -> tuple[KernelResult, ...]:
    """Time all launches of each kernel, one after another in program order; slowest first.

    `restore` puts back the device block before each run.
    """
    found: list[KernelResult] = []
    for name in PROGRAMS:
        entries, rows = manifest.launches[name], program(manifest, name).rows
        moved = launch_bytes(manifest, name, context)
        groups: dict[str, list[int]] = {}
        for i, entry in enumerate(entries):
            groups.setdefault(entry.symbol, []).append(i)
        results = []
        for symbol, at in groups.items():
            spent = []
            for turn in range(WARM + REPEAT):
                restore()
                seconds = timer.kernels(name, at, rows)
                spent += [seconds] if turn >= WARM else []
            total, median = sum(moved[i] for i in at), statistics.median(spent)
            speed = total / median / 1e9
            results.append(
                KernelResult(
                    name, rows, symbol, _first_weight(manifest, name, at[0]), len(at),
                    1e3 * median, 1e6 * median / len(at), total, speed, speed / floor.basis_gb_s,
                )
            )  # fmt: skip
        found += sorted(results, key=lambda k: -k.time_ms)
    return tuple(found)


def _first_weight(manifest: Manifest, name: str, at: int) -> str:
    """What a launch works on, for a reader: the name of its first weight, without the layer."""
    for space, place in manifest.launches[name][at].operands:
        if space == "weight":
            return manifest.weights[place].id.rpartition(".")[2]
    return ""

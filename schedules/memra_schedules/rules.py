"""The rules that schedule TE functions for CUDA, in the order in which they are asked.

A rule is one file with `apply(func, arch)`: guards first, which return None; then moves. The first
that answers wins; a function that a move does not fit, or that leaves a stage in memory, was not
for the rule. The last can schedule any function: an op that only says what it computes has a CUDA
kernel. Rules see widths, but not rows, which are known only when a kernel runs: so no row's bits
can depend on how many there are.

This page is imported only by who schedules: it loads TVM, which takes a second.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tvm.s_tir import Schedule, ScheduleError

from memra_schedules import elementwise, fallback, gemm, moves, row_reduction

RULES: tuple[ModuleType, ...] = (
    gemm,  # prompts in float32
    row_reduction,  # norms of rows and of heads
    elementwise,  # all that needs no sum
    fallback,
)


def schedule(func: Any, arch: Any) -> tuple[str, Schedule]:
    """The name of the first rule that schedules `func`, and its schedule.

    Raises: ValueError where none does: the function has several outputs.
    """
    for rule in RULES:
        try:
            found = rule.apply(func, arch)
        except ScheduleError:
            continue
        if found is not None and moves.is_whole(found):
            return rule.__name__.rpartition(".")[2], found
    raise ValueError("no rule schedules a function of several outputs: make a function of each")

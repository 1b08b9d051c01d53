"""Any function: a thread an element of the result, which computes all that its element needs.

Slow where stages are sums that many elements share, and correct everywhere.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from memra_schedules import moves

THREADS = 128


def apply(func: Any, arch: Any) -> Schedule | None:
    """Schedule any function with one output."""
    schedule = Schedule(func)
    out = moves.output(schedule)
    if out is None:
        return None
    for block in moves.stages(schedule):
        last = moves.name(schedule, block) == moves.name(schedule, out)
        if not last and not moves.is_reduction(schedule, block):
            schedule.compute_inline(block)
    spatial = len(func_axes(schedule, out))
    flat = schedule.fuse(*schedule.get_loops(out)[:spatial])
    block, thread = schedule.split(flat, [None, THREADS])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    for total in reversed(moves.stages(schedule)[:-1]):
        schedule.compute_at(total, thread)
        schedule.set_scope(total, 0, "local")
    return schedule


def func_axes(schedule: Schedule, block: Any) -> list[Any]:
    """The axes of a stage that it does not sum over."""
    axes = schedule.get(block).iter_vars
    return [axis for axis in axes if axis.iter_type == axis.DataPar]

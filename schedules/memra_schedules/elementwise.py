"""Element by element: a thread computes four neighbours, a row is spread over blocks.

Before: `for row, col: out[row, col] = f(x[row, col], ...)`.
After: row -> blockIdx.y; col -> blockIdx.x, threadIdx.x and a vector of four.

An axis called `half` stays in the thread, which then computes both halves of a rotary pair.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from memra_schedules import moves


def apply(func: Any, arch: Any) -> Schedule | None:
    """Schedule a function without sums: in vectors where it loads any, else one by one."""
    schedule = Schedule(func)
    out = moves.output(schedule)
    if out is None or any(moves.is_reduction(schedule, b) for b in moves.stages(schedule)):
        return None
    row, *inner = moves.lengths(schedule, schedule.get_loops(out))
    if row is not None or None in inner or set(moves.axes(schedule, out)[1:]) <= {"half"}:
        return None
    return _spread(func, moves.VECTOR) or _spread(func, 1)


def _spread(func: Any, lanes: int) -> Schedule | None:
    """`lanes` elements a thread; None where no load makes vectors of them."""
    schedule = Schedule(func)
    out = moves.output(schedule)
    row, *inner = schedule.get_loops(out)
    named = dict(zip(moves.axes(schedule, out)[1:], inner, strict=True))
    both = [named.pop("half")] if "half" in named else []
    *outer, last = named.values()
    (width,) = moves.lengths(schedule, [last])
    if width is None or width % lanes:
        return None

    moves.inline_others(schedule)
    vectors, lane = schedule.split(last, [None, lanes])
    schedule.reorder(row, *outer, vectors, *both, lane)
    units = schedule.fuse(*outer, vectors)
    (total,) = moves.lengths(schedule, [units])
    block, thread = schedule.split(units, [None, moves.divisor(total or 1, moves.THREADS)])
    schedule.bind(row, "blockIdx.y")
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    placed = moves.place_loads(schedule, out, thread)
    moves.unroll(schedule, [*both, lane])
    if lanes > 1:
        moves.write_vectors(schedule, out, thread)
    return schedule if placed or lanes == 1 else None

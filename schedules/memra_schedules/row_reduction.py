"""Norms: a sum over the last axis, and what every element makes of it.

Before: `for row: for k: s[row] += x[row, k] * x[row, k]`; `for row, col: out[row, col] = f(s, x)`.
After: a block a row, or for heads a few lanes each, several in a block. A thread reads its vectors
once and holds them in registers. It sums its own in order; then lanes meet in a tree, then warps.
The order depends on the width alone, never on the number of rows.
"""

from __future__ import annotations

import math
from typing import Any

from tvm.s_tir import Schedule

from memra_schedules import moves

#: Most threads that share a row.
ROW_THREADS = 1024
#: Vectors that a thread of a row should hold: more threads only add to the tree.
ROW_VECTORS = 2
#: Vectors up to which a row is left to lanes of one warp, and the most that one lane takes.
HEAD_VECTORS = 256
LANE_VECTORS = 8
#: Threads of a block of several heads.
BLOCK = 128


def apply(func: Any, arch: Any) -> Schedule | None:
    """Schedule a function with one sum, over a stage that the output reads, too."""
    schedule = Schedule(func)
    out = moves.output(schedule)
    sums = [b for b in moves.stages(schedule) if moves.is_reduction(schedule, b)]
    if out is None or len(sums) != 1 or moves.is_reduction(schedule, out):
        return None
    (total,) = sums
    held = _held(schedule, total)
    *rows, last = schedule.get_loops(out)
    *summed_rows, summed = schedule.get_loops(total)
    width, summed_width = moves.lengths(schedule, [last, summed])
    if held is None or width is None or width % moves.VECTOR or width != summed_width:
        return None
    heads = moves.lengths(schedule, rows)[1:]
    if len(rows) != len(summed_rows) or None in heads:
        return None

    moves.inline_others(schedule, held)
    row = schedule.fuse(*rows)
    threads = _threads(width // moves.VECTOR)
    if threads <= moves.WARP:
        together = moves.divisor(math.prod(n or 1 for n in heads), BLOCK // threads)
        block, group = schedule.split(row, [None, together])
        schedule.bind(group, "threadIdx.y")
    else:
        block = group = row
    schedule.bind(block, "blockIdx.x")
    step = threads * moves.VECTOR

    def spread(loop: Any) -> tuple[Any, Any]:
        turn, thread, lane = schedule.split(loop, [None, threads, moves.VECTOR])
        schedule.reorder(thread, turn, lane)
        schedule.bind(thread, "threadIdx.x")
        moves.unroll(schedule, [turn, lane])
        return turn, lane

    turn, _ = spread(last)
    schedule.compute_at(total, group)
    sum_turn, _ = spread(schedule.get_loops(total)[-1])
    moves.place_loads(schedule, total, sum_turn)
    schedule.set_scope(total, 0, "local")
    schedule.compute_at(held, group)
    if width % step == 0:  # a thread's own elements side by side: it holds no others
        schedule.transform_layout(
            held, ("write", 0),
            lambda *at: (*at[:-1], at[-1] // step, at[-1] // moves.VECTOR % threads,
                         at[-1] % moves.VECTOR),
        )  # fmt: skip
    held_turn, lane = spread(schedule.get_loops(held)[-1])
    schedule.set_scope(held, 0, "local")
    if moves.is_load(schedule, held):
        schedule.vectorize(lane)
    else:
        moves.place_loads(schedule, held, held_turn)
    moves.place_loads(schedule, out, turn)
    moves.write_vectors(schedule, out, turn)
    return schedule


def _threads(vectors: int) -> int:
    """Threads that share a row: lanes of a warp, or whole warps, of which some may idle at last."""
    lanes = min(moves.WARP, vectors & -vectors)  # a tree of lanes needs a power of two
    if vectors <= HEAD_VECTORS:
        return lanes if vectors <= lanes * LANE_VECTORS else moves.WARP
    most = min(ROW_THREADS, vectors // ROW_VECTORS)
    whole = moves.divisor(vectors, most)
    if whole % moves.WARP == 0:
        return whole
    turns = -(-vectors // most)
    return -(-vectors // (turns * moves.WARP)) * moves.WARP


def _held(schedule: Schedule, total: Any) -> Any | None:
    """What the sum reads, if the output reads it, too: one stage."""
    found = [b for b in schedule.get_producers(total) if len(schedule.get_consumers(b)) > 1]
    return found[0] if len(found) == 1 else None

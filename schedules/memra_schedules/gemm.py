"""Matrix products of many rows: prompts in float32.

Before: `for row, n: for k: out[row, n] += x[row, k] * w[n, k]`, for one matrix or several that end
in one result (a gate and what it multiplies).
After: a block a tile of rows and outputs. Its threads bring a slice of x and of each matrix into
shared memory, decoded once for all rows, and hold their sums in registers. Inputs are added in
order, one at a time: no sum depends on how many rows there are.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from memra_schedules import moves

#: A thread's rows and outputs, and how many threads go across each.
ROWS, ROW_THREADS = 8, 8
OUTPUTS, OUTPUT_THREADS = 4, 16
#: Inputs of a slice.
SLICE = 32
#: Floats between a shared row and the next: neighbours write to different banks.
PAD = 4


def apply(func: Any, arch: Any) -> Schedule | None:
    """Schedule a function of sums over `k` of rows times weights, all of one shape."""
    schedule = Schedule(func)
    out = moves.output(schedule)
    sums = [b for b in moves.stages(schedule) if moves.is_reduction(schedule, b)]
    if out is None or not sums or moves.axes(schedule, out)[:2] != ["row", "n"]:
        return None
    for total in sums:
        if moves.axes(schedule, total) != ["row", "n", "k"]:
            return None
        outputs, inputs = moves.lengths(schedule, schedule.get_loops(total))[1:]
        if outputs is None or inputs is None or inputs % SLICE or outputs % OUTPUTS:
            return None
    own = OUTPUTS
    if outputs < arch.multiprocessors * OUTPUTS * OUTPUT_THREADS:  # some would have no block
        own //= 2

    for total in sums:  # absent rows are zeros, and are not stored
        schedule.pad_einsum(total, [ROWS * ROW_THREADS, own * OUTPUT_THREADS, SLICE])
    operands = [load for total in sums for load in schedule.get_producers(total)]
    for block in moves.stages(schedule):
        if moves.is_load(schedule, block) and not moves.has(schedule, operands, block):
            schedule.compute_inline(block)
    last = moves.output(schedule)
    moves.inline_others(schedule, *operands)
    row, n = schedule.get_loops(last)
    block_row, thread_row, i = schedule.split(row, [None, ROW_THREADS, ROWS])
    block_n, thread_n, j = schedule.split(n, [None, OUTPUT_THREADS, own])
    schedule.reorder(block_row, block_n, thread_row, thread_n, i, j)
    schedule.bind(block_row, "blockIdx.y")
    schedule.bind(block_n, "blockIdx.x")
    schedule.bind(thread_row, "threadIdx.y")
    schedule.bind(thread_n, "threadIdx.x")
    moves.unroll(schedule, [i])
    moves.unroll(schedule, [j])
    moves.write_vectors(schedule, last, i)
    for total in sums:
        schedule.compute_at(total, thread_n)
        schedule.set_scope(total, 0, "local")
        own_i, own_j, k = schedule.get_loops(total)[-3:]
        slice_, step = schedule.split(k, [None, SLICE])
        schedule.reorder(slice_, step, own_i, own_j)
        for load in schedule.get_producers(total):
            _share(schedule, load, slice_)
        schedule.decompose_reduction(total, slice_)
        moves.unroll(schedule, [step, own_i, own_j])
    return schedule


def _share(schedule: Schedule, load: Any, loop: Any) -> None:
    """Bring what a block needs of a slice into shared memory, inputs outermost."""
    schedule.set_scope(load, 0, "shared")  # first: then every thread's part is brought
    schedule.compute_at(load, loop)
    flat = schedule.fuse(*schedule.get_loops(load)[-2:])
    turn, y, x, lane = schedule.split(flat, [None, ROW_THREADS, OUTPUT_THREADS, moves.VECTOR])
    schedule.bind(y, "threadIdx.y")
    schedule.bind(x, "threadIdx.x")
    moves.unroll(schedule, [turn, lane])
    schedule.transform_layout(load, ("write", 0), lambda at, k: (k, at))
    schedule.storage_align(load, 0, -2, SLICE, PAD)

"""Moves that rules share. None changes what a function computes.

Stages by what becomes of them: a *load* only copies an operand, and goes to registers where threads
can read it as whole vectors; a *reduction* sums over an axis; the *output* is the last. All others
are inlined, unless a rule holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.s_tir import Schedule

#: Elements that a thread reads or writes at once.
VECTOR = 4
WARP = 32
#: Threads of a block whose threads work alone.
THREADS = 256
#: Elements of one load that a thread may hold in registers.
HELD = 64

Block = Any
Loop = Any


def stages(schedule: Schedule) -> list[Block]:
    """Every stage, in order."""
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def output(schedule: Schedule) -> Block | None:
    """The stage that writes the result; None where several do."""
    last = schedule.get_output_blocks("root")
    return last[0] if len(last) == 1 else None


def name(schedule: Schedule, block: Block) -> str:
    """The name of a stage: that of the tensor it computes."""
    return str(schedule.get(block).name_hint)


def names(schedule: Schedule, blocks: Sequence[Block]) -> set[str]:
    """The names of stages: two handles of one stage are not equal."""
    return {name(schedule, block) for block in blocks}


def has(schedule: Schedule, blocks: Sequence[Block], block: Block) -> bool:
    """Is the stage one of `blocks`?"""
    return name(schedule, block) in names(schedule, blocks)


def is_reduction(schedule: Schedule, block: Block) -> bool:
    """Does the stage sum over an axis?"""
    axes = schedule.get(block).iter_vars
    return any(axis.iter_type != tirx.IterVar.DataPar for axis in axes)


def is_whole(schedule: Schedule) -> bool:
    """Is every stage but the output kept in registers or shared memory, where one launch has it?"""
    kept = schedule.get_output_blocks("root")
    buffers = [
        schedule.get(block).writes[0].source.ty
        for block in stages(schedule)
        if not has(schedule, kept, block)
    ]
    return all(str(buffer.storage_scope) not in ("", "global") for buffer in buffers)


def is_load(schedule: Schedule, block: Block) -> bool:
    """Does the stage only copy an operand?"""
    return name(schedule, block).endswith("_load")


def axes(schedule: Schedule, block: Block) -> list[str]:
    """Names of the axes of a stage, as its expression calls them."""
    return [str(axis.var.name).removeprefix("v_") for axis in schedule.get(block).iter_vars]


def lengths(schedule: Schedule, loops: Sequence[Loop]) -> list[int | None]:
    """Iterations of each loop; None where they are known only when the kernel runs."""
    found = [schedule.get(loop).extent for loop in loops]
    return [int(n) if isinstance(n, int | tirx.IntImm) else None for n in found]


def divisor(units: int, most: int) -> int:
    """The most threads that divide `units` evenly: whole warps, if any do."""
    sizes = [n for n in range(1, min(units, most) + 1) if units % n == 0]
    return max((n for n in sizes if n % WARP == 0), default=max(sizes))


def inline_others(schedule: Schedule, *held: Block) -> None:
    """Inline every stage that is no load, no reduction, not the output, and not held."""
    kept = [*held, *schedule.get_output_blocks("root")]
    for block in stages(schedule):
        if has(schedule, kept, block) or is_reduction(schedule, block):
            continue
        if not is_load(schedule, block):
            schedule.compute_inline(block)


def place_loads(schedule: Schedule, reader: Block, loop: Loop) -> int:
    """Do the loads of `reader` under its `loop`, as vectors; inline those that do not make any.

    Returns how many do.
    """
    placed = 0
    depth = len(schedule.get_loops(reader)) - _below(schedule, reader, loop)
    for load in schedule.get_producers(reader):
        if not is_load(schedule, load) or len(schedule.get_consumers(load)) > 1:
            continue
        trial = schedule.copy()
        trial.compute_at(load, loop)
        own = lengths(trial, trial.get_loops(load)[depth:])
        elements = 1
        for length in own:
            elements *= length or HELD + 1
        if own and own[-1] == VECTOR and elements <= HELD:
            schedule.compute_at(load, loop)
            to_vectors(schedule, load, depth)
            placed += 1
        else:
            schedule.compute_inline(load)
    return placed


def to_vectors(schedule: Schedule, load: Block, depth: int) -> None:
    """Put a stage below `depth` loops into registers: its last loop is one vector."""
    schedule.set_scope(load, 0, "local")
    *outer, last = schedule.get_loops(load)[depth:]
    unroll(schedule, outer)
    schedule.vectorize(last)


def unroll(schedule: Schedule, loops: Sequence[Loop]) -> None:
    """Unroll the loops that take more than one turn."""
    for loop, turns in zip(loops, lengths(schedule, loops), strict=True):
        if turns != 1:
            schedule.unroll(loop)


def write_vectors(schedule: Schedule, block: Block, loop: Loop) -> None:
    """Compute into registers and store vectors under `loop`."""
    depth = len(schedule.get_loops(block)) - _below(schedule, block, loop)
    store = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(store, loop)
    *outer, last = schedule.get_loops(store)[depth:]
    unroll(schedule, outer)
    schedule.vectorize(last)


def _below(schedule: Schedule, block: Block, loop: Loop) -> int:
    """How many loops of a stage are inside `loop`."""
    loops = [schedule.get(one) for one in schedule.get_loops(block)]
    return len(loops) - 1 - loops.index(schedule.get(loop))

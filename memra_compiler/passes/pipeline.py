"""All passes, in order, on one page."""

from __future__ import annotations

import time
from collections.abc import Callable

from memra_compiler.ir.graph import Module
from memra_compiler.ir.verify import verify
from memra_compiler.passes.assign_layouts import assign_layouts
from memra_compiler.passes.assign_numeric_class import assign_numeric_class
from memra_compiler.passes.fuse import fuse
from memra_compiler.passes.plan_launches import plan_launches
from memra_compiler.passes.plan_memory import plan_memory
from memra_compiler.passes.plant_faults import plant_faults
from memra_compiler.passes.prove_exact import prove_exact
from memra_compiler.passes.resolve_kv_targets import resolve_kv_targets
from memra_compiler.passes.select_kernels import select_kernels
from memra_compiler.passes.wire_drafter import wire_drafter

Pass = Callable[[Module], Module]
#: Called after each pass with its name, its result and the seconds it took.
Watch = Callable[[str, Module, float], None]

PASSES: tuple[Pass, ...] = (
    resolve_kv_targets,  # first: the drafter's reads must name planes before anything moves
    wire_drafter,
    fuse,
    assign_numeric_class,  # after fuse: a fused op has a class of its own
    prove_exact,
    plant_faults,  # after the proof: faults are meant to break it
    select_kernels,
    assign_layouts,  # after kernels are chosen: they say what they want
    plan_memory,  # needs the final set of programs
    plan_launches,
)
NAMES = tuple(p.__name__ for p in PASSES)


def run_passes(module: Module, *, until: str = "", watch: Watch | None = None) -> Module:
    """Run the passes, verifying after each; stop after `until`.

    Raises: MemraError for what a user can mend, IRError for a bug of ours.
    """
    verify(module, after="build")
    for step in PASSES:
        start = time.perf_counter()
        module = step(module)
        verify(module, after=step.__name__)
        if watch is not None:
            watch(step.__name__, module, time.perf_counter() - start)
        if step.__name__ == until:
            break
    return module

"""How the tests of passes read, check and run small modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from memra_compiler.compile import CompileOptions, load
from memra_compiler.interpret import Interpreter
from memra_compiler.ir.graph import Module
from memra_compiler.ir.text import parse_module, print_module
from memra_compiler.ir.verify import verify
from memra_compiler.ops.base import discover
from memra_compiler.passes.pipeline import run_passes
from memra_compiler.rounds.programs import build_module

SPECS = Path(__file__).parent.parent.parent / "model_specs"
TINY = SPECS / "tiny" / "gemma4_tiny.yaml"
ALL_SPECS = sorted(SPECS.rglob("*.yaml"))

Golden = Callable[[str, str], None]


def read(text: str) -> Module:
    """A small module, checked."""
    module = parse_module(text, discover())
    verify(module)
    return module


def write(module: Module) -> str:
    """A module after a pass as text, checked."""
    verify(module)
    return print_module(module)


@cache
def stages(path: Path) -> dict[str, Module]:
    """A spec's module as built and after every pass, by the pass's name."""
    module = build_module(*load(path, CompileOptions()))
    found = {"build": module}
    run_passes(module, watch=lambda name, result, _: found.update({name: result}))
    return found


def interpreter(module: Module, seed: int = 0) -> Interpreter:
    """An interpreter with random weights and float planes, and zero counters."""
    rng = np.random.default_rng(seed)
    weights = {
        w.name: rng.standard_normal(w.type.max_shape) / np.sqrt(w.type.max_shape[-1])
        for w in module.weights.values()
    }
    machine = Interpreter(module, weights)
    for plane in machine.planes.values():
        if plane.dtype.kind != "i":
            plane[...] = rng.standard_normal(plane.shape)
    return machine

"""Run what TVM schedules on the CPU, from the very text that NVRTC compiles.

Threads of a block are threads here, with barriers and shuffles: slow, and enough to see that a
kernel computes what its op means, that no row depends on others, and that nothing else is written.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import cpp_on_cpu
from memra_compiler.codegen.cuda import render
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op
from memra_compiler.ops.cuda import ARCHS, Scheduled
from memra_compiler.ops.scheduled import scheduled_launches

HERE = Path(__file__).parent


def build(launch: Scheduled, folder: Path) -> ctypes.CDLL:
    """A library with `run(grid_x, grid_y, threads, rows, pointers)`."""
    symbol, source = render(launch, "kernel")
    types = [a.c_type.replace("__restrict__", "") for a in launch.arguments]
    arguments = ", ".join(f"({type})pointers[{i}]" for i, type in enumerate(types))
    body = re.sub(r"^#include .*$", "", source, flags=re.M)
    body = body.replace("__shared__ alignas(16)", "alignas(16) __shared__")  # as C++ has it
    text = (
        f'#include "cuda_on_cpu.h"\n{body}\n'
        'extern "C" void run(int grid_x, int grid_y, int threads, int rows, void** pointers) {\n'
        f"  launch(grid_x, grid_y, threads, [&] {{ {symbol}(rows, {arguments}); }});\n}}\n"
    )
    return cpp_on_cpu.build(text, folder / f"{symbol}.cpp", HERE)


class OnCpu:
    """An op's scheduled kernels, callable on NumPy arrays."""

    def __init__(self, op: Op, types: Sequence[TensorType], folder: Path) -> None:
        self.outputs = types[-op.outputs_of(len(types)) :]
        launches = scheduled_launches(op, ARCHS["sm_90a"], *types)
        self.kernels = [(launch, build(launch, folder)) for launch in launches]

    def __call__(self, rows: int, operands: Sequence[Array]) -> list[Array]:
        """The outputs; what no kernel writes is NaN."""
        outputs = [np.full(type.max_shape, np.nan, np.float32) for type in self.outputs]
        addresses = [a.ctypes.data for a in (*operands, *outputs)]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        for launch, library in self.kernels:
            library.run(*launch.grid[:2], launch.block, rows, pointers)
        return outputs

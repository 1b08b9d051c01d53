"""Run kernels of templates on the CPU, from the very text that NVRTC compiles."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import cpp_on_cpu
from memra_compiler.codegen.cuda import LIBRARY, render
from memra_compiler.ops.cuda import Launch

HERE = Path(__file__).parent
#: Headers whose instructions `templates_on_cpu.h` and `tensor_cores_on_cpu.h` have.
REPLACED = ("block_ptx.cuh", "launch.cuh", "mma.cuh", "pipeline.cuh")
#: Single instructions of other headers, and what they mean.
INSTRUCTIONS = {
    'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));': (
        "pair = __float2bfloat16_rn(high).bits << 16 | __float2bfloat16_rn(low).bits;"
    ),
    'asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));': (
        "value = __half2float(bits_as<__half>(bits));"
    ),
    'asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(kOnes), "r"(b));': (
        "sum = __float2bfloat16_rn(__uint_as_float(a << 16) + __uint_as_float(b << 16)).bits |"
        " __float2bfloat16_rn(__uint_as_float(a & 0xFFFF0000) +"
        " __uint_as_float(b & 0xFFFF0000)).bits << 16; (void)kOnes;"
    ),
}
#: Multiprocessors of a grid that has a block for each.
MULTIPROCESSORS = 3


def inlined(text: str, seen: set[str]) -> str:
    """The text with our headers in place of their includes, each once, and CUDA's left out."""

    def header(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen or name in REPLACED:
            return ""
        seen.add(name)
        return inlined((LIBRARY / name).read_text(encoding="utf-8"), seen)

    text = re.sub(r"^#include <.*$|^#pragma once$", "", text, flags=re.M)
    for instruction, meaning in INSTRUCTIONS.items():
        text = text.replace(instruction, meaning)
    return re.sub(r'^#include "(.*)"$', header, text, flags=re.M)


def build(launch: Launch, folder: Path) -> ctypes.CDLL:
    """A library with `run(grid_x, grid_y, grid_z, threads, rows, pointers)`."""
    symbol, source = render(launch, "kernel")
    source = re.sub(r"(?<!extern )__shared__", "static", source)  # blocks run one by one
    signature = re.search(rf"{symbol}\((.*?)\) \{{", source, re.S)
    assert signature is not None
    lines = [line.split("//")[0] for line in signature[1].splitlines()]
    types = [a.strip().rsplit(" ", 1)[0] for a in " ".join(lines).split(",")][1:]
    arguments = ", ".join(f"({type})pointers[{i}]" for i, type in enumerate(types))
    source = source.replace("extern __shared__", "extern")  # the array below, for all kernels
    text = (
        '#include "tensor_cores_on_cpu.h"\n'
        "alignas(128) unsigned char dynamic_shared[256 * 1024];\n"
        f"{inlined(source, set())}\n"
        'extern "C" void run(int x, int y, int z, int threads, int rows, void** pointers) {\n'
        f"  launch(x, y, z, threads, [&] {{ {symbol}(rows, {arguments}); }});\n}}\n"
    )
    return cpp_on_cpu.build(text, folder / f"{symbol}.cpp", HERE)


class TemplatesOnCpu:
    """The launches of an op, callable on NumPy arrays."""

    def __init__(self, launches: Sequence[Launch], folder: Path) -> None:
        self.kernels = [(launch, build(launch, folder)) for launch in launches]

    def __call__(self, rows: int, *arrays: np.ndarray) -> None:
        """Run on operands, outputs and scratch, which are changed in place."""
        pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        for launch, library in self.kernels:
            grid = [MULTIPROCESSORS if size == "sms" else size for size in launch.grid]
            library.run(*grid, launch.block, rows, pointers)

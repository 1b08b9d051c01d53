"""Checks and times the matrix kernels of prompts (9 to 64 rows) on a GPU.

`PYTHONPATH=.:runtime:tests/gpu python tests/gpu/wide_check.py [--quick] [--tune] [--no-bench]`.
Errors are against float64 of the quantised product, over the sum of magnitudes. Outputs are
poisoned and guarded. Every T runs in the kernel for 64 rows and in one for itself: the bits of a
row must be those of all 64. Timings rotate weights larger than L2, in a graph.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace

import numpy as np
from cuda.bindings import driver
from gpu_driver import check
from linear_bench import ROTATION_BYTES, Bench, Step
from linear_check import TOLERANCE, Checker

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_layouts import a8_reference
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.cuda_wide import (
    WIDE_ROWS,
    WideGeometry,
    candidates,
    launch_of,
    tiling_cost,
    wide_launches,
    wide_planes,
)

ROWS = (64, 33, 31, 16, 9)
TIMED_ROWS = (16, 32, 64)
FORMATS_A8 = [name for name, format in FORMATS.items() if "a8" in format.classes]
#: Layers of the 31B model, whose matrices are timed.
LAYERS = 60
#: (K, outputs, gated)
SHAPES = {
    "qkv": (5376, (8192, 4096, 4096), False),
    "o": (8192, (5376,), False),
    "gate_up": (5376, (21504, 21504), True),
    "down": (21504, (5376,), False),
}
#: Geometries that --tune times for a matrix.
TUNED = 10


def spread_text(g: WideGeometry) -> str:
    return f"s{g.splits}x{g.split_units} w{g.output_warps}x{g.groups}"


class WideChecker(Checker):
    """Cases of the wide kernels; their failures and worst errors."""

    def wide(
        self, label: str, inputs: int, weights: list[tuple[str, int]], act: str | None = None
    ) -> None:
        types = [TensorType((n, inputs), f) for f, n in weights]
        held = [self.weight(type) for type in types]
        x = self.rng.standard_normal((WIDE_ROWS, inputs)).astype(np.float32)
        x *= 10 ** self.rng.uniform(-2, 2, (WIDE_ROWS, 1)).astype(np.float32)
        x[:, :32] = 0
        outputs = [types[0].shape[0]] if act else [t.shape[0] for t in types]
        worst = 0.0
        first: list[np.ndarray] = []
        shape = ""
        runs = [(WIDE_ROWS, rows) for rows in ROWS] + [(rows, rows) for rows in ROWS[1:]]
        for most, rows in runs:
            x_type = TensorType((most, inputs), "a8")
            launches = wide_launches(self.arch, x_type, types, (), act=act)
            planes = wide_planes(self.arch, x_type, types, act)
            stored, values = self.activations(x[:rows], "a8")
            plane_rows = math.ceil(most / 8) * 8
            out = [np.full((planes, plane_rows, n), np.nan, np.float32) for n in outputs]
            targets = [self.upload(o) for o in out]
            addresses = [self.upload(stored), *(a for a, _ in held), *targets]
            self.gpu.run(launches, f"wide_{types[0].dtype}", self.arch, rows, addresses)
            raw = [self.gpu.download(a, o) for a, o in zip(targets, out, strict=True)]
            if any(not np.isnan(r[:, rows:]).all() for r in raw):
                self.failures.append(f"{label}: rows beyond {rows} of {most} were written")
            got = [self.add_planes(r)[:rows] for r in raw]
            worst = max(worst, self.error(got, values, [w for _, w in held], act))
            if not first:
                first = got
                shape = ", ".join(spread_text(launch.params.geometry) for launch in launches)
            elif any(not np.array_equal(f[:rows], g) for f, g in zip(first, got, strict=True)):
                self.failures.append(f"{label}: bits of a row depend on {rows} rows of {most}")
        if not worst <= TOLERANCE:
            self.failures.append(f"{label}: error {worst:.2e}")
        self.table.append(f"{label:34} {shape:36} {worst:.1e}")
        print(self.table[-1], flush=True)
        self.free()


def cases(c: WideChecker, quick: bool) -> None:
    for name in FORMATS_A8:
        unit = FORMATS[name].unit_inputs
        shapes = [(16, unit), (48, 3 * unit), (128, 1024), (528, 13 * unit)]
        shapes += [] if quick else [(4096, 512), (256, 97 * unit), (5376, 8192)]
        for outputs, inputs in shapes:
            c.wide(f"{name} {outputs}x{inputs}", inputs, [(name, outputs)])
        c.wide(f"{name} group", 1024, [(name, 64), (name, 16), (name, 32)])
        c.wide(f"{name} gated gelu_tanh", 768, [(name, 3200)] * 2, "gelu_tanh")
        if not quick:
            c.wide(f"{name} gated silu", 256, [(name, 48)] * 2, "silu")
            c.wide(f"{name} large group", 5376, [(name, 2048), (name, 512), (name, 528)])
    c.wide("q4_0 large gated", 5376, [("q4_0", 2112)] * 2, "gelu_tanh")
    c.wide("q4_0 long", 21504, [("q4_0", 672)])
    c.wide("mixed group", 512, [("q4_k", 32), ("q6_k", 16), ("q4_k", 48), ("q8_0", 16)])
    c.wide("mixed gated", 512, [("q4_k", 64), ("q6_k", 64)], "gelu_tanh")


def launch_for(arch: CudaArch, name: str, shape: str, rows: int) -> Launch:
    inputs, outputs, gated = SHAPES[shape]
    weights = [TensorType((n, inputs), name) for n in outputs]
    x = TensorType((rows, inputs), "a8")
    (launch,) = wide_launches(arch, x, weights, (), act="gelu_tanh" if gated else None)
    return launch


def matrix_bytes(launch: Launch) -> list[int]:
    p = launch.params
    units = p.work.units * FORMATS[p.work.format].unit_bytes
    return [m.outputs // 16 * units for m in p.matrices]


def steps_of(bench: Bench, launch: Launch, copies: int) -> list[Step]:
    """Copies of a launch, each with weights of its own; activations and outputs are shared."""
    p = launch.params
    rows = 8 * p.column_tiles
    x = np.random.default_rng(2).standard_normal((rows, p.work.inputs)).astype(np.float32)
    stored = a8_reference(x)
    address = bench.buffer(stored.nbytes, False)
    check(driver.cuMemcpyHtoD(address, stored.ctypes.data, stored.nbytes))
    outs = [p.matrices[i].outputs for i in range(p.outs)]
    targets = [bench.buffer(p.geometry.splits * rows * n * 4, False) for n in outs]
    return [
        Step(launch, [address, *(bench.buffer(n, True) for n in matrix_bytes(launch)), *targets])
        for _ in range(copies)
    ]


def single(bench: Bench, label: str, launch: Launch, rows: int) -> float:
    """Prints and returns microseconds of one launch, alone and with dependent launch."""
    p = launch.params
    size = sum(matrix_bytes(launch))
    copies = min(40, max(2, math.ceil(ROTATION_BYTES / size)))
    steps = steps_of(bench, launch, copies)
    many = steps * max(1, 20 // len(steps))
    plain, early = (bench.time(many, rows, way) / len(many) for way in (False, True))
    operations = 2 * rows * p.work.inputs * 16 * p.work.tiles
    line = f"{label:22} T={rows:<3} {spread_text(p.geometry):16} r{p.stage_units}x{p.stages}"
    line += f"  {plain:7.1f} us, dependent {early:7.1f} us"
    print(
        f"{line}  {operations / early / 1e6:5.0f} TOPS {size / early / 1e3:5.0f} GB/s", flush=True
    )
    bench.free()
    return early


def tune(bench: Bench, name: str, shape: str) -> None:
    """Times the geometries that the estimate likes best."""
    launch = launch_for(bench.arch, name, shape, WIDE_ROWS)
    work = launch.params.work
    found = sorted(candidates(bench.arch, work), key=lambda g: tiling_cost(bench.arch, work, g))
    for g in found[:TUNED]:
        estimate = tiling_cost(bench.arch, work, g) / 1755
        other = launch_of(bench.arch, replace(launch.params, geometry=g))
        single(bench, f"  {shape} ({estimate:.0f} us)", other, WIDE_ROWS)


def chain(bench: Bench, rows: int, layers: int) -> float:
    """Microseconds of a layer's four matrices in a chain of layers, with dependent launch."""
    launches = [launch_for(bench.arch, "q4_0", shape, rows) for shape in SHAPES]
    columns = [steps_of(bench, launch, layers) for launch in launches]
    steps = [column[i] for i in range(layers) for column in columns]
    us = bench.time(steps, rows, True) / layers
    bench.free()
    return us


def timings(arch: CudaArch, quick: bool, tuned: bool) -> list[str]:
    bench = Bench(arch)
    summary = []
    for rows in TIMED_ROWS:
        times = []
        for shape in SHAPES:
            launch = launch_for(arch, "q4_0", shape, rows)
            times.append(f"{shape} {single(bench, f'q4_0 {shape}', launch, rows):.1f}")
        us = chain(bench, rows, 4)
        each = "  ".join(times)
        speed = rows / (LAYERS * us) * 1e6
        summary.append(f"T={rows:<3} {each}  | a layer in a chain {us:.1f} us = {speed:.0f} tok/s")
    for name in () if quick else FORMATS_A8[1:]:
        for shape in ("gate_up", "down"):
            single(bench, f"{name} {shape}", launch_for(arch, name, shape, 64), 64)
    for shape in SHAPES if tuned else ():
        tune(bench, "q4_0", shape)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_90a", choices=ARCHS)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, q4_0 timings only")
    parser.add_argument("--tune", action="store_true", help="also time other geometries")
    parser.add_argument("--no-bench", action="store_true", help="check only")
    parser.add_argument("--no-check", action="store_true", help="time only")
    options = parser.parse_args()
    c = WideChecker(ARCHS[options.arch])
    if not options.no_check:
        cases(c, options.quick)
    summary = [] if options.no_bench else timings(c.arch, options.quick, options.tune)
    print(f"\n{len(c.table)} cases, {len(c.failures)} failures")
    for failure in c.failures[:20]:
        print(f"FAILED {failure}")
    if summary:
        print(f"q4_0, us a launch with dependent launch; tok/s: {LAYERS} layers' matrices alone")
    for line in summary:
        print(line)
    return 1 if c.failures else 0


if __name__ == "__main__":
    sys.exit(main())

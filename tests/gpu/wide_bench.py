"""Times the matrix kernels of prompts (16 to 64 rows) on a GPU, at the sizes of the 31B.

`PYTHONPATH=.:runtime:tests/gpu python tests/gpu/wide_bench.py [--activations bf16] [--quick]
[--tune]`. Timings rotate weights larger than L2, in a graph.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
from cuda.bindings import driver
from gpu_driver import check
from linear_bench import ROTATION_BYTES, Bench, Step
from matrices import LAYER, LAYERS, MATRICES

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_layouts import a8_reference, bf16_reference
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.cuda_wide import (
    WIDE_ROWS,
    WideGeometry,
    candidates,
    launch_of,
    tiling_cost,
    wide_launches,
)

TIMED_ROWS = (16, 32, 64)
#: Rows of floats as their kernels want them.
STORED = {"a8": a8_reference, "bf16": bf16_reference}
#: Geometries that --tune times for a matrix.
TUNED = 10


def spread_text(g: WideGeometry) -> str:
    return f"s{g.splits}x{g.split_units} w{g.output_warps}x{g.groups}"


def launch_for(arch: CudaArch, kind: str, name: str, shape: str, rows: int) -> Launch:
    m = MATRICES[shape]
    weights = [TensorType((n, m.inputs), name) for n in m.outputs]
    x = TensorType((rows, m.inputs), kind)
    (launch,) = wide_launches(arch, x, weights, (), act=m.act)
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
    stored = STORED[p.work.x_class](x)
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


def tune(bench: Bench, kind: str, name: str, shape: str) -> None:
    """Times the geometries that the estimate likes best."""
    launch = launch_for(bench.arch, kind, name, shape, WIDE_ROWS)
    work = launch.params.work
    found = sorted(candidates(bench.arch, work), key=lambda g: tiling_cost(bench.arch, work, g))
    for g in found[:TUNED]:
        estimate = tiling_cost(bench.arch, work, g) / 1755
        other = launch_of(bench.arch, replace(launch.params, geometry=g))
        single(bench, f"  {shape} ({estimate:.0f} us)", other, WIDE_ROWS)


def chain(bench: Bench, kind: str, rows: int, layers: int) -> float:
    """Microseconds of a layer's four matrices in a chain of layers, with dependent launch."""
    launches = [launch_for(bench.arch, kind, "q4_0", shape, rows) for shape in LAYER]
    columns = [steps_of(bench, launch, layers) for launch in launches]
    steps = [column[i] for i in range(layers) for column in columns]
    us = bench.time(steps, rows, True) / layers
    bench.free()
    return us


def timings(arch: CudaArch, kind: str, quick: bool, tuned: bool) -> list[str]:
    bench = Bench(arch)
    summary = []
    for rows in TIMED_ROWS:
        times = []
        for shape in LAYER:
            launch = launch_for(arch, kind, "q4_0", shape, rows)
            times.append(f"{shape} {single(bench, f'q4_0 {shape}', launch, rows):.1f}")
        us = chain(bench, kind, rows, 4)
        each = "  ".join(times)
        speed = rows / (LAYERS * us) * 1e6
        summary.append(f"T={rows:<3} {each}  | a layer in a chain {us:.1f} us = {speed:.0f} tok/s")
    others = [n for n, format in FORMATS.items() if kind in format.classes and n != "q4_0"]
    for name in () if quick else others:
        for shape in ("gate_up", "down"):
            single(bench, f"{name} {shape}", launch_for(arch, kind, name, shape, 64), 64)
    for shape in LAYER if tuned else ():
        tune(bench, kind, "q4_0", shape)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_90a", choices=ARCHS)
    parser.add_argument("--activations", default="a8", choices=STORED)
    parser.add_argument("--quick", action="store_true", help="q4_0 only")
    parser.add_argument("--tune", action="store_true", help="also time other geometries")
    options = parser.parse_args()
    summary = timings(ARCHS[options.arch], options.activations, options.quick, options.tune)
    print(f"q4_0, us a launch with dependent launch; tok/s: {LAYERS} layers' matrices alone")
    for line in summary:
        print(line)


if __name__ == "__main__":
    main()

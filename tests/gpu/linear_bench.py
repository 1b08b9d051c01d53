"""Times the matrix kernels on a GPU: single products, then layers in a chain.

`PYTHONPATH=.:runtime:tests/gpu python tests/gpu/linear_bench.py [--activations bf16] [--tune]`.
Every launch of a graph reads another copy of its weights, more than L2 holds in all.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cuda.bindings import driver
from gpu_driver import Gpu, check
from matrices import LAYER, MATRICES

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_linear import FORMATS, launch_of, linear_launches

#: Bytes that a graph must read before it meets the same weights again.
ROTATION_BYTES = 400 << 20
PEAK = 4290.0  # GB/s, a device copy

#: (format, matrices): as they are stored, then in other formats.
CASES = [
    *((m.format, name) for name, m in MATRICES.items()),
    *(("q6_k", name) for name in ("down", "qkv")),
    *((format, name) for format in ("q8_0", "q4_k") for name in ("qkv", "gate_up", "down")),
    *((format, "gate_up") for format in ("q5_k", "bf16", "f16")),
]


def spread(
    splits: int,
    warps: int,
    slice_units: int,
    ring: tuple[int, int],
    blocks: int = 1,
    resident: int = 2,
) -> dict[str, int]:
    """Fields of another `Geometry`; `ring` is units a stage and stages."""
    fields = {"splits": splits, "warps": warps, "slice_units": slice_units}
    fields |= {"stage_units": ring[0], "stages": ring[1]}
    return fields | {"blocks": blocks, "resident_blocks": resident}


#: Other geometries worth a look.
VARIANTS = {
    ("q4_0", "qkv"): [
        spread(1, 12, 7, (7, 2)),
        spread(1, 12, 7, (7, 3), resident=1),
        spread(1, 14, 6, (3, 3)),
        spread(1, 7, 12, (4, 5)),
    ],
    ("q4_0", "gate_up"): [
        spread(1, 12, 7, (7, 2)),
        spread(1, 12, 7, (7, 3), resident=1),
        spread(1, 14, 6, (3, 3)),
        spread(1, 7, 12, (4, 5)),
    ],
    ("q4_0", "o"): [
        spread(2, 8, 8, (4, 5)),
        spread(1, 16, 8, (4, 5), resident=1),
        spread(4, 16, 2, (2, 5)),
        spread(3, 11, 4, (4, 3)),
    ],
    ("q4_0", "down"): [
        spread(4, 12, 7, (4, 3)),
        spread(4, 12, 7, (7, 2)),
        spread(4, 7, 12, (4, 5)),
    ],
    ("q6_k", "head"): [
        spread(1, 7, 3, (1, 8), resident=1),
        spread(1, 11, 2, (1, 4), resident=1),
        spread(1, 3, 7, (1, 4), blocks=2),
    ],
    ("q8_0", "draft_head"): [
        spread(1, 8, 2, (2, 2), blocks=2, resident=4),
        spread(1, 4, 4, (2, 4), blocks=2, resident=4),
        spread(1, 8, 2, (2, 5)),
    ],
}
#: The geometry of the prototype that reached 83%.
MEASURED = {
    "qkv": spread(1, 12, 7, (7, 2), resident=1),
    "o": spread(2, 8, 8, (8, 3), resident=1),
    "gate_up": spread(1, 12, 7, (7, 2), resident=1),
    "down": spread(4, 12, 7, (7, 2), resident=1),
}


@dataclass(frozen=True)
class Step:
    """One launch of a graph with its arguments."""

    launch: Launch
    pointers: list[int]


class Bench:
    def __init__(self, arch: CudaArch) -> None:
        self.arch, self.gpu = arch, Gpu()
        self.held: list[int] = []
        self.noise = np.random.default_rng(1).integers(0, 256, 16 << 20, dtype=np.uint8)
        self.noise[1::2] &= 0x3B  # as f16 pairs: small finite numbers
        self.keep: list[Any] = []

    def buffer(self, size: int, fill: bool) -> int:
        address = int(check(driver.cuMemAlloc(size)))
        self.held.append(address)
        check(driver.cuMemsetD8(address, 0, size))
        for at in range(0, size if fill else 0, self.noise.nbytes):
            part = min(self.noise.nbytes, size - at)
            check(driver.cuMemcpyHtoD(address + at, self.noise.ctypes.data, part))
        return address

    def free(self) -> None:
        for address in self.held:
            check(driver.cuMemFree(address))
        self.held.clear()
        self.keep.clear()

    def steps(self, launch: Launch, copies: int) -> list[Step]:
        """Copies of a launch, each with weights of its own; activations and outputs are shared."""
        p = launch.params
        x = self.buffer(p.work.inputs // 64 * 1024, False)
        widest = max(m.outputs for m in p.matrices)
        out = [self.buffer(p.geometry.splits * 8 * widest * 4, False) for _ in range(p.outs)]
        return [
            Step(launch, [x, *(self.buffer(n, True) for n in matrix_bytes(launch)), *out])
            for _ in range(copies)
        ]

    def record(self, step: Step, rows: int, stream: Any, early: bool) -> None:
        launch = step.launch
        values = np.array([rows], np.int32), np.array(step.pointers, np.uint64)
        addresses = [values[0].ctypes.data]
        addresses += [values[1].ctypes.data + 8 * i for i in range(len(step.pointers))]
        arguments = np.array(addresses, np.uint64)
        self.keep += [values, arguments]
        grid = [self.gpu.multiprocessors if g == "sms" else int(g) for g in launch.grid]
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = stream
        if early:
            attribute = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        function = self.gpu.function(launch, "bench", self.arch)
        check(driver.cuLaunchKernelEx(config, function, arguments.ctypes.data, 0))

    def time(self, steps: list[Step], rows: int, early: bool) -> float:
        """Median microseconds of a graph of the steps, of nine runs."""
        for step in steps:
            self.gpu.function(step.launch, "bench", self.arch)
        stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        check(driver.cuStreamBeginCapture(stream, mode))
        for step in steps:
            self.record(step, rows, stream, early)
        graph = check(driver.cuStreamEndCapture(stream))
        executable = check(driver.cuGraphInstantiate(graph, 0))
        start, end = (check(driver.cuEventCreate(0)) for _ in range(2))
        times = []
        for _ in range(11):
            check(driver.cuEventRecord(start, stream))
            check(driver.cuGraphLaunch(executable, stream))
            check(driver.cuEventRecord(end, stream))
            check(driver.cuEventSynchronize(end))
            times.append(1000 * check(driver.cuEventElapsedTime(start, end)))
        check(driver.cuGraphExecDestroy(executable))
        check(driver.cuGraphDestroy(graph))
        check(driver.cuStreamDestroy(stream))
        return float(np.median(times[2:]))


def launch_for(arch: CudaArch, name: str, shape: str, kind: str = "a8", **changes: int) -> Launch:
    """A product of eight rows of `kind`, or of what its format takes."""
    m, classes = MATRICES[shape], FORMATS[name].classes
    x = TensorType((8, m.inputs), kind if kind in classes else classes[0])
    weights = [TensorType((n, m.inputs), name) for n in m.outputs]
    outs = [TensorType((8, n), "f32", "row" if m.splits else "planes1") for n in m.outputs]
    (launch,) = linear_launches(arch, x, weights, outs, act=m.act)
    if not changes:
        return launch
    geometry = replace(launch.params.geometry, **changes)
    return launch_of(arch, replace(launch.params, geometry=geometry))


def matrix_bytes(launch: Launch) -> list[int]:
    """Bytes of each weight of a launch."""
    work = launch.params.work
    format = FORMATS[work.format]
    units = work.inputs // format.unit_inputs
    return [m.outputs // 16 * units * format.unit_bytes for m in launch.params.matrices]


def weight_bytes(launch: Launch) -> int:
    return sum(matrix_bytes(launch))


def geometry_text(launch: Launch) -> str:
    g = launch.params.geometry
    text = f"s{g.splits} w{g.warps}x{g.slice_units} r{g.stage_units}x{g.stages}"
    return f"{text} b{g.blocks}/{g.resident_blocks}"


def single(bench: Bench, label: str, launch: Launch) -> None:
    size = weight_bytes(launch)
    copies = max(2, math.ceil(ROTATION_BYTES / size))
    steps = bench.steps(launch, min(copies, 40))
    many = steps * max(1, 40 // len(steps))
    line = f"{label:16} {geometry_text(launch):28} {size / 1e6:7.1f} MB"
    for rows, early in ((1, False), (6, False), (6, True)):
        us = bench.time(many, rows, early) / len(many)
        line += f"  {us:7.2f} us {size / us / 1e3:5.0f} GB/s {size / us / 1e3 / PEAK:4.0%}"
    print(line, flush=True)
    bench.free()


def chain(
    bench: Bench, kind: str, layers: int, variants: dict[str, dict[str, int]], label: str
) -> None:
    """qkv, o, gate_up, down of `layers` layers in a row, plain and with dependent launch."""
    launches = [launch_for(bench.arch, "q4_0", n, kind, **variants.get(n, {})) for n in LAYER]
    columns = [bench.steps(launch, layers) for launch in launches]
    steps = [column[i] for i in range(layers) for column in columns]
    size = sum(weight_bytes(launch) for launch in launches)
    line = f"{label:45}"
    for early in (False, True):
        us = bench.time(steps, 6, early) / layers
        line += f"  {us:7.2f} us a layer {size / us / 1e3:5.0f} GB/s {size / us / 1e3 / PEAK:4.0%}"
    print(line, flush=True)
    bench.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_90a", choices=ARCHS)
    parser.add_argument("--tune", action="store_true", help="also time other geometries")
    parser.add_argument("--activations", default="a8", choices=("a8", "bf16"))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    bench, kind = Bench(ARCHS[options.arch]), options.activations
    print("columns: 1 row; 6 rows; 6 rows with dependent launch (GB/s, of 4290)")
    for name, shape in CASES:
        if options.only not in f"{name} {shape}":
            continue
        if FORMATS[name].classes:
            single(bench, f"{name} {shape}", launch_for(bench.arch, name, shape, kind))
        for changes in VARIANTS.get((name, shape), []) if options.tune else []:
            single(bench, "  variant", launch_for(bench.arch, name, shape, kind, **changes))
    if options.only and options.only not in "chain":
        return
    print("chain of layers: plain; with dependent launch")
    chain(bench, kind, options.layers, {}, "defaults")
    chain(bench, kind, options.layers, MEASURED, "geometry of the prototype")
    fewer = {"down": spread(4, 12, 7, (4, 3))}
    chain(bench, kind, options.layers, fewer, "defaults, down in 4 splits of 12 warps")


if __name__ == "__main__":
    main()

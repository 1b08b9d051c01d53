"""Times the kernels of experts on a GPU, at the sizes of gemma4 26B-A4B.

`PYTHONPATH=.:runtime:tests:tests/gpu python tests/gpu/experts_bench.py [--tune] [--format q8_0]`.
Every launch of a graph has a routing of its own, and reads the experts that it names: their bytes
are what is counted. Weights rotate, more than L2 holds. The last lines are all launches of a layer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from cuda.bindings import driver
from gpu_driver import check
from linear_bench import PEAK, Bench, Step

from expert_cases import ROUTINGS, Case
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_experts import (
    ExpertsGeometry,
    ExpertsParams,
    launch_of,
    top_experts_launches,
)
from memra_compiler.ops.cuda_kernels import quantise_launches
from memra_compiler.ops.quantise import Quantise
from memra_compiler.ops.top_experts import TopExperts

WIDTH, INNER, EXPERTS, ACTIVE = 2816, 704, 128, 8
#: Copies of all weights: the next launch with the same has as good as none of them in L2.
COPIES = 4
LAUNCHES = 40
#: Other geometries worth a look, of int8 rows and Q4_0: tiles, warps, units of a slice and of a
#: stage, stages.
VARIANTS = {
    "gated": [(1, 6, 8, 4, 5), (1, 11, 4, 4, 3), (1, 4, 11, 6, 4), (2, 4, 11, 6, 2)],
    "down": [(4, 3, 4, 4, 5), (8, 2, 6, 6, 3), (4, 2, 6, 6, 5), (11, 1, 11, 4, 5)],
}


class Layer:
    """Weights of a layer, `COPIES` times, and routings."""

    def __init__(self, bench: Bench, name: str, kind: str) -> None:
        self.bench, self.name, self.kind = bench, name, kind
        self.weights = {
            half: [
                bench.buffer(self.case(half, 1).operands[-1].nbytes, True) for _ in range(COPIES)
            ]
            for half in ("gated", "down")
        }

    def case(self, half: str, rows: int, routing: str = "at_random") -> Case:
        # Q6_K and the like do not tile the down projection: files have Q8_0 there
        name = self.name if half == "gated" or not self.name.endswith("_k") else "q8_0"
        sizes = EXPERTS, ACTIVE, WIDTH, INNER, "gelu_tanh", routing
        return Case(half, (name,), self.kind, rows, *sizes)

    def upload(self, array: np.ndarray) -> int:
        address = self.bench.buffer(array.nbytes, False)
        check(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    def routings(self, rows: int, routing: str) -> tuple[list[int], float]:
        """Tables of ids on the device, and how many experts each names on average."""
        rng = np.random.default_rng(rows)
        made = [
            ROUTINGS[routing](rng, rows, ACTIVE, EXPERTS).astype(np.int32) for _ in range(LAUNCHES)
        ]
        return [self.upload(ids) for ids in made], float(np.mean([len(np.unique(i)) for i in made]))

    def steps(self, launch: Launch, case: Case, ids: list[int]) -> list[Step]:
        """A launch with each of the routings."""
        x = self.bench.buffer(case.laid_out(self.bench.arch)[0].nbytes, False)
        shares = [] if case.gated else [self.bench.buffer(case.rows * ACTIVE * 4, False)]
        out = self.bench.buffer(ACTIVE * 64 * WIDTH * 4, False)
        weights = self.weights[case.half]
        return [
            Step(launch, [x, at, *shares, weights[i % COPIES], out]) for i, at in enumerate(ids)
        ]


def bytes_of(case: Case, distinct: float) -> float:
    """Bytes of the experts that a routing names."""
    return float(case.operands[-1].nbytes / EXPERTS * distinct)


def geometry_text(g: ExpertsGeometry) -> str:
    return f"t{g.tiles} w{g.warps}x{g.slice_units} r{g.stage_units}x{g.stages}"


def product(layer: Layer, arch: CudaArch, half: str, rows: int, routing: str,
            shape: ExpertsGeometry | None = None) -> None:  # fmt: skip
    """One line: a product alone."""
    case = layer.case(half, rows, routing)
    (launch,) = case.launches(arch, planes=True)
    if shape is not None:
        launch = launch_of(arch, replace(launch.params, geometry=shape))
        if launch.shared_bytes > arch.shared_bytes:
            return
    ids, distinct = layer.routings(rows, routing)
    steps, size = layer.steps(launch, case, ids), bytes_of(case, distinct)
    g = launch.params.geometry if isinstance(launch.params, ExpertsParams) else None
    line = f"{case.half:6}{case.formats[0]:5} T={rows:<3}{routing[:9]:10}"
    line += (
        f"{geometry_text(g) if g else 'as stored':20}{distinct:6.1f} experts {size / 1e6:6.1f} MB"
    )
    for early in (False, True):
        us = layer.bench.time(steps, rows, early) / len(steps)
        line += f"  {us:7.2f} us {size / us / 1e3:5.0f} GB/s {size / us / 1e3 / PEAK:4.0%}"
    print(line, flush=True)


def chain(layer: Layer, arch: CudaArch, rows: int) -> None:
    """One line: choice, first half, rounding, second half, with dependent launch."""
    bench = layer.bench
    gated, down = layer.case("gated", rows), layer.case("down", rows)
    h, h8 = TensorType((rows, ACTIVE * INNER)), down.laid_out(arch)[0]
    logits, scale = TensorType((rows, EXPERTS)), TensorType((EXPERTS,))
    op = TopExperts(ACTIVE)
    (choice,) = top_experts_launches(op, arch, logits, scale, *op.infer(logits, scale))
    (first,) = gated.launches(arch, planes=True)
    (rounding,) = quantise_launches(Quantise(h8.dtype), arch, h, h8)
    (second,) = down.launches(arch, planes=True)
    rng = np.random.default_rng(rows)
    tables = [rng.standard_normal((rows, EXPERTS)).astype(np.float32) for _ in range(LAUNCHES)]
    distinct = float(np.mean([len(np.unique(np.argsort(-t, axis=1)[:, :ACTIVE])) for t in tables]))
    ids, shares = (bench.buffer(rows * ACTIVE * 4, False) for _ in range(2))
    ones = layer.upload(np.ones(EXPERTS, np.float32))
    x = bench.buffer(gated.laid_out(arch)[0].nbytes, False)
    middle, rounded = bench.buffer(h.nbytes, False), bench.buffer(h8.nbytes, False)
    out = bench.buffer(ACTIVE * 64 * WIDTH * 4, False)
    steps = []
    for i, table in enumerate(tables):
        w0, w1 = (layer.weights[half][i % COPIES] for half in ("gated", "down"))
        steps += [
            Step(choice, [layer.upload(table), ones, ids, shares]),
            Step(first, [x, ids, w0, middle]),
            Step(rounding, [middle, rounded]),
            Step(second, [rounded, ids, shares, w1, out]),
        ]
    size = bytes_of(gated, distinct) + bytes_of(down, distinct)
    us = bench.time(steps, rows, True) / LAUNCHES
    alone = bench.time([s for s in steps if s.launch is choice], rows, True) / LAUNCHES
    line = f"layer {layer.name:5} T={rows:<3}{distinct:6.1f} experts {size / 1e6:6.1f} MB"
    line += f"  {us:7.2f} us {size / us / 1e3:5.0f} GB/s {size / us / 1e3 / PEAK:4.0%}"
    print(f"{line}; its choice {alone:5.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_90a", choices=ARCHS)
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--activations", default="a8", choices=("a8", "bf16"))
    parser.add_argument("--tune", action="store_true", help="also time other geometries")
    options = parser.parse_args()
    bench, arch = Bench(ARCHS[options.arch]), ARCHS[options.arch]
    layer = Layer(bench, options.format, options.activations)
    print("columns: alone; with dependent launch (GB/s, of 4290)")
    for half in ("gated", "down"):
        for rows in (1, 4, 6, 8, 16, 64):
            product(layer, arch, half, rows, "at_random")
        product(layer, arch, half, 6, "everyone_the_same")
        product(layer, arch, half, 16, "everyone_the_same")
        for shape in VARIANTS[half] if options.tune else []:
            for rows in (1, 6):
                product(layer, arch, half, rows, "at_random", ExpertsGeometry(*shape))
    for rows in (1, 4, 6, 64):
        chain(layer, arch, rows)


if __name__ == "__main__":
    main()

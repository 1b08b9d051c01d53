"""Search the geometry of each matrix of a model on this GPU, in the chain in which it runs.

usage: python tests/gpu/linear_tune.py OUT.jsonl --model 12b [--chain 0] [--shapes 6]

A geometry that is best alone can be a third slower between others, so a candidate replaces one
product of a chain of layers, each with weights of its own, six rows, dependent launch, and the
whole chain is timed. The records are what `geometry` replays.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from linear_bench import PEAK, ROTATION_BYTES, Bench, Step, matrix_bytes, weight_bytes
from matrices import CHAINS, MODELS, Matrices

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_linear import (
    FORMATS,
    MAX_SPLITS,
    Geometry,
    LinearParams,
    Work,
    candidates,
    launch_of,
    linear_launches,
    tiling_cost,
)

#: Launches of a chain at least, so that its ends do not count.
LAUNCHES = 40
#: Rings of a shape that are tried, those of the longest stages.
RINGS = 5
#: A candidate must gain so much to replace what is there.
GAIN = 0.997


def rings(arch: CudaArch, work: Work, shape: Geometry) -> Iterator[Geometry]:
    """The shape with other stages: copies of 1.5 to 10 KB, two to five of them."""
    unit = FORMATS[work.format].unit_bytes
    for chunks in range(1, shape.slice_units + 1):
        stage_units = math.ceil(shape.slice_units / chunks)
        for stages in (2, 3, 4, 5) if 1500 <= stage_units * unit <= 10240 else ():
            ring = replace(shape, stage_units=stage_units, stages=stages)
            if ring.shared_bytes(work) * ring.blocks <= arch.shared_bytes // 2:
                yield ring


def options_for(arch: CudaArch, work: Work, shapes: int) -> list[Geometry]:
    """The rings of the shapes that the cost model likes best."""
    found = {replace(g, stage_units=1, stages=2) for g in candidates(arch, work)}
    ranked = sorted(found, key=lambda g: tiling_cost(arch, work, g))[:shapes]
    return [ring for shape in ranked for ring in islice(rings(arch, work, shape), RINGS)]


def first_launch(arch: CudaArch, m: Matrices) -> Launch:
    """What is used today for matrices."""
    x = TensorType((8, m.inputs), "a8")
    weights = [TensorType((n, m.inputs), m.format) for n in m.outputs]
    outs = [TensorType((8, n), "f32", "row" if m.splits else "planes1") for n in m.outputs]
    (launch,) = linear_launches(arch, x, weights, outs, act=m.act)
    return launch


class Chain:
    """Products in the order in which they run, each layer with weights of its own."""

    def __init__(self, bench: Bench, matrices: list[Matrices]) -> None:
        self.bench = bench
        self.launches = [first_launch(bench.arch, m) for m in matrices]
        size = self.bytes = sum(weight_bytes(launch) for launch in self.launches)
        self.layers = max(2, math.ceil(ROTATION_BYTES / size))
        self.repeat = max(1, math.ceil(LAUNCHES / len(matrices) / self.layers))
        widest = max(n for m in matrices for n in m.outputs)
        outs = [bench.buffer(MAX_SPLITS * 8 * widest * 4, False) for _ in range(3)]
        self.pointers = []
        for launch in self.launches:
            x = bench.buffer(launch.params.work.inputs // 64 * 1024, False)
            self.pointers.append([
                [x, *(bench.buffer(n, True) for n in matrix_bytes(launch)),
                 *outs[: launch.params.outs]]
                for _ in range(self.layers)
            ])  # fmt: skip

    def time(self, launches: list[Launch]) -> float:
        """Microseconds of a layer."""
        steps = [
            Step(launch, pointers[layer])
            for layer in range(self.layers)
            for launch, pointers in zip(launches, self.pointers, strict=True)
        ]
        return self.bench.time(steps * self.repeat, 6, True) / self.layers / self.repeat

    def tune(self, shapes: int) -> float:
        """Replace the launches by better ones, one product after the other; microseconds."""
        arch, best = self.bench.arch, self.time(self.launches)
        for i, launch in enumerate(self.launches):
            params = launch.params
            assert isinstance(params, LinearParams)
            tried = [launch_of(arch, replace(params, geometry=g))
                     for g in options_for(arch, params.work, shapes)]  # fmt: skip
            self.bench.gpu.prepare([(t, "bench") for t in tried], arch)
            for other in tried:
                launches = [*self.launches[:i], other, *self.launches[i + 1 :]]
                if (us := self.time(launches)) < best * GAIN:
                    best, self.launches = us, launches
        return best


def main() -> None:
    """Tune every chain of a model and write a record for each of its products."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="31b")
    parser.add_argument("--chain", type=int, action="append", help="only this one")
    parser.add_argument("--shapes", type=int, default=6, help="shapes of each product to try")
    options = parser.parse_args()
    bench = Bench(ARCHS["sm_90a"])
    done: dict[Work, dict[str, object]] = {}
    for names in [CHAINS[i] for i in options.chain or range(len(CHAINS))]:
        chain = Chain(bench, [MODELS[options.model][name] for name in names])
        before = chain.time(chain.launches)
        after = chain.tune(options.shapes)
        print(f"{options.model} {' '.join(names):38} {before:7.2f} -> {after:7.2f} us "
              f"{chain.bytes / before / 1e3 / PEAK:4.0%} -> "
              f"{chain.bytes / after / 1e3 / PEAK:4.0%}", flush=True)  # fmt: skip
        for name, launch in zip(names, chain.launches, strict=True):
            work, geometry = launch.params.work, launch.params.geometry
            how = f"{options.model} {name} in a chain of {len(names)}"
            done.setdefault(work, {
                "work": dataclasses.asdict(work), "geometry": dataclasses.asdict(geometry),
                "how": how,
            })  # fmt: skip
        bench.free()
    options.out.write_text("".join(json.dumps(r) + "\n" for r in done.values()), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Search the geometry of each matrix of a large spec on this GPU and write what was best.

usage: python tests/gpu/linear_tune.py OUT.jsonl [--only NAME] [--tries 14]

Each try is timed as it runs: many launches in a graph, each with weights of its own, with dependent
launch, six rows. The records are what `geometry` replays.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

from linear_bench import MEASURED, Bench, Step, matrix_bytes
from matrices_31b import MATRICES, Matrices

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_linear import (
    FORMATS,
    Geometry,
    LinearParams,
    Work,
    candidates,
    launch_of,
    linear_launches,
    tiling_cost,
)

PEAK = 4290.0
SHARED_LIMIT = 113 << 10
ROTATION_BYTES = 400 << 20


def rings(work: Work, shape: Geometry) -> list[Geometry]:
    """The shape with other stages: copies of 1.5 to 10 KB, two to five of them."""
    unit = FORMATS[work.format].unit_bytes
    found = []
    for chunks in range(1, shape.slice_units + 1):
        stage_units = math.ceil(shape.slice_units / chunks)
        if not 1500 <= stage_units * unit <= 10240:
            continue
        for stages in (2, 3, 4, 5):
            ring = replace(shape, stage_units=stage_units, stages=stages)
            if ring.shared_bytes(work) * ring.blocks <= SHARED_LIMIT:
                found.append(ring)
    return found


def first_launch(m: Matrices) -> LinearParams:
    """The parameters that are used today for matrices."""
    x = TensorType((8, m.inputs), "a8")
    weights = [TensorType((n, m.inputs), m.format) for n in m.outputs]
    outs = [TensorType((8, n), "f32", "row" if m.splits else "planes1") for n in m.outputs]
    (launch,) = linear_launches(ARCHS["sm_90a"], x, weights, outs, act=m.act)
    params = launch.params
    assert isinstance(params, LinearParams)
    return params


def tune(
    bench: Bench, params: LinearParams, tries: int, also: dict[str, int] | None
) -> list[tuple[float, Geometry]]:
    """Microseconds of today's geometry and of the most promising others, best first."""
    work = params.work
    shapes = {replace(g, stage_units=1, stages=2) for g in candidates(bench.arch, work)}
    ranked = sorted(shapes, key=lambda g: tiling_cost(bench.arch, work, g))[: max(3, tries // 3)]
    options = [params.geometry, *([replace(params.geometry, **also)] if also else [])]
    for shape in ranked:
        options += [g for g in rings(work, shape) if g not in options][: max(4, tries // 3)]
    launch = launch_of(bench.arch, params)
    size = sum(matrix_bytes(launch))
    steps = bench.steps(launch, min(40, max(2, math.ceil(ROTATION_BYTES / size))))
    widest = max(m.outputs for m in params.matrices)
    outs = [bench.buffer(8 * 8 * widest * 4, False) for _ in range(params.outs)]
    timed = []
    for geometry in options:
        other = launch_of(bench.arch, replace(params, geometry=geometry))
        try:
            many = [Step(other, [*s.pointers[: -params.outs], *outs]) for s in steps]
            many *= max(1, 24 // len(many))
            timed.append((bench.time(many, 6, True) / len(many), geometry))
        except Exception as error:  # a geometry that does not launch is only a worse one
            print(f"    {geometry}: {error}"[:150])
    bench.free()
    print(f"    {size / 1e6:.1f} MB")
    return sorted(timed, key=lambda entry: entry[0])


def main() -> None:
    """Tune every case and write one record a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--tries", type=int, default=14)
    options = parser.parse_args()
    bench = Bench(ARCHS["sm_90a"])
    with options.out.open("w", encoding="utf-8") as out:
        for name, matrices in MATRICES.items():
            if options.only not in name:
                continue
            params = first_launch(matrices)
            timed = tune(bench, params, options.tries, MEASURED.get(name))
            size = sum(matrix_bytes(launch_of(bench.arch, params)))
            before = next(us for us, g in timed if g == params.geometry)
            best, geometry = timed[0]
            print(f"{name:14} before {before:7.2f} us, best {best:7.2f} us "
                  f"{size / best / 1e3 / PEAK:5.0%}  {geometry}", flush=True)  # fmt: skip
            record = {
                "work": dataclasses.asdict(params.work),
                "geometry": dataclasses.asdict(geometry),
                "us": round(best, 2),
            }
            out.write(json.dumps(record) + "\n")
            out.flush()


if __name__ == "__main__":
    main()

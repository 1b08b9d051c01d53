"""Build what the tests of the pair need on a GPU machine, into build/gpu; needs TVM and no GPU.

usage: python tests/gpu/build.py [--arch sm_90a]

For each variant (class of activations, cache format, weight file): the artifact for the GPU, and as
NAME.npz what the CPU target says in the same class, with its distance from float64. And
scheduled.json: what TVM schedules for the tests of single kernels; variants: a tiny model of each
variant of gemma4.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), *(str(HERE.parent / name) for name in ("golden_runs", "variants"))]

import numpy as np  # noqa: E402
import ops_bench  # noqa: E402
from golden_support import (  # noqa: E402
    SPEC,
    InterpreterDevice,
    fixed_session,
    interpret_pair,
    load_pair,
    options_of,
    read_cases,
)
from pair_bundle import (  # noqa: E402
    FOLDER,
    INDEX,
    TRIMMED,
    VARIANTS,
    Variant,
    facts,
    write_poor_ranks,
)
from pair_truth import measure, spread  # noqa: E402
from scheduled_bundle import ASKED, write  # noqa: E402
from scheduled_cases import everything  # noqa: E402
from variant_bundle import RUNS  # noqa: E402

from memra_compiler.codegen.cache import DEFAULT_CACHE  # noqa: E402
from memra_compiler.compile import Compiled, compile_spec  # noqa: E402
from memra_compiler.ir.types import TensorType  # noqa: E402
from memra_compiler.ops.base import Op  # noqa: E402
from memra_compiler.ops.cuda import ARCHS, CudaArch  # noqa: E402


def compile_variant(variant: Variant, target: str, folder: Path) -> Compiled:
    """Compile the pair as a variant says."""
    options = options_of(variant.pair, DEFAULT_CACHE, variant.overrides, target)
    return compile_spec(SPEC, folder, options)


def truth_of(variant: Variant, scratch: Path) -> dict[str, np.ndarray]:
    """What the CPU target says, and how far float64 is from it."""
    compiled = compile_variant(variant, "cpu", scratch / f"{variant.name}.cpu.memra")
    model = load_pair(variant.pair, compiled)
    exact = InterpreterDevice(interpret_pair(variant.pair, variant.overrides), model.manifest)
    prompts = [case.ids for case in read_cases()]
    return measure(fixed_session(model.device, 0), fixed_session(exact, 0), prompts)


def wanted(arch: CudaArch) -> list[tuple[Op, CudaArch, tuple[TensorType, ...]]]:
    """What TVM schedules for the tests and the benches of single kernels."""
    found = [(op, arch, types) for op, types in everything()]
    ops_bench.benches()  # it asks for its own
    return found + ASKED


def main() -> None:
    """Build all variants; the index comes last, so that half a bundle is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_90a", choices=ARCHS)
    arch = parser.parse_args().arch
    made_of = facts(arch)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            start = time.perf_counter()
            compile_variant(variant, f"cuda:{arch}", variant.artifact)
            truth = truth_of(variant, Path(scratch))
            np.savez_compressed(variant.truth, **truth)
            print(f"{variant.name:20} {time.perf_counter() - start:5.1f} s  "
                  f"float64 is off by {spread(truth)}", flush=True)  # fmt: skip
        for run in RUNS:
            start = time.perf_counter()
            run.build(arch, Path(scratch), DEFAULT_CACHE)
            print(f"{run.id:20} {time.perf_counter() - start:5.1f} s", flush=True)
    write_poor_ranks()
    for variant in TRIMMED:
        compile_variant(variant, f"cuda:{arch}", variant.artifact)
    write(wanted(ARCHS[arch]))
    INDEX.write_text(json.dumps(made_of), encoding="utf-8")
    size = sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file())
    print(f"{FOLDER}: {size / 2**20:.1f} MiB for {arch}")


if __name__ == "__main__":
    main()

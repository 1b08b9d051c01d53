"""Kernels of the device block and of confidences, run on the CPU: every sample of their ops.

On a GPU, tests/gpu/test_gpu_state.py runs them all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from templates_on_cpu import TemplatesOnCpu, build

from cpp_on_cpu import compiler
from memra_compiler.codegen.cuda import render
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.again import Again
from memra_compiler.ops.base import Op, Sample
from memra_compiler.ops.chain import Begin
from memra_compiler.ops.confidence import Confidence, WeighDraft
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_confidence import confidence_launches, confidence_scratch_floats
from memra_compiler.ops.settle import Accept, AdaptDepth, Rollback
from memra_runtime.artifact import slot

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

ARCH = ARCHS["sm_90a"]
Runner = Callable[[Op, Sample, list[np.ndarray]], list[int]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs a sample in place, returns the conditions it sets; a kernel is compiled once."""
    built: dict[str, ctypes.CDLL] = {}

    def runner(op: Op, sample: Sample, arrays: list[np.ndarray]) -> list[int]:
        (launch,) = op.lower_cuda(ARCH, *sample.types, *op.infer(*sample.types))
        text = render(launch, "kernel")[1]
        if text not in built:
            built[text] = build(launch, tmp_path_factory.mktemp("state"))
        conditions = np.full(launch.graph_handles, 77, np.uint32)
        places = [a.ctypes.data for a in arrays]
        places += [conditions.ctypes.data + 4 * i for i in range(len(conditions))]
        pointers = (ctypes.c_void_p * len(places))(*places)
        built[text].run(*launch.grid, launch.block, sample.rows, pointers)
        return [int(c) for c in conditions]

    return runner


def expected_conditions(op: Op, state: np.ndarray) -> list[int]:
    at = {name: int(state[slot(name)]) for name in ("more", "depth", "step", "drafted")}
    if isinstance(op, Again):
        return [at["more"], at["depth"]]
    if isinstance(op, WeighDraft) or (isinstance(op, Begin) and op.cuts):
        return [int(at["step"] < at["drafted"]), at["drafted"]]
    return []


@pytest.mark.parametrize("cls", [Accept, AdaptDepth, Again, Begin, Rollback, WeighDraft])
def test_state_kernel_is_its_reference(cls: type[Op], run: Runner) -> None:
    for sample in cls.samples():
        op, rng = cls(**dict(sample.attrs)), np.random.default_rng(7)
        given, arrays = dict(sample.values), []
        for i, type in enumerate(sample.types):
            name = op.operand(i).name
            made = given[name](rng) if name in given else rng.standard_normal(type.max_shape)
            arrays.append(np.asarray(made).astype(np.int32 if type.dtype == "i32" else np.float32))
        want = [a.copy() for a in arrays]
        conditions = run(op, sample, arrays)
        op.reference(sample.rows, *want)
        for i, (got, expected) in enumerate(zip(arrays, want, strict=True)):
            np.testing.assert_array_equal(got, expected, err_msg=f"{op}, {op.operand(i).name}")
        state = next(a for i, a in enumerate(want) if op.operand(i).name == "state")
        assert conditions == expected_conditions(op, state), op


@pytest.mark.parametrize(("trimmed", "splits"), [(True, 1), (False, 3)])
def test_confidence_agrees_with_its_reference(trimmed: bool, splits: int, tmp_path: Path) -> None:
    """Several blocks a row, partial planes of the logits, an unsound row, rows that are spare."""
    rng = np.random.default_rng(3)
    rows, vocab = 3, 4096
    logits = TensorType((Sym("T", 8), vocab), "f32", f"planes{splits}")
    kind = "head_row" if trimmed else "i32"
    choice, out = TensorType((Sym("T", 8),), kind), TensorType((Sym("T", 8),))
    op, used = Confidence(), vocab - 5 * trimmed
    values = (3 * rng.standard_normal((splits, 8, vocab))).astype(np.float32)
    total = values[0].copy()
    for part in values[1:]:
        total = total + part
    total[:, used:] = 40  # nobody may count them
    values[0, :, used:] = 40
    values[1:, :, used:] = 0
    chosen = np.r_[total[:rows, :used].argmax(axis=1), np.full(5, 9)].astype(np.int32)
    chosen[1] = -1
    count = [np.array([used], np.int32)] * trimmed
    extra = [TensorType((1,), "i32")] * trimmed
    found = np.full(8, np.nan, np.float32)
    scratch = np.full(confidence_scratch_floats(op, logits), np.nan, np.float32)
    launches = confidence_launches(op, ARCH, logits, choice, *extra, out, splits=splits)
    arrays = [values, chosen, *count, found, scratch]
    TemplatesOnCpu(launches, tmp_path)(rows, *arrays)
    (want,) = op.reference(rows, total, chosen, *count)
    assert want[1] == 0
    assert 0 < want[0] < 1
    np.testing.assert_allclose(found[:rows], want, rtol=2e-6, atol=0)
    assert np.isnan(found[rows:]).all()

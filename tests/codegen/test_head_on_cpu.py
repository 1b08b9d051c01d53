"""The kernels of a trimmed head, run on the CPU from the text that NVRTC compiles."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from templates_on_cpu import TemplatesOnCpu

from cpp_on_cpu import compiler
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops import cuda_head
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_layouts import repack_reference
from memra_compiler.ops.cuda_linear import repack_launches
from memra_compiler.ops.cuda_state import argmax_scratch_floats
from memra_compiler.ops.formats import random_bytes
from memra_compiler.ops.head import BestRow, TokenOfRow
from memra_runtime.artifact import HEAD_GROUP

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

ROWS, HEAD, GROUPS = 3, 2112, 5
USED, IDS = TensorType((1,), "i32"), TensorType((HEAD,), "i32")
CHOSEN, TOKENS = (TensorType((Sym("T", ROWS),), dtype) for dtype in ("head_row", "i32"))


@pytest.mark.parametrize("splits", [1, 3])
def test_the_best_row_is_one_in_use(splits: int, tmp_path: Path) -> None:
    """At every remainder of a vector; the largest logits and the NaN lie behind the used rows."""
    rng = np.random.default_rng(splits)
    logits = replace(TensorType((Sym("T", ROWS), HEAD)), layout=f"planes{splits}")
    op = BestRow()
    kernels = TemplatesOnCpu(
        cuda_head.best_row_launches(op, ARCHS["sm_90a"], logits, USED, CHOSEN), tmp_path
    )
    for used in (1, 2, 3, 4, 63, 1027, 1538, HEAD):
        values = rng.integers(-9, 9, (ROWS, HEAD)).astype(np.float32)
        values[0, used:], values[1, used:] = 1e30, np.nan
        values[2, used - 1] = np.nan
        planes = np.zeros((splits, 8, HEAD), np.float32)
        planes[0, :ROWS] = values
        out = np.full(ROWS, -7, np.int32)
        scratch = np.zeros(argmax_scratch_floats(op, logits), np.float32)
        count = np.array([used], np.int32)
        kernels(ROWS, planes, count, out, scratch)
        assert out.tolist() == op.reference(ROWS, values, count)[0].tolist()
        assert out[2] == -1


@pytest.mark.parametrize("skip", [False, True])
def test_rows_become_tokens(skip: bool, tmp_path: Path) -> None:
    op = TokenOfRow(skip)
    launches = cuda_head.token_of_row_launches(op, ARCHS["sm_90a"], CHOSEN, IDS, TOKENS)
    ids = np.random.default_rng(0).permutation(HEAD).astype(np.int32)
    chosen, out = np.array([HEAD - 1, -1, 5], np.int32), np.zeros(ROWS, np.int32)
    TemplatesOnCpu(launches, tmp_path)(ROWS, chosen, ids, out)
    assert out.tolist() == op.reference(ROWS, chosen, ids)[0].tolist()


@pytest.mark.parametrize(("dtype", "width"), [("q8_0", 192), ("bf16", 128)])
def test_the_repacking_kernel_takes_a_group_by_itself(
    dtype: str, width: int, tmp_path: Path
) -> None:
    """The kernel of the whole head, with a grid for one group: its tiles and not a byte more."""
    type = TensorType((GROUPS * HEAD_GROUP, width), dtype)
    launch, size = repack_launches(ARCHS["sm_90a"], type)
    stored = random_bytes(type, np.random.default_rng(1)).view(np.uint8).reshape(-1)
    want = repack_reference(stored, type)
    guard = 4096
    ((_, library),) = TemplatesOnCpu([launch], tmp_path).kernels
    part = size // GROUPS
    out = np.full(part + guard, 0xB3, np.uint8)
    from_group = np.ascontiguousarray(stored[2 * stored.nbytes // GROUPS :])
    pointers = (ctypes.c_void_p * 2)(from_group.ctypes.data, out.ctypes.data)
    library.run(launch.grid[0] // GROUPS, 1, 1, launch.block, 1, pointers)
    assert np.array_equal(out[:part], want[2 * part : 3 * part])
    assert (out[part:] == 0xB3).all()

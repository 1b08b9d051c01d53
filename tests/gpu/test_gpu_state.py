"""The greedy choice and the device block on a GPU, against the NumPy reference of each op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import (
    COUNTS,
    POISON,
    STORAGE,
    Array,
    Case,
    check_cases,
    empty,
    normal,
    rows_of,
    split_planes,
)

from memra_compiler.ir.types import TensorType
from memra_compiler.ops import cuda_confidence, cuda_state
from memra_compiler.ops.again import Again
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.base import Op, Sample
from memra_compiler.ops.chain import Advance, Begin, DraftToken
from memra_compiler.ops.confidence import Confidence, WeighDraft
from memra_compiler.ops.settle import Accept, AdaptDepth, Commit, Rollback
from memra_compiler.ops.state import Positions, ReadRow, ReadTokens, WriteRows
from memra_runtime.artifact import BATCH_ROWS, STATE_SIZE, slot

pytestmark = pytest.mark.gpu

STATE_TYPE = TensorType((STATE_SIZE,), "i32")


@pytest.mark.parametrize(
    ("bound", "vocab", "splits", "suppress"),
    [
        (8, 262144, 1, (5, 258882, 258883)),
        (8, 4096, 3, ()),
        (16, 1024, 1, (0,)),
        (1, 262144, 1, ()),
        (3, 64, 1, (0, 3, 63)),
    ],
)
def test_argmax(gpu: Gpu, bound: int, vocab: int, splits: int, suppress: tuple[int, ...]) -> None:
    rng = np.random.default_rng(9)
    logits, out = rows_of(bound, vocab), rows_of(bound, dtype="i32")
    op = ArgMax(suppress)
    values = normal(rng, bound, vocab) * 5
    for token in suppress:
        values[:, token] = 50
    last, first = vocab - 1, next(i for i in range(vocab) if i not in suppress)
    values[0, [last, vocab // 2, first]] = 40  # a tie: the lowest id wins
    if bound > 2:
        values[1] = -np.abs(values[1])
        values[1, vocab // 2] = -0.0
        values[1, vocab // 2 + 1] = 0.0
        values[2] = -np.inf
    if bound > 6:
        values[3, vocab // 3] = np.nan
        values[4, last] = np.inf
        values[5, 17] = -np.inf
        values[6] = np.finfo(np.float32).min
    case = Case(
        op,
        (logits, out),
        cuda_state.argmax_launches(op, ARCH, logits, out, splits=splits),
        [split_planes(values, splits, rng)],
        (0,),
        splits,
        scratch=cuda_state.argmax_scratch_floats(op, logits),
    )
    if splits > 1:  # infinities do not survive a difference of planes
        values[~np.isfinite(values)] = 0
        case.operands = [split_planes(values, splits, rng)]
    check_cases(gpu, [case], COUNTS[bound])


@pytest.mark.parametrize(
    ("bound", "vocab", "splits", "trimmed"),
    [(1, 262144, 2, False), (1, 4096, 1, True), (6, 1024, 3, False), (3, 64, 1, True)],
)
def test_confidence(gpu: Gpu, bound: int, vocab: int, splits: int, trimmed: bool) -> None:
    rng = np.random.default_rng(9)
    logits, out = rows_of(bound, vocab), rows_of(bound)
    choice = rows_of(bound, dtype="head_row" if trimmed else "i32")
    op, used = Confidence(), vocab - 7 * trimmed
    values = normal(rng, bound, vocab) * 3
    chosen = rng.integers(0, used, bound).astype(np.int32)
    values[np.arange(bound), chosen] = 11 + 4 * np.arange(bound)
    if bound > 2:
        chosen[2] = -1
    count = [np.array([used], np.int32)] * trimmed
    types = (logits, choice, *[TensorType((1,), "i32")] * trimmed)
    case = Case(
        op,
        (*types, out),
        cuda_confidence.confidence_launches(op, ARCH, *types, out, splits=splits),
        [split_planes(values, splits, rng), chosen, *count],
        (0,),
        splits,
        scratch=cuda_confidence.confidence_scratch_floats(op, logits),
        tolerance=2e-5,
        by_row=(0, 1),
    )
    check_cases(gpu, [case], COUNTS[bound])


STATE_OPS: dict[type[Op], Any] = {
    Positions: cuda_state.positions_launches,
    ReadTokens: cuda_state.read_tokens_launches,
    ReadRow: cuda_state.read_row_launches,
    WriteRows: cuda_state.write_rows_launches,
    Begin: cuda_state.begin_launches,
    DraftToken: cuda_state.draft_token_launches,
    WeighDraft: cuda_confidence.weigh_draft_launches,
    Advance: cuda_state.advance_launches,
    Accept: cuda_state.accept_launches,
    Rollback: cuda_state.rollback_launches,
    Commit: cuda_state.commit_launches,
    AdaptDepth: cuda_state.adapt_depth_launches,
    Again: cuda_state.again_launches,
}
STATE_CASES = [
    pytest.param(cls, sample, id=f"{cls.name}-{i}")
    for cls in STATE_OPS
    for i, sample in enumerate(cls.samples())
]


def sample_operands(op: Op, sample: Sample) -> list[Array]:
    rng = np.random.default_rng(7)
    given = dict(sample.values)
    stored = []
    for i, type in enumerate(sample.types):
        name = op.operand(i).name
        value = given[name](rng) if name in given else rng.standard_normal(type.max_shape)
        stored.append(np.asarray(value).astype(STORAGE[type.dtype]))
    return stored


@pytest.mark.parametrize(("cls", "sample"), STATE_CASES)
def test_state_op_is_exact(gpu: Gpu, cls: type[Op], sample: Sample) -> None:
    op = cls(**dict(sample.attrs))
    given = sample_operands(op, sample)
    outputs = op.infer(*sample.types)
    bound = max([sample.rows, *(t.max_shape[0] for t in outputs)])
    types = (*sample.types, *outputs)
    case = Case(op, types, STATE_OPS[cls](op, ARCH, *types), given)
    made = [empty(t, bound) for t in outputs]
    pointers = [gpu.upload(a) for a in (*given, *made)]
    gpu.run(case.launches, op.name, ARCH, sample.rows, pointers)
    after = [gpu.download(p, a) for p, a in zip(pointers, (*given, *made), strict=True)]
    gpu.free(pointers)
    want = [a.copy() for a in given]
    results = op.reference(sample.rows, *want)
    for got, expected in zip(after, want, strict=False):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(after[len(given) :], results, strict=True):
        np.testing.assert_array_equal(got[: sample.rows], expected)
        assert (got[sample.rows :].reshape(-1).view(np.uint8) == POISON).all()


def settle_states() -> Iterator[dict[str, int]]:
    base = {"capacity": 100, "depth_cap": 7, "floor_short": 4, "floor_deep": 1,
            "floor_boundary": 50, "depth_initial": 3, "ring_count": 4093, "rounds": 3}  # fmt: skip
    for position in (0, 7, 49, 93, 99):
        for drafted in (0, 1, 7, 15):
            for adaptive in (0, 1):
                yield base | {"position": position, "drafted": drafted, "adaptive": adaptive}


@pytest.mark.parametrize("agree", [0, 3, 15])
@pytest.mark.parametrize(("skip", "shift", "fresh"), [(False, 0, False), (True, 1, True)])
def test_end_of_a_round_in_order(gpu: Gpu, agree: int, skip: bool, shift: int, fresh: bool) -> None:
    parts = Accept(), Rollback(skip), Commit(shift), AdaptDepth(fresh)
    sample = Commit.samples()[0]
    types = (*sample.types[:3], TensorType((BATCH_ROWS, 5376)), TensorType((5376,)),
             TensorType((4096,), "i32"), sample.types[6])  # fmt: skip
    places = (0, 1, 2), (0,), tuple(range(7)), (0,)  # the operands of each
    rng = np.random.default_rng(agree)
    for slots in settle_states():
        state = np.zeros(types[0].max_shape, np.int32)
        for name, value in slots.items():
            state[slot(name)] = value
        choice = rng.integers(5, 50, BATCH_ROWS).astype(np.int32)
        batch = np.r_[7, choice[:-1]].astype(np.int32)
        batch[agree + 1 :] += 1
        eos = np.array([choice[2], 1, -1, -1, -1, -1, -1, -1], np.int32)
        given = [state, batch, choice, normal(rng, BATCH_ROWS, 5376), normal(rng, 5376),
                 rng.integers(0, 9, 4096).astype(np.int32), eos]  # fmt: skip
        pointers = [gpu.upload(a) for a in given]
        for op, at in zip(parts, places, strict=True):
            launches = op.lower_cuda(ARCH, *(types[i] for i in at))
            gpu.run(launches, op.name, ARCH, 1, [pointers[i] for i in at])
        after = [gpu.download(p, a) for p, a in zip(pointers, given, strict=True)]
        gpu.free(pointers)
        want = [a.copy() for a in given]
        for op, at in zip(parts, places, strict=True):
            op.reference(1, *(want[i] for i in at))
        for got, expected in zip(after, want, strict=True):
            np.testing.assert_array_equal(got, expected)

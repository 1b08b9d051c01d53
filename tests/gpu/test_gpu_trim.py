"""A trimmed head on a GPU: its kernels, rows that are written between replays, its drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import COUNTS, Case, check_cases, normal, rows_of, split_planes
from pair_bundle import MAIN, TRIMMED, Loaded, load, on_gpu

from memra_compiler.ir.types import TensorType
from memra_compiler.ops import cuda_head
from memra_compiler.ops.cuda_layouts import repack_reference
from memra_compiler.ops.cuda_state import argmax_scratch_floats
from memra_compiler.ops.head import BestRow, TokenOfRow
from memra_runtime.artifact import HEAD_IDS, HEAD_ROWS
from memra_runtime.check import Options, run_checks
from memra_runtime.check.report import CAUGHT, PASS
from memra_runtime.model import Model, load_opened, open_model
from memra_runtime.session import Session

pytestmark = pytest.mark.gpu

TOKENS = 300
#: Points of acceptance that learning may stay behind the whole head.
POINTS = 0.02


@pytest.mark.parametrize("used", [1, 3, 1030, 2047, 2112])
@pytest.mark.parametrize(("bound", "splits"), [(1, 1), (8, 3)])
def test_best_row(gpu: Gpu, bound: int, splits: int, used: int) -> None:
    """Of rows in use only: those behind them hold larger values."""
    rng, head = np.random.default_rng(used), 2112
    logits, out = rows_of(bound, head), rows_of(bound, dtype="head_row")
    values = normal(rng, bound, head) * 5
    values[:, used:] = 1e9
    values[0, [0, used - 1]] = 40  # a tie: the lowest row wins
    op, count = BestRow(), np.array([used], np.int32)
    types = (TensorType(logits.shape, layout=f"planes{splits}"), TensorType((1,), "i32"), out)
    case = Case(
        op, types, cuda_head.best_row_launches(op, ARCH, *types),
        [split_planes(values, splits, rng), count], (0,), splits,
        scratch=argmax_scratch_floats(op, logits),
    )  # fmt: skip
    check_cases(gpu, [case], COUNTS[bound])


@pytest.mark.parametrize("skip", [False, True])
def test_token_of_row(gpu: Gpu, skip: bool) -> None:
    ids = np.random.default_rng(0).permutation(2112).astype(np.int32)
    op, chosen = TokenOfRow(skip), np.array([5, -1, 2111], np.int32)
    types = (rows_of(3, dtype="head_row"), TensorType((2112,), "i32"), rows_of(3, dtype="i32"))
    case = Case(op, types, cuda_head.token_of_row_launches(op, ARCH, *types), [chosen, ids])
    check_cases(gpu, [case], COUNTS[3])


def fresh(pair: Loaded) -> Model:
    """The pair loaded anew: what one test learns, another must not know."""
    files = pair.variant.pair
    return load_opened(open_model(pair.variant.artifact, files.target, files.draft))


def said(model: Model, ids: list[int], *, learn: bool = True) -> tuple[list[int], float]:
    """A text and its acceptance."""
    session = Session(model.device, trim=model.trim if learn else None)
    session.prime(ids, TOKENS)
    return list(session.generate(TOKENS)), session.stats.acceptance


@pytest.mark.parametrize("pair", on_gpu(TRIMMED), indirect=True)
def test_learning_recovers_acceptance_and_changes_no_text(pair: Loaded) -> None:
    whole = load(MAIN[TRIMMED.index(pair.variant)])
    model, ids = fresh(pair), pair.prompts()[0]
    text, acceptance = said(whole.model, ids)
    static_text, static = said(model, ids, learn=False)
    learned_text, learned = said(model, ids)
    assert static_text == learned_text == text
    assert static < acceptance / 2, "the ranks file is not poor"
    print(f"{pair.name}: acceptance whole {acceptance:.3f}, trimmed {static:.3f}, "
          f"learned {learned:.3f}")  # fmt: skip
    # the first text has paid for what the second one knows
    again_text, again = said(model, ids)
    assert again_text == text
    assert again >= acceptance - POINTS, (static, learned, again, acceptance)


@pytest.mark.parametrize("pair", on_gpu(TRIMMED), indirect=True)
def test_rows_are_written_where_graphs_read_them(pair: Loaded) -> None:
    """By the bytes of the head, and of the planes; no graph is captured for it."""
    model = fresh(pair)
    device: Any = model.device
    trim = model.trim
    assert trim is not None
    said(model, pair.prompts()[0], learn=False)
    graphs, memory = set(device._graphs), device.context.free_memory()
    said(model, pair.prompts()[0])
    assert trim.stats.used > 0
    assert set(device._graphs) == graphs
    assert device.context.free_memory() == memory
    at = next(i for i, w in enumerate(model.manifest.weights) if w.id == trim.entry.weight)
    entry = model.manifest.weights[at]
    held = np.empty(entry.device_bytes, np.uint8)
    device._weights.read(device._addresses[at] - device._weights.address, held)
    wanted = trim.rows.reshape(-1)
    if entry.id in {r.weight for r in model.manifest.repacks}:
        wanted = repack_reference(wanted, TensorType(entry.shape, entry.format))
    assert np.array_equal(held, wanted)
    assert device.plane(HEAD_IDS).tolist() == trim.ids.tolist()
    assert device.plane(HEAD_ROWS).tolist() == [trim.used]


@pytest.mark.parametrize("pair", on_gpu(TRIMMED), indirect=True)
def test_memra_check_passes_with_a_trimmed_head(pair: Loaded) -> None:
    """One more check, one more red arm."""
    report = run_checks(fresh(pair), Options(quick=True))
    assert report.passed, report.render()
    assert {c.name: c.status for c in report.checks if c.status != PASS} == {}
    assert "trim" in {c.name for c in report.checks}
    caught = {a.name: a.caught_by for a in report.red_arms if a.status == CAUGHT}
    assert caught["skip_remap"] == ("trim", "wiring")
    assert len(caught) == len(report.red_arms) == 4

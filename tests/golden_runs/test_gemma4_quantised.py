"""Quantised files: the compiled pipeline equals the same mathematics on dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from golden_support import (
    NEAR_TIE,
    QUANTISED,
    InterpreterDevice,
    compile_pair,
    fixed_session,
    interpret_pair,
    load_pair,
    margin,
    read_cases,
    relative_error,
    step_logits,
)

from memra_runtime.model import Model

CASES = read_cases()
#: Greedy tokens compared, and the prompt they follow.
TOKENS, CASE = 12, CASES[4]


@dataclass(frozen=True)
class Reported:
    """What llama.cpp reported for the bundled q8_0 pair: depth 5, 128 new tokens.

    `branch` is the start of a text that leaves ours at a near-tie. The third prompt has one at its
    third token, 0.02 apart. llama.cpp rounds activations to 8 bits, and its acceptance fits the
    other choice only (0.458 beside 0.333), so that is the text compared; this is inferred.
    """

    prompt: str
    accepted: int
    drafted: int
    branch: tuple[int, ...] = ()


LLAMA_CPP = (
    Reported("The :mod:`json` module", 89, 201),
    Reported("import asyncio", 92, 205),
    Reported("If the *encoding* argument is", 93, 203, branch=(525, 1796, 509)),
)
#: The gap of the two best logits at which the branch leaves our text, at most.
BRANCH_MARGIN = 0.03


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_file_equals_dequantised_weights(
    name: str, tmp_path: Path, kernel_cache: Path
) -> None:
    pair = QUANTISED[name]
    model = load_pair(pair, compile_pair(pair, tmp_path / "t.cpu.memra", kernel_cache))
    device = fixed_session(model.device, 5)
    exact = fixed_session(InterpreterDevice(interpret_pair(pair), model.manifest), 5)

    got, hidden = step_logits(device, CASE.ids)
    want, exact_hidden = step_logits(exact, CASE.ids)
    assert relative_error(got, want) < 1e-4
    assert relative_error(hidden, exact_hidden) < 1e-4

    for session in (device, exact):
        session.prime(CASE.ids, TOKENS)
    for step in range(TOKENS):
        gap = margin(exact.device.value("plain_step", "target.logits")[0])
        if device.pending != exact.pending:
            assert gap < NEAR_TIE, f"step {step}: {device.pending} for {exact.pending}"
            pytest.fail(f"no near-tie was known here; step {step}, margin {gap:.2g}")
        for session in (device, exact):
            session.step("plain")


@pytest.mark.parametrize("reported", LLAMA_CPP, ids=lambda r: r.prompt)
def test_acceptance_is_that_of_llama_cpp(
    reported: Reported, tiny_model: Model, record_property: Callable[[str, object], None]
) -> None:
    ids = next(c.ids for c in CASES if c.prompt.startswith(reported.prompt))
    if reported.branch:
        check_branch(tiny_model, ids, reported.branch)
    new = 128 - len(reported.branch)
    session = fixed_session(tiny_model.device, 5)
    session.prime([*ids, *reported.branch], new)
    assert len(list(session.generate(new))) == new
    record_property("acceptance", f"{session.stats.accepted}/{session.stats.drafted}")
    assert abs(session.stats.acceptance - reported.accepted / reported.drafted) < 0.03


def check_branch(model: Model, ids: list[int], branch: tuple[int, ...]) -> None:
    """Our text must follow the branch up to its last token, and almost choose that one."""
    *common, last = branch
    session = fixed_session(model.device, 0)
    session.prime(ids, len(branch))
    for token in common:
        assert session.pending == token
        session.step("plain")
    logits = model.device.value("plain_step", "target.logits")[0]
    assert last in np.argsort(logits)[-2:]
    assert margin(logits) < BRANCH_MARGIN

"""Sessions that share a trimmed head: what one learns, all draft with, and no text changes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from memra_runtime.artifact import HEAD_IDS, HEAD_ROWS
from memra_runtime.model import Model, another_model, load_model
from memra_runtime.session import Policy, Session
from tiny_pair import TINY_DRAFT, TINY_TARGET

TOKENS = 80
PROMPTS = ("The :mod:`json` module provides", "def read(path):\n    with open(path) as file:")


@pytest.fixture
def model(trimmed_artifact: Path) -> Model:
    return load_model(trimmed_artifact, TINY_TARGET, TINY_DRAFT)


@pytest.fixture(scope="module")
def plain(tiny_model: Model) -> list[tuple[list[int], list[int]]]:
    """Prompts and what plain decoding says after them."""
    found = []
    for prompt in PROMPTS:
        ids = tiny_model.tokenizer.encode(prompt)
        session = Session(tiny_model.device, Policy.of(tiny_model.manifest).fixed(0))
        session.prime(ids, TOKENS)
        found.append((ids, list(session.generate(TOKENS))))
    return found


def learning(model: Model) -> Session:
    assert model.trim is not None
    return Session(model.device, trim=model.trim)


def same_maps(*models: Model) -> bool:
    """Whether every device has the head's own map."""
    trim = models[0].trim
    assert trim is not None
    return all(
        np.array_equal(m.device.plane(HEAD_IDS), trim.ids)
        and m.device.plane(HEAD_ROWS).tolist() == [trim.used]
        for m in models
    )


def test_sessions_in_turns_learn_for_each_other(
    model: Model, plain: list[tuple[list[int], list[int]]]
) -> None:
    models = [model, another_model(model)]
    sessions = [learning(m) for m in models]
    for session, (ids, _) in zip(sessions, plain, strict=True):
        session.prime(ids, TOKENS)
    texts: list[list[int]] = [[], []]
    for _ in range(TOKENS // 8):
        for text, session in zip(texts, sessions, strict=True):
            text += [t for tokens in session.burst(8) for t in tokens]
    for text, (_, wanted) in zip(texts, plain, strict=True):
        assert text[:TOKENS] == wanted[: len(text)][:TOKENS]
    assert same_maps(*models)
    assert model.trim is not None
    known = set(model.trim.ids[: model.trim.used].tolist())
    assert {*plain[0][0], *plain[1][0]} <= known


def test_a_device_that_is_gone_is_forgotten(model: Model) -> None:
    twin = another_model(model)
    assert model.trim is not None
    assert len(model.trim._devices) == 2
    del twin
    model.trim.learn_choices([5, 6, 7])
    assert len(model.trim._devices) == 1
    assert same_maps(model, another_model(model)), "a new device starts with all that is known"


def test_a_restored_text_learns_what_a_cold_start_learns(
    model: Model, trimmed_artifact: Path, plain: list[tuple[list[int], list[int]]]
) -> None:
    """And its snapshot fits weights whose head has learned other tokens."""
    ids, wanted = plain[0]
    first = Session(model.device)
    first.prime(ids, TOKENS)
    snapshot = first.snapshot()
    other = load_model(trimmed_artifact, TINY_TARGET, TINY_DRAFT)
    assert other.trim is not None
    other.trim.learn_choices(range(40, 60))
    session = learning(other)
    session.restore(snapshot, max_new=TOKENS)
    assert set(ids) <= set(other.trim.ids[: other.trim.used].tolist())
    assert list(session.generate(TOKENS)) == wanted
    suffix = wanted[:10]
    session.restore(snapshot, suffix, TOKENS)
    assert list(session.generate(TOKENS - 10)) == wanted[10:]


def test_a_burst_that_is_left_early_has_taught_its_tokens(
    model: Model, plain: list[tuple[list[int], list[int]]]
) -> None:
    ids, wanted = plain[0]
    session = learning(model)
    session.prime(ids, TOKENS)
    with closing(session.burst(TOKENS)) as burst:
        next(burst)
    assert model.trim is not None
    known = set(model.trim.ids[: model.trim.used].tolist())
    assert set(session.committed) <= known
    assert [*session.committed[len(ids) :], *session.generate(20)][:20] == wanted[:20]

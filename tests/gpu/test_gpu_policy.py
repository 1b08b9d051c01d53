"""A drafter that is always wrong costs little: the depth falls as far as the policy lets it."""

from __future__ import annotations

import pytest
from pair_bundle import MAIN, Loaded, on_devices
from policy_bench import depths_of, force_wrong, plain_text, run_text

from memra_runtime.session import Session

TOKENS = 128

devices = pytest.mark.parametrize("pair", on_devices(MAIN), indirect=True)


def primed(pair: Loaded) -> tuple[Session, list[int], list[int]]:
    """A session of the spec's policy whose drafts are all wrong, its prompt, the plain text."""
    ids = pair.prompts()[0]
    text = plain_text(pair.session(0), ids, TOKENS)
    session = pair.session()
    assert session.policy.adaptive
    assert session.policy.initial > 1, "or nothing could fall"
    session.prime(ids, TOKENS)
    force_wrong(session, len(ids), text)
    return session, ids, text


def steps(session: Session, tokens: int) -> tuple[list[int], list[int]]:
    """Single rounds until so many tokens are committed; returns those and each round's depth."""
    found: list[int] = []
    depths: list[int] = []
    while len(found) < tokens:
        depths.append(session.device.get("depth"))
        found += session.step()
    return found, depths


@devices
def test_depth_falls_when_every_draft_is_wrong(pair: Loaded) -> None:
    session, _, text = primed(pair)
    found, depths = steps(session, TOKENS)
    assert found == text, "the text must be that of plain decoding"
    assert depths[0] == session.policy.initial
    assert set(depths[1:]) <= {0, 1}
    assert len(depths) == TOKENS, "a round of wrong drafts commits one token"


@devices
def test_depth_falls_in_bursts_as_well(pair: Loaded) -> None:
    session, ids, text = primed(pair)
    assert run_text(session, ids, TOKENS, "round") == text
    assert session.device.get("rounds") == TOKENS
    falls = depths_of(session)
    assert falls.pop(session.policy.initial) == 1
    assert set(falls) <= {0, 1}


@devices
def test_depth_recovers_when_drafts_are_right_again(pair: Loaded) -> None:
    """Wrong up to the middle of the text only: depth 1 is no dead end."""
    session, ids, text = primed(pair)
    half = len(ids) + TOKENS // 2
    session.device.plane("forced")[half : len(ids) + TOKENS] = text[TOKENS // 2 : TOKENS]
    found, depths = steps(session, TOKENS - 2 * session.policy.cap)
    assert found == text[: len(found)]
    assert max(depths[TOKENS // 2 :]) == session.policy.cap

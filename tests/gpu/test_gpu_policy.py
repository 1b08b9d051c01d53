"""A drafter that is always wrong costs little: the depth falls as far as the policy lets it."""

from __future__ import annotations

import pytest
from pair_bundle import MAIN, Loaded, on_devices
from policy_bench import force_wrong, plain_text, run_rounds

TOKENS = 128


@pytest.mark.parametrize("pair", on_devices(MAIN), indirect=True)
def test_depth_falls_when_every_draft_is_wrong(pair: Loaded) -> None:
    ids = pair.prompts()[0]
    text, _ = plain_text(pair.session(0), ids, TOKENS)
    session = pair.session()
    assert session.policy.adaptive
    assert session.policy.initial > 1, "or nothing could fall"
    session.prime(ids, TOKENS)
    force_wrong(session, len(ids), text)

    run = run_rounds(session, TOKENS)

    assert run.tokens == text[: len(run.tokens)], "the text must be that of plain decoding"
    assert run.depths[0] == session.policy.initial
    assert set(run.depths[1:]) <= {0, 1}
    assert run.accepted == 0
    assert len(run.tokens) == len(run.depths), "a round of wrong drafts commits one token"


@pytest.mark.parametrize("pair", on_devices(MAIN), indirect=True)
def test_depth_recovers_when_drafts_are_right_again(pair: Loaded) -> None:
    """The same run, wrong up to the middle of the text only: depth 1 is no dead end."""
    ids = pair.prompts()[0]
    text, _ = plain_text(pair.session(0), ids, TOKENS)
    session = pair.session()
    session.prime(ids, TOKENS)
    force_wrong(session, len(ids), text)
    half = len(ids) + TOKENS // 2
    session.device.plane("forced")[half : len(ids) + TOKENS] = text[TOKENS // 2 : TOKENS]

    run = run_rounds(session, TOKENS - 2 * session.policy.cap)

    assert run.tokens == text[: len(run.tokens)]
    assert max(run.depths[TOKENS // 2 :]) == session.policy.cap

"""Depth policies: a drafter that is always wrong costs little, and doubt ends its chains.

The gates on confidence are armed in one variant, which runs as graphs, under an older driver's
graphs and kernel by kernel: all decide the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pair_bundle import GATED, MAIN, Loaded, on_devices, on_gpu
from policy_bench import depths_of, force_wrong, plain_text, run_text
from random_rounds import random_policy

from memra_runtime.artifact import slot
from memra_runtime.device import calls
from memra_runtime.model import load_opened, open_model
from memra_runtime.session import Policy, Session

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


@devices
def test_wrong_drafts_stop_where_the_floor_is_0(pair: Loaded) -> None:
    session, ids, text = primed(pair)
    session.policy = replace(session.policy, floor_least=0, floor_patience=2, floor_probe=10)
    session.prime(ids, TOKENS)
    force_wrong(session, len(ids), text)
    assert run_text(session, ids, TOKENS, "round")[:TOKENS] == text
    depths = depths_of(session)
    assert depths[0] > 0.8 * TOKENS
    assert depths[1] >= TOKENS // 12, "a draft is tried again now and then"


# -- gates on confidence ---------------------------------------------------------------------------

#: Counters that tell how a round was run, not what it did.
OWN = ("step", "more", "burst_end", "rows")


def forms(pair: Loaded) -> dict[str, Any]:
    """The device as it is, as it is under a driver without conditional nodes, and eagerly."""
    found = {"graph": pair.device}
    for name, graphs in (("old driver", True), ("eager", False)):
        opened = open_model(pair.variant.artifact, pair.variant.pair.target,
                            pair.variant.pair.draft)  # fmt: skip
        found[name] = load_opened(opened, graphs=graphs).device
        found[name].loops = False
    return found


@pytest.mark.parametrize("pair", on_gpu([GATED]), indirect=True)
def test_every_form_cuts_the_same_chains(pair: Loaded) -> None:
    assert pair.device.loops, "this driver has no conditional nodes: nothing is tested"
    devices = forms(pair)
    rng = np.random.default_rng(12)
    cuts = 0
    for index, ids in enumerate(pair.prompts()[:4] * 3):
        text = plain_text(pair.session(0), ids, TOKENS)
        policy = random_policy(pair.device.manifest, rng)
        right = np.where(rng.random(TOKENS) < 0.7, text, -1)  # the others are the drafter's
        ends: dict[str, tuple[list[int], np.ndarray]] = {}
        for name, device in devices.items():
            session = Session(device, policy)
            session.prime(ids, TOKENS)
            forced = device.plane("forced").copy()
            if index % 2:
                forced[len(ids) : len(ids) + TOKENS] = right
            device.plane("forced")[...] = forced
            if name == "graph" and index % 3 == 0:
                found = run_text(session, ids, TOKENS, "round")
            else:
                found = []
                while len(found) < TOKENS:
                    found += session.step()
            assert found[:TOKENS] == text, f"{name}: {policy}"
            state = np.asarray(device.state).copy()
            ends[name] = found, np.delete(state, [slot(counter) for counter in OWN])
            cuts += device.get("cuts")
        for name, (found, state) in ends.items():
            assert found == ends["graph"][0], f"{name}: {policy}"
            assert (state == ends["graph"][1]).all(), f"{name}: {policy}"
    assert cuts > 100


@pytest.mark.parametrize("pair", on_gpu([GATED]), indirect=True)
def test_cut_round_is_one_launch_and_one_read(pair: Loaded) -> None:
    session = pair.session()
    session.prime(pair.prompts()[0], TOKENS)
    session.step()
    for _ in range(8):
        before = session.device.launches, session.device.reads
        session.step()
        assert (session.device.launches - before[0], session.device.reads - before[1]) == (1, 1)


@pytest.mark.parametrize("pair", on_gpu([GATED]), indirect=True)
def test_chain_stops_at_the_doubtful_draft(pair: Loaded) -> None:
    """Program by program, where each confidence can be seen; `step` counts the drafts made."""
    policy = replace(Policy.of(pair.device.manifest), cut_below=0.5, cut_always=True)
    device, doubts = pair.device, 0
    for ids in pair.prompts()[:4]:
        session = Session(device, replace(policy, adaptive=False))
        session.prime(ids, TOKENS)
        for _ in range(12):
            depth, sure = device.get("depth"), []
            for program in calls(device, "round"):
                device.launch(f"run_{program}")
                if program == "draft":
                    sure.append(float(device.value("draft", "drafter.confidence")[0]))
            assert all(0 < s <= 1 for s in sure)
            doubtful = next((j for j, s in enumerate(sure) if s < 0.5), depth)
            assert device.get("drafted") == min(depth, doubtful + 1) == len(sure)
            doubts += doubtful + 1 < depth
    assert doubts > 5

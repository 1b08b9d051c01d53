"""Sessions on a GPU: snapshots, restored prefixes, cut texts, demotion, texts in turns, files.

Rows of a prompt come from other kernels than those of a round, so what is compared is bits: a text
that was given in parts, or taken up again, must not show it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_bundle import DEPTH, MAIN, Loaded, on_devices
from random_rounds import prompts_around
from worst_errors import remark

from memra_runtime.check.rows import CacheReader
from memra_runtime.errors import MemraError
from memra_runtime.model import another_model
from memra_runtime.session import Session, read_session, save_session
from memra_runtime.session.text import least_kept, round_rows

#: Around a chunk of the prompt, the window of 128 and its ring on either target.
LENGTHS = (2, 3, 8, 9, 20, 63, 64, 65, 66, 127, 128, 129, 136, 137, 191, 192, 193, 260)

devices = pytest.mark.parametrize("pair", on_devices(MAIN), indirect=True)


def texts(pair: Loaded) -> list[list[int]]:
    golden = pair.prompts()
    text = [token for i, ids in enumerate(golden) for token in (*ids, *pair.truth[f"tokens{i}"])]
    return prompts_around(LENGTHS, [int(t) for t in text], seed=5)


def left(session: Session) -> dict[Any, Any]:
    """Every visible cache row, the carried row, the device block and the text."""
    device = session.device
    return {
        **CacheReader(device).all(session.position),
        "hidden": np.array(device.plane("hidden")).tobytes(),
        "state": np.array(device.state).tolist(),
        "text": list(session.committed),
    }


def plain_after(pair: Loaded, ids: list[int], count: int) -> list[int]:
    session = pair.session(0)
    session.prime(ids, count)
    return list(session.generate(count, sequence="plain"))


@devices
def test_a_prompt_in_parts_leaves_what_it_leaves_in_one(pair: Loaded) -> None:
    """Restored = cold, bit for bit, though rows of prompts and of steps differ in class."""
    session, parts = pair.session(), 0
    for ids in texts(pair):
        session.prime(ids)
        cold = left(session)
        for cut in {1, len(ids) // 2, len(ids) - 1}:
            session.prime(ids[:cut])
            snapshot = session.snapshot()
            session.prime([7] * 300)  # another text over the same rows
            session.restore(snapshot, ids[cut:])
            assert left(session) == cold, (len(ids), cut)
            parts += 1
    remark(f"{pair.name}: {parts} prompts in two parts equal one")


@devices
def test_a_snapshot_goes_on_as_if_nothing_had_been(pair: Loaded) -> None:
    for ids in texts(pair)[::3]:
        session = pair.session()
        session.prime(ids)
        list(session.burst(9))
        snapshot = session.snapshot()
        ends = []
        for again in (False, True):
            if again:
                session.prime([7] * 300)
                session.restore(snapshot)
            for _ in range(6):
                session.step()
            ends.append(left(session))
        # a burst leaves its own two counters, which a single round does not touch
        assert ends[0] == ends[1]


@devices
def test_a_text_is_cut_back_as_far_as_its_rings_reach(pair: Loaded) -> None:
    """Every length that is allowed leaves what a cold session leaves."""
    batch, manifest = round_rows(pair.model.manifest), pair.model.manifest
    session = pair.session(DEPTH)
    for ids in [t for t in texts(pair) if len(t) > 120]:
        session.prime(ids)
        whole = session.snapshot()
        least = least_kept(manifest, session.text.written)
        for keep in sorted({max(1, least), len(ids) - batch // 2, len(ids) - 1}):
            session.restore(whole, [5, 6], keep=keep)
            found = left(session)
            session.prime([*ids[:keep], 5, 6])
            assert left(session) == found, (len(ids), keep)
        if least > 1:
            with pytest.raises(MemraError, match="a windowed cache holds"):
                session.restore(whole, [5, 6], keep=least - 1)


@devices
def test_bursts_of_any_width_are_one_text(pair: Loaded) -> None:
    for ids in texts(pair)[::4]:
        want = plain_after(pair, ids, 2 * 64 + DEPTH + 1)
        for width in (1, 2, 3, DEPTH + 1, 20, 64):
            session = pair.session()
            session.prime(ids)
            found: list[int] = []
            while len(found) < 64:
                found += [token for tokens in session.burst(width) for token in tokens]
                assert session.committed == ids + found
            assert found == want[: len(found)], width


@devices
def test_plain_decoding_takes_over_and_gives_back(pair: Loaded) -> None:
    for ids in texts(pair)[::4]:
        want = plain_after(pair, ids, 60 + 3 * DEPTH)
        session = pair.session(DEPTH)
        session.prime(ids)
        found = [token for tokens in session.burst(20) for token in tokens]
        drafted = pair.device.get("total_drafted")
        session.demote()
        found += [token for tokens in session.burst(20) for token in tokens]
        assert pair.device.get("total_drafted") == drafted
        session.promote()
        found += [token for tokens in session.burst(20) for token in tokens]
        assert pair.device.get("total_drafted") > drafted
        assert found == want[: len(found)]


@devices
def test_a_turn_behind_a_text_does_not_see_where_it_was_kept(pair: Loaded, tmp_path: Path) -> None:
    """Prompt, answer, another prompt, answer: straight on, restored, and read from a file."""
    first, second = texts(pair)[5], texts(pair)[3]
    for stop in (1, 2, 20):
        session = pair.session()
        session.prime(first)
        list(session.generate(stop))
        snapshot = session.snapshot()
        save_session(tmp_path / "s", snapshot, pair.model.manifest)
        session.extend(second)
        want = left(session)
        for saved in (snapshot, read_session(tmp_path / "s", pair.model.manifest)):
            session.prime([7] * 300)
            session.restore(saved, second)
            assert left(session) == want


@devices
def test_two_texts_take_turns_on_one_model(pair: Loaded) -> None:
    prompts = [texts(pair)[4], texts(pair)[-1]]
    alone = []
    for ids in prompts:
        session = pair.session()
        session.prime(ids)
        for _ in range(12):
            session.step()
        alone.append(left(session))
    other = another_model(pair.model)
    sessions = [pair.session(), Session(other.device)]
    for session, ids in zip(sessions, prompts, strict=True):
        session.prime(ids)
    for _ in range(12):
        for session in sessions:
            session.step()
    for session, end in zip(sessions, alone, strict=True):
        assert left(session) == end


@devices
def test_what_a_snapshot_costs(pair: Loaded) -> None:
    """No limit: the numbers go into the report of the run."""
    session = pair.session()
    session.prime(texts(pair)[-1])
    snapshot = session.snapshot()
    spent = []
    for act in (session.snapshot, lambda: session.restore(snapshot)):
        start = time.perf_counter()
        for _ in range(10):
            act()
        spent.append(1e2 * (time.perf_counter() - start))
    remark(f"{pair.name}: snapshot {spent[0]:.2f} ms, restore {spent[1]:.2f} ms, "
           f"{len(session.committed)} tokens")  # fmt: skip
    assert session.position == len(session.committed)

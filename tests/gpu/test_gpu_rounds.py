"""Ten thousand rounds with random depths and random forced acceptance equal plain decoding.

The same comparison runs on the CPU target, on fewer rounds, and catches what it should.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pair_bundle import GATED, MAIN, Loaded, on_devices
from random_rounds import RandomRounds, prompts_around
from worst_errors import remark

from memra_runtime.check.report import Parted
from memra_runtime.errors import MemraError

ROUNDS = {"cpu": 200, "cuda": 10_000}
#: Around chunks of the prompt, the window of 128 and its ring, beside the golden prompts.
LENGTHS = (1, 2, 63, 64, 65, 66, 119, 127, 128, 129, 135, 136, 137, 190, 192, 193, 260, 320)

devices = pytest.mark.parametrize("pair", on_devices(MAIN), indirect=True)


def rounds_of(pair: Loaded, seed: int) -> RandomRounds:
    golden = pair.prompts()
    text = [token for i, ids in enumerate(golden) for token in (*ids, *pair.truth[f"tokens{i}"])]
    some = prompts_around(LENGTHS, [int(t) for t in text], seed)
    return RandomRounds(pair.device, [*golden, *some], seed)


@pytest.mark.parametrize("pair", on_devices([*MAIN, GATED]), indirect=True)
def test_random_rounds_equal_plain_decoding(pair: Loaded) -> None:
    rounds = rounds_of(pair, seed=17)
    try:
        rounds.run(ROUNDS[pair.target])
    except Parted as parted:
        pytest.fail("\n".join(parted.difference.lines()))
    tally = rounds.tally
    remark(f"{pair.name}: {tally}")
    assert tally.rounds >= ROUNDS[pair.target]
    assert tally.in_bursts > 0
    assert 0.1 < tally.accepted / tally.drafted < 0.8, "both outcomes must be common"


@devices
def test_rows_of_rejected_drafts_are_noticed(pair: Loaded) -> None:
    """The artifact's own broken round, which keeps what was rejected."""
    with pytest.raises((Parted, MemraError)):
        rounds_of(pair, seed=18).run(100, "round_fault_skip_rollback")


def flip_cache(rounds: RandomRounds) -> None:
    """One bit of the oldest row that the first cache must hold."""
    plane = rounds.cache.planes[0]
    at = rounds.cache.visible(plane, rounds.session.position)[0] % plane.shape[1]
    data = np.array(rounds.device.plane(plane.id))
    data.view(np.uint8)[0, at, 0] ^= 1
    rounds.device.plane(plane.id)[...] = data


def flip_hidden(rounds: RandomRounds) -> None:
    hidden = np.array(rounds.device.plane("hidden"))
    hidden.view(np.uint8)[0] ^= 1
    rounds.device.plane("hidden")[...] = hidden


def skew_counter(rounds: RandomRounds) -> None:
    rounds.device.put({"ring_count": rounds.device.get("ring_count") + 1})


@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip_cache, "cache row"), (flip_hidden, "hidden row"), (skew_counter, "counters")],
)
@devices
def test_a_flipped_bit_is_noticed(
    pair: Loaded, damage: Callable[[RandomRounds], None], message: str
) -> None:
    rounds = rounds_of(pair, seed=19)
    found = rounds.text(0, 40)
    rounds.compare(found, rounds.plain_end(0, len(found.tokens)), "untouched")
    damage(rounds)
    with pytest.raises(Parted, match=message):
        rounds.compare(found, rounds.end(), "damaged")

"""Check `launches`: however rounds are launched, they leave the same bits.

One launch a round, one a program, or one for a whole burst.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memra_runtime.check.prompts import Prompt
from memra_runtime.check.report import NotApplicable, Tally, differ
from memra_runtime.check.rig import Rig
from memra_runtime.check.rows import digest
from memra_runtime.session import Policy, Session

_ROUNDS = 12


def check_launches(rig: Rig, tally: Tally) -> None:
    """Every plane after every round, and after a burst; the caches, which are large, at the end."""
    prompts = [
        min(rig.prompts, key=lambda p: len(p.ids)),
        max(rig.prompts, key=lambda p: len(p.ids)),
    ]
    runs = 0
    for prompt in {p.ids: p for p in prompts}.values():
        rounds = min(_ROUNDS, (rig.capacity - len(prompt.ids)) // (rig.cap + 1))
        settings = [(f"depth {rig.cap}", rig.fixed(rig.cap)), ("the spec's policy", rig.policy)]
        for name, policy in settings:
            for sequence in ("round", "plain"):
                whole = planes_after(rig, prompt, policy, sequence, rounds, timed=False)
                steps = planes_after(rig, prompt, policy, sequence, rounds, timed=True)
                _compare(whole, steps, {"prompt": prompt.name, "setting": f"{sequence}, {name}"})
                tally.add("planes compared", len(whole))
                runs += rounds
                count, burst = planes_after_burst(rig, prompt, policy, sequence, rounds)
                steps = planes_after(rig, prompt, policy, sequence, count, timed=False)
                setting = f"bursts of {sequence}, {name}"
                _compare(burst, steps, {"prompt": prompt.name, "setting": setting})
                tally.add("planes compared", len(burst))
                runs += count
    if not runs:
        raise NotApplicable("the context is too short for a round of the largest depth")
    tally.add("rounds", runs)


def planes_after(
    rig: Rig, prompt: Prompt, policy: Policy, sequence: str, rounds: int, *, timed: bool
) -> dict[tuple[int, str], bytes]:
    """Fingerprints of the planes, by round and plane; all start from empty caches."""
    session = _fresh(rig, prompt, policy)
    small = [p.id for p in rig.manifest.planes if p.rollback != "truncate"]
    found: dict[tuple[int, str], bytes] = {}
    for i in range(rounds):
        session.step(sequence, timed=timed)
        found |= {(i, name): _bits(rig, name) for name in small}
    return found | {(rounds - 1, p.id): _bits(rig, p.id) for p in rig.cache.planes}


def planes_after_burst(
    rig: Rig, prompt: Prompt, policy: Policy, sequence: str, tokens: int
) -> tuple[int, dict[tuple[int, str], bytes]]:
    """Rounds of bursts that commit `tokens`, and the fingerprints of all planes after them."""
    session = _fresh(rig, prompt, policy)
    while (left := len(prompt.ids) + tokens - len(session.committed)) > 0:
        for _ in session.burst(left, sequence):
            pass
    rounds = rig.device.get("rounds")
    rig.device.put({"burst_end": 0, "more": 0})  # no counters of a single round
    return rounds, {(rounds - 1, p.id): _bits(rig, p.id) for p in rig.manifest.planes}


def _fresh(rig: Rig, prompt: Prompt, policy: Policy) -> Session:
    """A primed session that starts from empty planes."""
    rig.cache.clear()
    rig.device.plane("ring")[:] = 0
    session = rig.session(policy)
    session.prime(prompt.ids)
    return session


def _bits(rig: Rig, plane: str) -> bytes:
    return digest(np.asarray(rig.device.plane(plane)))


def _compare(
    whole: dict[tuple[int, str], bytes],
    steps: dict[tuple[int, str], bytes],
    place: dict[str, Any],
) -> None:
    for (i, name), bits in whole.items():
        if steps[i, name] != bits:
            differ(f"plane `{name}` after round {i + 1}", "equal bits however it is launched",
                   "other bits", first_row=f"plane `{name}`", **place)  # fmt: skip

"""Never slower than plain: 200 tokens of a large spec, plainly and with a drafter that is always
wrong, under the policy that the spec declares, the same without its floor, and the same resting.

usage: python tests/gpu/policy_bench.py ARTIFACT [TOKENS]

The weights are made up. Prints both times, their ratio and a histogram of depths.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memra_runtime.artifact import STATE_ATTEMPTED
from memra_runtime.session import Policy, Session

#: What a run with the worst drafter may take, over a plain run.
ALLOWED = 1.10


def run_text(session: Session, ids: Sequence[int], tokens: int, sequence: str) -> list[int]:
    """Bursts of a primed session until it has committed so many tokens; returns those."""
    while (left := len(ids) + tokens - len(session.committed)) > 0:
        for _ in session.burst(left, sequence):
            pass
    return session.committed[len(ids) :]


def plain_text(session: Session, ids: Sequence[int], tokens: int) -> list[int]:
    """Tokens that plain decoding commits after a prompt."""
    session.prime(ids, tokens)
    return run_text(session, ids, tokens, "plain")[:tokens]


def depths_of(session: Session) -> dict[int, int]:
    """Rounds by depth since the session was primed, from the device's own table."""
    state = np.asarray(session.device.state)
    cap = session.policy.cap
    at_least = [session.device.get("rounds"), *state[STATE_ATTEMPTED : STATE_ATTEMPTED + cap], 0]
    exactly = {d: int(at_least[d]) - int(at_least[d + 1]) for d in range(cap + 1)}
    return {depth: count for depth, count in exactly.items() if count}


def force_wrong(session: Session, start: int, text: Sequence[int]) -> None:
    """Force a draft at every position of the context; those along `text` differ from it."""
    plane = session.device.plane("forced")
    forced = np.zeros(plane.shape, np.int32)
    forced[start : start + len(text)] = (np.array(text) + 1) % session.vocab
    plane[:] = forced


def report(session: Session, name: str, ids: Sequence[int], text: list[int], plain: float) -> None:
    """Run the text in rounds with wrong drafts, twice (the first captures graphs), and print."""
    for _ in range(2):
        session.prime(ids, len(text))
        force_wrong(session, len(ids), text)
        start = time.perf_counter()
        found = run_text(session, ids, len(text), "round")
        seconds = time.perf_counter() - start
    ratio, same = seconds / plain, "equal" if found[: len(text)] == text else "DIFFERS"
    depths = ", ".join(f"{depth}: {count}" for depth, count in depths_of(session).items())
    accepted = session.device.get("total_accepted")
    print(f"{name}: {seconds * 1e3:.1f} ms, {ratio:.3f} of plain "
          f"({'within' if ratio <= ALLOWED else 'ABOVE'} {ALLOWED:.2f}), {accepted} accepted, "
          f"text {same}; rounds by depth: {depths}")  # fmt: skip


def main(artifact: Path, tokens: int) -> None:
    """Load with made-up weights, run and print."""
    from memra_runtime.bench.synthetic import synthetic_device

    device = synthetic_device(artifact)
    policy, ids = Policy.of(device.manifest), [2, *range(100, 163)]
    session = Session(device, policy.fixed(0))
    for _ in range(2):
        session.prime(ids, tokens)
        start = time.perf_counter()
        text = run_text(session, ids, tokens, "plain")[:tokens]
        plain = time.perf_counter() - start
    print(f"plain: {plain * 1e3:.1f} ms for {tokens} tokens, {plain / tokens * 1e3:.3f} ms each")
    bare = dataclasses.replace(policy, floor_short=0, floor_deep=0)
    rests = dataclasses.replace(policy, floor_least=0)
    ways = (("as declared", policy), ("without its floor", bare), ("with `least: 0`", rests))
    for name, each in ways:
        report(Session(device, each), name, ids, text, plain)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("tokens", type=int, nargs="?", default=200)
    main(**vars(parser.parse_args()))

"""Rounds of random depth and random forced acceptance, held to plain decoding; on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memra_runtime.artifact import STATE_ACCEPTED, STATE_ATTEMPTED, Manifest
from memra_runtime.check.report import differ
from memra_runtime.check.rows import CacheReader, first_unequal, same_bits
from memra_runtime.session import Policy, Session

#: Counters that rounds must leave as plain steps do; the others describe drafting.
SHARED_COUNTERS = ("position", "pending", "ring_count", "ended", "capacity")
#: Shares of right drafts, one of them a text.
RIGHT = (0.0, 0.3, 0.6, 0.8, 0.95, 1.0)
#: Share of drafts that nobody forces: the drafter makes them.
FREE = 0.1
#: Share of texts that run in bursts.
BURSTS = 0.3
#: Confidences below which drafts are doubtful.
THRESHOLDS = (0.0, 0.2, 0.5, 0.8, 1.0)
#: New tokens of a text.
TOKENS = (24, 160)


@dataclass(frozen=True)
class End:
    """All that a text leaves behind for its next token."""

    tokens: list[int]
    counters: dict[str, int]
    hidden: np.ndarray
    rows: dict[tuple[str, int], bytes]


@dataclass
class Tally:
    """What has been run."""

    texts: int = 0
    rounds: int = 0
    in_bursts: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cache_rows: int = 0

    def __str__(self) -> str:
        return (f"{self.rounds:,} rounds over {self.texts} texts ({self.in_bursts:,} of them in "
                f"bursts): {self.tokens:,} tokens, "
                f"{self.accepted:,} of {self.drafted:,} drafts accepted, {self.cache_rows:,} "
                "cache rows equal")  # fmt: skip


def prompts_around(lengths: Sequence[int], text: Sequence[int], seed: int) -> list[list[int]]:
    """A prompt of each length, a piece of a text."""
    rng = np.random.default_rng(seed)
    starts = [int(rng.integers(0, max(1, len(text) - n))) for n in lengths]
    return [[text[(at + i) % len(text)] for i in range(n)]
            for at, n in zip(starts, lengths, strict=True)]  # fmt: skip


def random_policy(manifest: Manifest, rng: np.random.Generator) -> Policy:
    """A policy whose depth follows acceptance and, where the artifact has gates, confidence."""
    cap = Policy.of(manifest).cap
    short, deep, initial = (int(n) for n in rng.integers(0, cap + 1, 3))
    boundary, patience, probe = int(rng.integers(0, 400)), *map(int, rng.integers(1, 6, 2))
    policy = Policy(cap, initial, True, short, deep, boundary, patience, int(rng.integers(2)),
                    probe)  # fmt: skip
    if "next_round" in manifest.gates:
        policy = replace(policy, late_below=float(rng.choice(THRESHOLDS)))
    if "in_round" in manifest.gates:
        always, drops, first = (bool(n) for n in rng.integers(0, 2, 3))
        policy = replace(policy, cut_below=float(rng.choice(THRESHOLDS)), cut_always=always,
                         cut_drops=drops, cut_first=first)  # fmt: skip
    return policy


class RandomRounds:
    """Texts on one device: each is run plainly and in rounds, and both must leave the same."""

    def __init__(self, device: Any, prompts: Sequence[Sequence[int]], seed: int) -> None:
        policy = Policy.of(device.manifest)
        self.device, self.prompts, self.cap = device, prompts, policy.cap
        self.rng = np.random.default_rng(seed)
        self.session = Session(device, policy.fixed(policy.cap))
        self.cache = CacheReader(device)
        self.tally = Tally()
        self._plain: dict[int, list[int]] = {}

    def run(self, rounds: int, sequence: str = "round") -> Tally:
        """Texts until there are so many rounds. Raises: Parted at the first difference."""
        while self.tally.rounds < rounds:
            index = self.tally.texts % len(self.prompts)
            tokens = int(self.rng.integers(*TOKENS))
            bursts = sequence == "round" and self.rng.random() < BURSTS
            end = self.bursts(index, tokens) if bursts else self.text(index, tokens, sequence)
            self.compare(end, self.plain_end(index, len(end.tokens)), f"text {self.tally.texts}")
            self.tally.texts += 1
        return self.tally

    def plain_tokens(self, index: int) -> list[int]:
        """The tokens that plain decoding says after a prompt, enough for drafts past any text."""
        if index not in self._plain:
            session, ids = self.session, self.prompts[index]
            session.prime(ids, TOKENS[1] + self.cap + 2)
            found = [session.pending]
            while len(found) < TOKENS[1] + self.cap + 2:
                session.step("plain")
                found.append(session.pending)
            self._plain[index] = found
        return self._plain[index]

    def plain_end(self, index: int, steps: int) -> End:
        """What so many plain steps leave."""
        self.session.prime(self.prompts[index], max(steps, 1))
        for _ in range(steps):
            self.session.step("plain")
        return self.end()

    def text(
        self, index: int, tokens: int, sequence: str = "round", depth: int | None = None
    ) -> End:
        """Rounds over a text; every one must do what its forced drafts say.

        With a `depth`, every round has it and the drafter makes all drafts.
        """
        ids, right = self.prompts[index], self.plain_tokens(index)
        session, device = self.session, self.device
        session.prime(ids, tokens)
        forced = self.force(len(ids), right, free=FREE if depth is None else 1)
        device.plane("forced")[: len(forced)] = forced
        last, attempted = len(ids) + tokens, np.zeros((2, self.cap), int)
        while (position := session.position) < last:
            k = int(self.rng.integers(0, self.cap + 1)) if depth is None else depth
            device.put({"depth": k})
            committed = session.step(sequence)
            following = right[position + 1 - len(ids) :][:k]
            drafts = np.asarray(device.plane("batch"))[1 : k + 1].tolist()
            self.check_round(position, forced, drafts, following, committed)
            accepted = len(committed) - 1
            attempted[0, :k] += 1
            attempted[1, :accepted] += 1
            self.tally.rounds += 1
            self.tally.drafted += k
            self.tally.accepted += accepted
        self.check_totals(attempted)
        self.tally.tokens += session.position - len(ids)
        return self.end()

    def bursts(self, index: int, tokens: int) -> End:
        """A text in bursts, whose depths a random policy of the device decides."""
        ids, right, rng = self.prompts[index], self.plain_tokens(index), self.rng
        session, device = self.session, self.device
        usual, session.policy = session.policy, random_policy(device.manifest, rng)
        session.prime(ids, tokens)
        session.policy = usual
        forced = self.force(len(ids), right, FREE)
        device.plane("forced")[: len(forced)] = forced
        while (left := len(ids) + tokens - session.position) > 0:
            for _ in session.burst(int(rng.integers(1, left + 1))):
                pass
        produced, rounds = session.position - len(ids), device.get("rounds")
        if rounds + device.get("total_accepted") != produced:
            differ("rounds and accepted drafts, added", produced, rounds, setting="bursts")
        self.tally.rounds += rounds
        self.tally.in_bursts += rounds
        self.tally.drafted += device.get("total_drafted")
        self.tally.accepted += device.get("total_accepted")
        self.tally.tokens += produced
        return self.end()

    def force(self, start: int, right: Sequence[int], free: float) -> np.ndarray:
        """The plane of forced drafts of a text that starts at `start`: one at each position.

        A random share of them is right; `free` is the share that is left to the drafter.
        """
        vocab = self.session.vocab
        share = float(self.rng.choice(RIGHT))
        tokens = np.array(right)
        wrong = (tokens + self.rng.integers(1, vocab, len(right))) % vocab
        chosen = np.where(self.rng.random(len(right)) < share, tokens, wrong)
        chosen[self.rng.random(len(right)) < free] = -1
        return np.concatenate([np.full(start, -1), chosen]).astype(np.int32)

    def check_round(
        self, position: int, forced: np.ndarray, drafts: list[int], following: list[int],
        committed: list[int],
    ) -> None:  # fmt: skip
        """Forced drafts were made, the right ones accepted and committed, and nothing else."""
        for i, draft in enumerate(drafts):
            wanted = int(forced[position + 1 + i])
            if wanted not in (-1, draft):
                differ("a forced draft", wanted, draft, position=position + 1 + i)
        accepted = next((i for i, (a, b) in enumerate(zip(drafts, following, strict=True))
                         if a != b), len(drafts))  # fmt: skip
        place = {"position": position}
        for counter, value in (("accepted", accepted), ("drafted", len(drafts)),
                               ("position", position + accepted + 1)):  # fmt: skip
            if self.device.get(counter) != value:
                differ(f"counter `{counter}`", value, self.device.get(counter), **place)
        ids = len(self.session.committed) - len(committed)
        if ids != position or committed[1:] != following[:accepted]:
            differ("committed tokens", following[:accepted], committed[1:], **place)

    def check_totals(self, attempted: np.ndarray) -> None:
        """The counters of a whole text; `attempted` and accepted drafts by place in the chain."""
        state = np.asarray(self.device.state)
        places = STATE_ATTEMPTED, STATE_ACCEPTED
        for name, at, want in zip(("drafted", "accepted"), places, attempted, strict=True):
            found = state[at : at + self.cap]
            if found.tolist() != want.tolist():
                differ(f"drafts {name} by place", want.tolist(), found.tolist())
            if self.device.get(f"total_{name}") != want.sum():
                differ(f"drafts {name}", want.sum(), self.device.get(f"total_{name}"))

    def end(self) -> End:
        """What is there now."""
        device, session = self.device, self.session
        return End(
            session.committed[session.stats.prompt_tokens :],
            {name: device.get(name) for name in SHARED_COUNTERS},
            np.array(device.plane("hidden")),
            self.cache.all(session.position),
        )

    def compare(self, found: End, plain: End, where: str) -> None:
        """Tokens, counters, the carried row and every cache row. Raises: Parted."""
        place = {"setting": where}
        if found.tokens != plain.tokens:
            at = next(i for i, (a, b) in enumerate(zip(found.tokens, plain.tokens, strict=False))
                      if a != b)  # fmt: skip
            differ("the text", plain.tokens[at], found.tokens[at], position=at, **place)
        if found.counters != plain.counters:
            differ("counters at the end", plain.counters, found.counters, **place)
        if not same_bits(found.hidden, plain.hidden):
            differ("the carried hidden row", "equal bits", "other bits", **place)
        bad = first_unequal(plain.rows, found.rows)
        if bad is not None or found.rows.keys() != plain.rows.keys():
            what = f"cache row {bad}" if bad else "the set of cache rows"
            differ(what, "equal bits", "other bits", **place)
        self.tally.cache_rows += len(found.rows)

"""A session: one text being continued, round by round.

The device owns every counter of a round. The host primes a session, launches rounds, drains the
ring, and cuts what a caller sees: at the first end of sequence or after `max_new` tokens. A round
always completes; rows past the cut are committed but not returned. A burst is many rounds in one
launch, where the device can repeat them itself.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memra_runtime.artifact import (
    BATCH_ROWS,
    MAX_DEPTH,
    MAX_EOS,
    RING_TOKENS,
    STATE_ACCEPTED,
    STATE_ATTEMPTED,
    Manifest,
)
from memra_runtime.device import Device
from memra_runtime.errors import fail
from memra_runtime.trim import HeadTrim

#: Programs of a round by the phase they are timed under.
PHASES = {"begin": "draft", "draft": "draft", "verify": "verify"}
#: Seconds between two looks at a burst that has nothing new.
POLL_S = 0.0002


@dataclass(frozen=True)
class Policy:
    """How deep a session drafts. `cap` 0 is plain decoding through the same rounds."""

    cap: int
    initial: int
    adaptive: bool
    floor_short: int
    floor_deep: int
    floor_boundary: int
    floor_patience: int = 1

    @staticmethod
    def of(manifest: Manifest) -> Policy:
        """The policy that the artifact's spec declares."""
        depth: Mapping[str, Any] = manifest.spec["round"]["depth"]
        floor = depth["floor"]
        return Policy(
            depth["max"], depth["initial"], depth["policy"] == "accepted_plus_one",
            floor["short"], floor["deep"], floor["boundary"], floor["patience"],
        )  # fmt: skip

    def fixed(self, depth: int) -> Policy:
        """Always `depth` drafts; more than the artifact was compiled for is refused."""
        if not 0 <= depth <= self.cap:
            fail(
                "depth",
                f"depth {depth} is not between 0 and {self.cap}, the depth the artifact was "
                "compiled for",
                "--depth",
                hints=("set `round.depth.max` in the spec and compile again",),
            )
        return Policy(depth, depth, False, 0, 0, 0)


@dataclass
class Stats:
    """What happened since the session was primed. Acceptance = accepted / drafted."""

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    attempted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    finish: str = ""

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


def check_request(manifest: Manifest, ids: Sequence[int], max_new: int) -> None:
    """Refuse a request that a session could not serve; needs no loaded model.

    Raises: MemraError for an empty prompt, ids outside the vocabulary, or a prompt that with
    `max_new` tokens does not fit the context.
    """
    if not len(ids):
        fail("prompt", "the prompt is empty", hints=("give at least one token",))
    vocab = int(manifest.spec["target"]["vocab"])
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        fail("prompt", f"token id {wrong[0]} is outside the vocabulary of {vocab}")
    if max_new < 1:
        fail("max-new", f"cannot produce {max_new} tokens", "--max-new")
    capacity = int(manifest.spec["runtime"]["max_context"])
    rows = len(ids) + max_new - 1  # the last token needs no row
    if rows > capacity:
        room = capacity - len(ids) + 1
        shorter = f"ask for at most {room} new tokens" if room > 0 else (
            f"shorten the prompt by at least {1 - room} tokens")  # fmt: skip
        fail(
            "context-full",
            f"a prompt of {len(ids)} tokens and {max_new} new ones need {rows} rows, the context "
            f"holds {capacity}",
            hints=(shorter, "or raise `runtime.max_context` in the spec and compile again"),
        )


class Session:
    """One text on a loaded model. `prime` may be called again for the next request."""

    def __init__(
        self,
        device: Device,
        policy: Policy | None = None,
        eos: Iterable[int] = (),
        trim: HeadTrim | None = None,
    ) -> None:
        """`trim` is the drafter's head, if it is trimmed and shall learn from this session."""
        self.device = device
        self.trim = trim
        self.policy = policy or Policy.of(device.manifest)
        self.eos = frozenset(eos)
        if len(self.eos) > MAX_EOS:
            fail("eos", f"{len(self.eos)} end-of-sequence ids; at most {MAX_EOS} are possible")
        self.capacity = int(device.manifest.spec["runtime"]["max_context"])
        self.vocab = int(device.manifest.spec["target"]["vocab"])
        self.committed: list[int] = []
        self.stats = Stats()
        self._read = 0
        self._chunk = next(p.rows for p in device.manifest.programs if p.name == "prefill")

    @property
    def position(self) -> int:
        """Committed rows: the tokens of the prompt and of all finished rounds."""
        return self.device.get("position")

    @property
    def pending(self) -> int:
        """The next token: predicted, not yet committed."""
        return self.device.get("pending")

    def prime(self, ids: Sequence[int], max_new: int = 1) -> None:
        """Start a new text from a prompt.

        Raises: MemraError for an empty prompt, ids outside the vocabulary, or a prompt that with
        `max_new` tokens does not fit the context.
        """
        check_request(self.device.manifest, ids, max_new)
        start = time.perf_counter()
        device, policy = self.device, self.policy
        if self.trim is not None:
            self.trim.learn_prompt(ids)
        device.state[:] = 0
        device.plane("forced")[:] = -1
        eos = device.plane("eos")
        eos[:] = -1
        eos[: len(self.eos)] = sorted(self.eos)
        device.put(
            {
                "capacity": self.capacity,
                "depth_cap": policy.cap,
                "depth_initial": policy.initial,
                "adaptive": int(policy.adaptive),
                "floor_short": policy.floor_short,
                "floor_deep": policy.floor_deep,
                "floor_boundary": policy.floor_boundary,
                "floor_patience": policy.floor_patience,
            }
        )
        for at in range(0, len(ids) - 1, self._chunk):
            part = ids[at : min(at + self._chunk, len(ids) - 1)]
            device.plane("prompt")[: len(part)] = part
            device.put({"rows": len(part)})
            device.launch("prefill")
        device.put({"pending": ids[-1]})
        device.launch("prime")
        device.state[STATE_ATTEMPTED:] = 0
        device.put({"rounds": 0, "total_drafted": 0, "total_accepted": 0})
        self._read = device.get("ring_count")
        self.committed = list(ids)
        self.stats = Stats(prompt_tokens=len(ids), prompt_s=time.perf_counter() - start)
        self._check_sound()

    def _check_sound(self) -> None:
        if self.pending < 0:
            fail(
                "nan-logits",
                f"the logits at position {self.position} hold NaN or infinity",
                hints=("the weights are damaged or contradict the spec; see memra-check",),
            )

    def step(self, sequence: str = "round", *, timed: bool = False) -> list[int]:
        """Launch one round (or `plain`) and return the tokens it committed.

        `timed` launches the round program by program, to see where its time goes; the programs,
        and so every bit, are the same.
        """
        if timed:
            self._launch_timed(sequence)
        else:
            self.device.launch(sequence)
        self._check_sound()
        tokens = self._drain()
        self.committed += tokens
        self._learn(tokens)
        return tokens

    def _learn(self, tokens: Sequence[int]) -> None:
        """Let a trimmed head learn committed tokens and all choices of the last round.

        Choices behind a rejected draft count, too: they foretell what the next rounds will want.
        """
        if self.trim is not None and self.trim.room:
            choices = self.device.plane("choice")[: self.device.get("drafted") + 1]
            self.trim.learn_choices([*tokens, *choices.tolist()])

    def burst(self, tokens: int, sequence: str = "round") -> Iterator[list[int]]:
        """Run rounds (or `plain` steps) until `tokens` more are committed; yield them as they come.

        Ends on a round boundary, so there may be up to a round's tokens more; or earlier, at an end
        of sequence or of the context. At most `device.burst_tokens` are asked for in one launch.
        A caller that stops early waits for the launch to end; its tokens are committed.
        """
        device = self.device
        learning = tokens if self.trim is None else self.trim.launch_tokens
        wanted = max(1, min(tokens, learning, device.burst_tokens, RING_TOKENS - BATCH_ROWS))
        device.put({"burst_end": self._read + wanted})
        device.start(f"{sequence}_burst")
        done, before = False, len(self.committed)
        try:
            while not done:
                done = device.done()
                new = self._drain()
                self.committed += new
                if new:
                    yield new
                elif not done:
                    time.sleep(POLL_S)
        finally:
            while not done:
                time.sleep(POLL_S)
                done = device.done()
            self.committed += self._drain()
        self._check_sound()
        self._learn(self.committed[before:])

    def _tokens(self, wanted: int, sequence: str, timed: bool) -> Generator[int]:
        """Committed tokens of a burst or, where a round is timed by programs, of one round."""
        if timed or f"{sequence}_burst" not in self.device.manifest.sequences:
            yield from self.step(sequence, timed=timed)
            return
        for tokens in self.burst(wanted, sequence):
            yield from tokens

    def _launch_timed(self, sequence: str) -> None:
        device, spent = self.device, self.stats.phase_s
        for program, repeat in device.manifest.sequences[sequence]:
            start = time.perf_counter()
            for _ in range(device.get(repeat) if repeat else 1):
                device.launch(f"run_{program}")
            phase = PHASES.get(program, "rest")
            spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - start

    def _drain(self) -> list[int]:
        """Tokens written to the ring since the last drain."""
        count = self.device.get("ring_count")
        at = np.arange(self._read, count) % RING_TOKENS
        self._read = count
        return [int(t) for t in self.device.plane("ring")[at]]

    def generate(
        self, max_new: int, *, sequence: str = "round", timed: bool = False
    ) -> Iterator[int]:
        """Yield exactly `max_new` tokens, or fewer if the text ends or the context is full.

        An end-of-sequence token is yielded and is the last. `stats.finish` says why it stopped.
        """
        stats = self.stats
        start = time.perf_counter()

        def emit(token: int) -> int:
            stats.tokens += 1
            stats.seconds += time.perf_counter() - start
            return token

        try:
            while not stats.finish:
                token = self.pending
                last = stats.tokens == max_new - 1
                if token in self.eos or last or self.position >= self.capacity:
                    # the last token is known already: it needs no row and no round
                    stats.finish = "eos" if token in self.eos else "length" if last else "context"
                    yield emit(token)
                    break
                wanted = max_new - 1 - stats.tokens
                with closing(self._tokens(wanted, sequence, timed)) as tokens:
                    for token in tokens:
                        yield emit(token)
                        start = time.perf_counter()
                        if token in self.eos or stats.tokens == max_new:
                            stats.finish = "eos" if token in self.eos else "length"
                            break
        finally:  # also when the caller stops early
            self._count()

    def _count(self) -> None:
        device, stats = self.device, self.stats
        stats.rounds = device.get("rounds")
        stats.drafted = device.get("total_drafted")
        stats.accepted = device.get("total_accepted")
        depth = max(self.policy.cap, 1)
        for name, at in (("attempted_at", STATE_ATTEMPTED), ("accepted_at", STATE_ACCEPTED)):
            setattr(stats, name, [int(n) for n in device.state[at : at + min(depth, MAX_DEPTH)]])

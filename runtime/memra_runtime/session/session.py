"""A session: one text being continued, round by round.

The device owns every counter of a round. The host primes a session, launches rounds, drains the
ring, and cuts what a caller sees: at the first end of sequence or after `max_new` tokens. A round
always completes; rows past the cut are committed but not returned. A burst is many rounds in one
launch, where the device can repeat them itself.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing

import numpy as np

from memra_runtime.artifact import (
    BATCH_ROWS,
    MAX_DEPTH,
    MAX_EOS,
    RING_TOKENS,
    STATE_ACCEPTED,
    STATE_ATTEMPTED,
)
from memra_runtime.device import Device
from memra_runtime.errors import fail
from memra_runtime.session.policy import Policy
from memra_runtime.session.request import check_request
from memra_runtime.session.stats import Stats

#: Programs of a round by the phase they are timed under.
PHASES = {"begin": "draft", "draft": "draft", "verify": "verify"}
#: Seconds between two looks at a burst that has nothing new.
POLL_S = 0.0002


class Session:
    """One text on a loaded model. `prime` may be called again for the next request."""

    def __init__(
        self, device: Device, policy: Policy | None = None, eos: Iterable[int] = ()
    ) -> None:
        self.device = device
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
        device.state[:] = 0
        device.plane("forced")[:] = -1
        eos = device.plane("eos")
        eos[:] = -1
        eos[: len(self.eos)] = sorted(self.eos)
        device.put({"capacity": self.capacity, **policy.counters()})
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
        return tokens

    def burst(self, tokens: int, sequence: str = "round") -> Iterator[list[int]]:
        """Run rounds (or `plain` steps) until `tokens` more are committed; yield them as they come.

        Ends on a round boundary, so there may be up to a round's tokens more; or earlier, at an end
        of sequence or of the context. At most `device.burst_tokens` are asked for in one launch.
        A caller that stops early waits for the launch to end; its tokens are committed.
        """
        device = self.device
        wanted = max(1, min(tokens, device.burst_tokens, RING_TOKENS - BATCH_ROWS))
        device.put({"burst_end": self._read + wanted})
        device.start(f"{sequence}_burst")
        done = False
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

"""Rounds of one text: launching them, draining the ring, and handing out what was committed.

The device owns every counter of a round. The host launches rounds, drains the ring, and cuts what
a caller sees: at the first end of sequence or after `max_new` tokens. A round always completes;
rows past the cut are committed but not shown. A burst is many rounds in one launch, where the
device can repeat them itself.
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
from memra_runtime.device import Device, calls
from memra_runtime.errors import fail
from memra_runtime.session.policy import Policy
from memra_runtime.session.stats import Stats
from memra_runtime.session.text import Text
from memra_runtime.trim import HeadTrim

#: Programs of a round by the phase they are timed under.
PHASES = {"begin": "draft", "draft": "draft", "verify": "verify"}
#: Seconds between two looks at a burst that has nothing new.
POLL_S = 0.0002


class Rounds:
    """The text on a device, and what makes it longer."""

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
        #: What is launched: `round`, or `plain` once demoted.
        self.sequence = "round"
        self.text = Text()
        self.stats = Stats()
        self._number = 0
        self._open = False
        self._read = 0

    # -- what is known -----------------------------------------------------------------------------

    @property
    def committed(self) -> list[int]:
        """The tokens of the text that have a row; those of a finished burst are all there."""
        return self.text.tokens

    @property
    def position(self) -> int:
        """Committed rows: the tokens of the prompt and of all finished rounds."""
        return self.device.get("position")

    @property
    def pending(self) -> int:
        """The next token: predicted, not yet committed."""
        return self.device.get("pending")

    @property
    def ended(self) -> bool:
        """Whether the text has an end of sequence: shown, or as the next token to show."""
        text = self.text
        next_ends = text.shown == len(text.tokens) and self.pending in self.eos
        return next_ends or self._end_shown()

    def _end_shown(self) -> bool:
        at = self.text.shown - 1
        if at < self.text.produced:
            return False  # an end in a given text ends nothing
        tokens = self.text.tokens
        return (tokens[at] if at < len(tokens) else self.pending) in self.eos

    # -- whose turn it is --------------------------------------------------------------------------

    def _claim(self) -> None:
        self._closed()
        self.policy.check(self.device.manifest)
        self.device.texts += 1
        self._number = self.device.texts

    def _own(self) -> None:
        """Refuse to go on where another text lies by now."""
        self._closed()
        if not self._number or self._number != self.device.texts:
            held = "no text yet" if not self._number else "another session's text by now"
            fail(
                "session",
                f"the device holds {held}",
                hints=("begin with `prime` or `restore`; snapshots outlive other texts",
                       "or give each session a device of its own: "
                       "`memra_runtime.model.another_model`"),
            )  # fmt: skip

    def _closed(self) -> None:
        if self._open:
            fail("session", "a burst is still being read",
                 hints=("read it to its end, or close it, first",))  # fmt: skip

    def _check_sound(self) -> None:
        if self.pending < 0:
            fail(
                "nan-logits",
                f"the logits at position {self.position} hold NaN or infinity",
                hints=("the weights are damaged or contradict the spec; see memra-check",),
            )

    # -- rounds ------------------------------------------------------------------------------------

    def step(self, sequence: str | None = None, *, timed: bool = False) -> list[int]:
        """Launch one round (or `plain`) and return the tokens it committed.

        `timed` launches the round program by program, to see where its time goes; the programs,
        and so every bit, are the same. Raises: MemraError where the context is full.
        """
        self._own()
        tokens = self._round(sequence or self.sequence, timed)
        self.text.shown = len(self.text.tokens)
        return tokens

    def _round(self, sequence: str, timed: bool) -> list[int]:
        if self.position >= self.capacity:
            fail("context-full", f"all {self.capacity} rows of the context are taken",
                 hints=("end the text here, or raise `runtime.max_context` and compile again",),
            )  # fmt: skip
        if timed:
            self._launch_timed(sequence)
        else:
            self.device.launch(sequence)
        self._check_sound()
        tokens = self._drain(sequence)
        self._learn(tokens)
        return tokens

    def burst(self, tokens: int, sequence: str | None = None) -> Iterator[list[int]]:
        """Show at least `tokens` more tokens of the text, as they come; end on a round boundary.

        Up to a round's tokens more may be shown: the largest depth of the policy. They are part of
        the text and have their rows, as every token shown has; the pending token is the first of
        the next burst. Fewer come where the context is full, or a token is an end of sequence: it
        is the last shown, and what its round committed behind it is not. Where the next token is
        the end, nothing is shown: see `ended` and `pending`. Bursts of any width, put together,
        are the text of one.

        A caller that stops early waits for the launch to end; its tokens are committed.
        """
        self._own()
        text, wanted = self.text, self.text.shown + tokens
        while True:
            if shown := self._unseen():
                yield shown
            left = wanted - text.shown
            if left <= 0 or self.ended or self.position >= self.capacity:
                return
            with closing(self._rounds(left, sequence or self.sequence)) as rounds:
                for _ in rounds:
                    if shown := self._unseen():
                        yield shown

    def _unseen(self) -> list[int]:
        """The committed tokens that were not shown yet, to the first end; they are shown now."""
        text, start = self.text, self.text.shown
        if self._end_shown():
            return []
        end = text.first_end(start, self.eos)
        found = text.tokens[start : None if end is None else end + 1]
        text.shown = start + len(found)
        return found

    def _rounds(self, wanted: int, sequence: str, timed: bool = False) -> Generator[None]:
        """One launch towards `wanted` more tokens; yields whenever some were committed."""
        device = self.device
        if timed or f"{sequence}_burst" not in device.manifest.sequences:
            self._round(sequence, timed)
            yield
            return
        if self.trim is not None:
            wanted = min(wanted, self.trim.launch_tokens)
        wanted = max(1, min(wanted, device.burst_tokens, RING_TOKENS - BATCH_ROWS))
        device.put({"burst_end": self._read + wanted})
        device.start(f"{sequence}_burst")
        done, self._open, before = False, True, len(self.text.tokens)
        try:
            while not done:
                done = device.done()
                if self._drain(sequence):
                    yield
                elif not done:
                    time.sleep(POLL_S)
        finally:
            while not done:
                time.sleep(POLL_S)
                done = device.done()
            self._drain(sequence)
            self._learn(self.text.tokens[before:])
            self._open = False
        self._check_sound()

    def _learn(self, tokens: Sequence[int]) -> None:
        """Let a trimmed head learn committed tokens and all choices of the last round.

        Choices behind a rejected draft count, too: they foretell what the next rounds will want.
        """
        if self.trim is not None and self.trim.room:
            choices = self.device.plane("choice")[: self.device.get("drafted") + 1]
            self.trim.learn_choices([*tokens, *choices.tolist()])

    def _launch_timed(self, sequence: str) -> None:
        device, spent = self.device, self.stats.phase_s
        for program in calls(device, sequence):
            start = time.perf_counter()
            device.launch(f"run_{program}")
            phase = PHASES.get(program, "rest")
            spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - start

    def _drain(self, sequence: str) -> list[int]:
        """Commit the tokens written to the ring since the last drain."""
        device, text = self.device, self.text
        count = device.get("ring_count")
        at = np.arange(self._read, count) % RING_TOKENS
        self._read = count
        tokens = [int(t) for t in device.plane("ring")[at]]
        text.tokens += tokens
        # no round began later than the last one, nor wrote more rows than the deepest
        deepest = 0 if sequence == "plain" else self.policy.cap
        before = len(text.tokens) - device.get("accepted") - 1
        text.written = max(text.written, before + deepest + 1)
        return tokens

    def generate(
        self, max_new: int, *, sequence: str | None = None, timed: bool = False
    ) -> Iterator[int]:
        """Yield exactly `max_new` tokens, or fewer if the text ends or the context is full.

        An end-of-sequence token is yielded and is the last. `stats.finish` says why it stopped.
        The last token may be the pending one, which needs no row and no round. Called again, it
        goes on behind the last token shown.
        """
        self._own()
        sequence, stats, text = sequence or self.sequence, self.stats, self.text
        end = text.shown + max_new
        stats.finish = "eos" if self._end_shown() else ""
        start = time.perf_counter()

        def emit(token: int) -> int:
            text.shown += 1
            stats.tokens += 1
            stats.seconds += time.perf_counter() - start
            if token in self.eos:
                stats.finish = "eos"
            elif text.shown == end:
                stats.finish = "length"
            return token

        try:
            while not stats.finish:
                have = len(text.tokens)
                if text.shown < have:
                    yield emit(text.tokens[text.shown])
                    start = time.perf_counter()
                    continue
                full = self.position >= self.capacity
                if text.shown == have and (
                    full or text.shown == end - 1 or self.pending in self.eos
                ):
                    yield emit(self.pending)  # known already
                    start = time.perf_counter()
                elif full:
                    stats.finish = "context"
                else:
                    # the last token needs no row, but a pending one that was shown does
                    wanted = end - text.shown - (text.shown == have)
                    with closing(self._rounds(wanted, sequence, timed)) as rounds:
                        for _ in rounds:
                            while text.shown < len(text.tokens) and not stats.finish:
                                yield emit(text.tokens[text.shown])
                                start = time.perf_counter()
                            if stats.finish:
                                break
        finally:  # also when the caller stops early
            self._count()

    def _count(self) -> None:
        device, stats = self.device, self.stats
        stats.rounds = device.get("rounds")
        stats.drafted = device.get("total_drafted")
        stats.accepted = device.get("total_accepted")
        stats.cut_rounds = device.get("cuts")
        depth = max(self.policy.cap, 1)
        for name, at in (("attempted_at", STATE_ATTEMPTED), ("accepted_at", STATE_ACCEPTED)):
            setattr(stats, name, [int(n) for n in device.state[at : at + min(depth, MAX_DEPTH)]])

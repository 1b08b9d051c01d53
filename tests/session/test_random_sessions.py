"""A thousand random lives of a session: whatever was done, its text is that of plain decoding.

Two devices on the same weights take turns. Each life is a few random operations: prime, bursts of
any width, generate, single rounds, snapshot, restore (whole, cut back, with a suffix), extend,
demote, promote, ends of sequence. What plain decoding says of each text is asked once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from short_context import CHUNK, CONTEXT, DEPTH, RING, VOCAB, WINDOW, Plain, left, refusal

from memra_runtime.errors import MemraError
from memra_runtime.model import Model, another_model
from memra_runtime.session import Policy, Session, Snapshot
from tiny_pair import TINY_SPEC

LIVES, PARTS = 1000, 5
OPERATIONS = 5
#: One life in so many ends with a look at every visible row of the caches.
LOOK = 7
LENGTHS = (*range(1, 21), WINDOW - 3, RING - 2, RING + 1, CONTEXT - 20, CONTEXT - 2)
#: Long texts take long to prime, so they are begun less often.
WEIGHTS = np.array([4.0 if n <= 20 else 2.0 if n < 200 else 0.5 for n in LENGTHS])


@dataclass
class Expected:
    """What a session must know: the given text, how many more tokens were shown, its ends."""

    given: list[int]
    shown: int
    ends: frozenset[int]


class Lives:
    """Random operations on two sessions, each held to plain decoding after every one."""

    def __init__(self, model: Model, oracle: Plain, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.oracle = oracle
        self.devices = [model.device, another_model(model).device]
        text = model.tokenizer.encode(TINY_SPEC.read_text(encoding="utf-8"))
        self.prompts = [text[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]
        self.suffixes = [[9], text[40:43], text[60:69]]
        self.policy = Policy.of(model.manifest)
        self.kept: list[tuple[Snapshot, Expected]] = []
        self.turns: list[tuple[Session, Expected] | None] = [None, None]
        self.done: Counter[str] = Counter()

    def live(self, life: int) -> None:
        """One life, on one of the devices; the other's text stays as it was."""
        which = int(self.rng.integers(2))
        self.turns[which] = None
        for device in self.devices:  # tokens asked for in one launch: a round, some, any number
            device.burst_tokens = int(self.rng.choice([1, 4, 1000]))
        for _ in range(OPERATIONS):
            at = which if self.turns[1 - which] is None or self.rng.random() < 0.8 else 1 - which
            if self.turns[at] is None:
                self.turns[at] = self.begin(at)
            else:
                self.go_on(at)
            session, expected = self.turns[at]  # type: ignore[misc]
            self.check(session, expected)
        if life % LOOK == 0 and session.position:
            assert left(session) == self.oracle.left_by(session.committed)
            self.done["looks"] += 1

    def begin(self, at: int) -> tuple[Session, Expected]:
        session = Session(self.devices[at], self.random_policy())
        if self.kept and self.rng.random() < 0.5:
            return session, self.restore(session)
        prompt = self.prompts[int(self.rng.choice(len(LENGTHS), p=WEIGHTS / WEIGHTS.sum()))]
        session.eos = self.random_ends(prompt)
        session.prime(prompt)
        self.done["prime"] += 1
        return session, Expected(list(prompt), 0, session.eos)

    def random_policy(self) -> Policy:
        cap = int(self.rng.integers(0, DEPTH + 1))
        low, high = sorted(int(n) for n in self.rng.integers(0, cap + 1, 2))
        return Policy(cap, high, bool(self.rng.integers(4)), low, low, 0, 2)

    def random_ends(self, text: list[int]) -> frozenset[int]:
        """Often none, else a token that comes soon, and now and then the last one given."""
        if self.rng.random() < 0.6:
            return frozenset()
        soon = [*self.oracle.after(text, 8), text[-1]]
        return frozenset({soon[int(self.rng.integers(len(soon)))]})

    def go_on(self, at: int) -> None:
        session, expected = self.turns[at]  # type: ignore[misc]
        choice = self.rng.choice(["burst", "generate", "step", "snapshot", "restore", "extend",
                                  "switch"], p=[0.3, 0.15, 0.1, 0.15, 0.1, 0.12, 0.08])  # fmt: skip
        if choice == "burst":
            self.burst(session, expected)
        elif choice == "generate":
            self.generate(session, expected)
        elif choice == "step" and session.position < CONTEXT:
            session.step()
            expected.shown = len(session.committed) - len(expected.given)
        elif choice == "snapshot":
            self.kept.append((session.snapshot(), Expected(**vars(expected))))
            self.kept = self.kept[-12:]
        elif choice == "restore" and self.kept:
            self.turns[at] = session, self.restore(session)
        elif choice == "extend":
            self.extend(session, expected)
        elif choice == "switch":
            (session.promote if session.sequence == "plain" else session.demote)()
        self.done[str(choice)] += 1

    def said(self, expected: Expected, count: int) -> list[int]:
        """The next `count` tokens after those shown, to the first end; a step passes over ends."""
        shown = expected.shown
        answer = self.oracle.after(expected.given, shown + count)
        last = max(shown - 1, 0)
        end = next((i + 1 for i in range(last, len(answer)) if answer[i] in expected.ends), None)
        return answer[shown:end]

    def burst(self, session: Session, expected: Expected) -> None:
        width = int(self.rng.integers(1, 10))
        found = [token for tokens in session.burst(width) for token in tokens]
        said = self.said(expected, len(found))
        assert found == said
        room = CONTEXT - len(expected.given) - expected.shown
        assert len(found) >= min(width, room) or session.ended
        assert len(found) <= width + session.policy.cap
        expected.shown += len(found)
        if found:  # each has its row; behind an end there may be rows that are not shown
            assert len(session.committed) >= len(expected.given) + expected.shown

    def generate(self, session: Session, expected: Expected) -> None:
        count = int(self.rng.integers(1, 10))
        found = list(session.generate(count))
        assert found == self.said(expected, count)
        expected.shown += len(found)

    def suffix(self) -> list[int]:
        return list(self.suffixes[int(self.rng.integers(len(self.suffixes)))])

    def extend(self, session: Session, expected: Expected) -> None:
        suffix = self.suffix()
        text = [*expected.given, *self.oracle.after(expected.given, expected.shown)]
        if len(text) + len(suffix) > CONTEXT:
            before = list(session.committed), left(session)
            with pytest.raises(MemraError, match="the context holds 304"):
                session.extend(suffix)
            assert before == (list(session.committed), left(session))
            self.done["too long"] += 1
            return
        if why := refusal(lambda: session.extend(suffix)):  # only where a ring has turned since
            assert "a windowed cache holds 136 rows" in why
            assert len(session.committed) > RING - DEPTH - 1
            self.done["refused"] += 1
            return
        expected.given, expected.shown = text + suffix, 0

    def restore(self, session: Session) -> Expected:
        snapshot, saved = self.kept[int(self.rng.integers(len(self.kept)))]
        expected = Expected(list(saved.given), saved.shown, saved.ends)
        have = len(snapshot.text.tokens)
        session.eos = expected.ends
        how = self.rng.choice(["whole", "shown", "cut"])
        if how == "whole":
            session.restore(snapshot)
            self.done["restore whole"] += 1
            return expected
        suffix, keep = self.suffix(), None
        text = [*saved.given, *self.oracle.after(saved.given, saved.shown)]
        if how == "cut":
            least = max(1, have - 2 * CHUNK) if self.rng.random() < 0.5 else 1
            keep = int(self.rng.integers(least, have + 1))
            text = snapshot.text.tokens[:keep]
        if why := refusal(lambda: session.restore(snapshot, suffix, keep=keep)):
            turned = have > RING - DEPTH - 1 and "a windowed cache holds 136 rows" in why
            assert turned or len(text) + len(suffix) > CONTEXT
            self.done["refused"] += 1
            session.restore(snapshot)
            return expected
        self.done[f"restore {how}"] += 1
        return Expected(text + suffix, 0, expected.ends)

    def check(self, session: Session, expected: Expected) -> None:
        """The committed text and the pending token are plain decoding's."""
        count = len(session.committed) - len(expected.given)
        answer = self.oracle.after(expected.given, count + 1)
        assert session.committed == [*expected.given, *answer[:count]]
        assert session.position == len(session.committed)
        assert session.pending == answer[count]
        assert session.text.shown == len(expected.given) + expected.shown


@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_lives_equal_plain_decoding(model: Model, oracle: Plain, part: int) -> None:
    assert model.manifest.spec["target"]["vocab"] == VOCAB
    assert next(p.rows for p in model.manifest.programs if p.name == "prefill") == CHUNK
    lives, usual = Lives(model, oracle, part), model.device.burst_tokens
    for life in range(LIVES // PARTS):
        lives.live(life)
    model.device.burst_tokens = usual
    for what in ("burst", "generate", "step", "snapshot", "extend", "switch", "prime",
                 "restore whole", "restore shown", "restore cut", "looks"):  # fmt: skip
        assert lives.done[what] > 1, (what, lives.done)

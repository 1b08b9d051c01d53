"""The rig: a loaded model, its prompts, plain runs, and rounds that are followed row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_runtime.artifact import RING_TOKENS
from memra_runtime.check.prompts import Prompt, built_in, given, long_ids
from memra_runtime.check.report import Difference, Parted, Tally, differ
from memra_runtime.check.rows import (
    CacheReader,
    Row,
    RowReader,
    Trace,
    bits_apart,
    first_unequal,
    ring_edges,
    same_bits,
)
from memra_runtime.device import calls
from memra_runtime.model import Model
from memra_runtime.session import Policy, Session


@dataclass(frozen=True)
class Options:
    """What a run of the checks may be told. No prompts: the built-in ones."""

    prompts: tuple[str, ...] = ()
    max_new: int = 96
    quick: bool = False


@dataclass(frozen=True)
class Round:
    """One round as the device left it; `rows` belong to the batch, in order."""

    position: int
    batch: list[int]
    accepted: int
    rows: list[Row]
    committed: list[int]


#: Fills `forced` for a round at `position` with `depth` drafts; returns the number of drafts that
#: must be accepted, or None if the drafter decides.
Script = Callable[[Any, Trace, int, int], int | None]


def free(forced: Any, trace: Trace, position: int, depth: int) -> int | None:
    """Force nothing."""
    forced[:] = -1
    return None


def right_until(first_wrong: int, vocab: int) -> Script:
    """Right drafts, but for the one at `first_wrong`: later right ones must not count."""

    def script(forced: Any, trace: Trace, position: int, depth: int) -> int | None:
        forced[:] = -1
        right = [trace.token(position + 1 + j) for j in range(depth)]
        known = [token for token in right if token is not None]
        if len(known) < depth:
            return None  # past the plain run: nothing is known to be right
        if first_wrong < depth:
            known[first_wrong] = (known[first_wrong] + 1) % vocab
        forced[position + 1 : position + 1 + depth] = known
        return min(first_wrong, depth)

    return script


class Rig:
    """A model under test."""

    def __init__(self, model: Model, options: Options) -> None:
        self.model, self.options = model, options
        self.device, self.manifest = model.device, model.device.manifest
        self.policy = Policy.of(self.manifest)
        self.cap = self.policy.cap
        self.capacity = int(self.manifest.spec["runtime"]["max_context"])
        self.vocab = int(self.manifest.spec["target"]["vocab"])
        self.row_reader, self.cache = RowReader(self.device), CacheReader(self.device)
        self.max_new = max(1, min(options.max_new, self.capacity // 2))
        # room for the prompt: the answer, and drafts that look past its end
        limit = max(1, self.capacity - self.max_new - self.cap - 2)
        longest = max(ring_edges(self.manifest), default=96) + 5
        self.built_in = built_in(model.tokenizer, longest, limit)
        self.prompts = given(model.tokenizer, options.prompts, limit) or self.built_in
        if options.quick and not options.prompts:
            self.prompts = [p for p in self.built_in if p.name in ("code", "long")]
        self._traces: dict[tuple[int, ...], Trace] = {}

    # --- sessions and plain runs -----------------------------------------------------------

    def session(self, policy: Policy, eos: Iterable[int] = ()) -> Session:
        return Session(self.device, policy, eos)

    def fixed(self, depth: int) -> Policy:
        return self.policy.fixed(depth)

    def policies(self) -> Iterator[tuple[str, Policy]]:
        """Every fixed depth, then the spec's own policy."""
        depths = {1, self.cap} if self.options.quick else range(self.cap + 1)
        yield from ((f"depth {k}", self.fixed(k)) for k in sorted(depths))
        if self.policy.adaptive:
            yield "the spec's policy", self.policy

    def text(self, token: int | None) -> str:
        """A token for a reader."""
        if token is None:
            return "nothing"
        return f"token {token} {self.model.tokenizer.decode([token], special=True)!r}"

    def learn_runs(self, prompts: Iterable[Prompt], count: int) -> None:
        """Let a trimmed head learn the plain runs, as it would in use: else it may hardly ever be
        right, and nothing could be told from what it drafts."""
        if self.model.trim is not None:
            for prompt in prompts:
                self.model.trim.learn_choices(self.trace(prompt, count).tokens)

    def long_prompt(self, count: int) -> Prompt:
        return Prompt(f"{count} tokens", long_ids(self.model.tokenizer, count))

    def trace(self, prompt: Prompt, count: int | None = None) -> Trace:
        """The plain run of a prompt: `count` tokens (default: enough for drafts past the end)."""
        count = self.max_new + self.cap + 1 if count is None else count
        count = min(count, self.capacity - len(prompt.ids) + 1)
        known = self._traces.get(prompt.ids)
        if known is None or len(known.tokens) < count:
            known = self._traces[prompt.ids] = self._run_plain(prompt, count)
        return known

    def _run_plain(self, prompt: Prompt, count: int) -> Trace:
        session = self.session(self.fixed(0))
        session.prime(prompt.ids, count)
        trace = Trace(prompt.ids, [session.pending], cache=self.cache.all(len(prompt.ids)))
        for _ in range(count - 1):
            at = self.device.get("position")
            (trace.rows[at],) = self.launch("plain")
            trace.cache |= self.cache.at([at])
            trace.tokens.append(self.device.get("pending"))
        return trace

    # --- rounds ----------------------------------------------------------------------------

    def launch(self, sequence: str) -> list[Row]:
        """Launch a sequence program by program and read the target's rows when they are there."""
        rows: list[Row] = []
        for program in calls(self.device, sequence):
            self.device.launch(f"run_{program}")
            name = program.partition("_fault_")[0]
            if name in self.row_reader.kept:
                rows = self.row_reader.read(name, self.device.get("rows"))
        return rows

    def round(self, sequence: str) -> Round:
        """Run one round and read all of it."""
        position, count = self.device.get("position"), self.device.get("ring_count")
        rows = self.launch(sequence)
        at = np.arange(count, self.device.get("ring_count")) % RING_TOKENS
        batch = self.device.plane("batch")[: len(rows)].tolist()
        committed = self.device.plane("ring")[at].tolist()
        return Round(position, batch, self.device.get("accepted"), rows, committed)

    def follow(
        self,
        tally: Tally,
        prompt: Prompt,
        setting: tuple[str, Policy],
        script: Script,
        *,
        sequence: str = "round",
        count: int | None = None,
        capacity: int | None = None,
    ) -> None:
        """Run rounds over `count` tokens and hold every row, token and counter to the plain run.

        Raises: Parted at the first difference.
        """
        count = count or self.max_new
        name, policy = setting
        trace = self.trace(prompt, count + self.cap + 1)
        session = self.session(policy)
        session.capacity = capacity or self.capacity
        session.prime(prompt.ids)
        end = min(len(prompt.ids) + count, session.capacity)
        place = {"prompt": prompt.name, "setting": name}
        self._expect_pending(trace, len(prompt.ids), place)
        while (position := self.device.get("position")) < end:
            expected = script(
                self.device.plane("forced"), trace, position, self.device.get("depth")
            )
            before = {n: self.device.get(f"total_{n}") for n in ("drafted", "accepted")}
            found = self.round(sequence)
            matched = self._check_rows(tally, trace, found, place)
            self._check_counters(found, matched, expected, before, place)
            self._expect_pending(trace, position + matched + 1, place)
            committed = range(position, position + matched + 1)
            self._check_cache(tally, trace, self.cache.at(committed), place)
            tally.add("rounds")
        self._check_cache(tally, trace, self.cache.all(self.device.get("position")), place)

    def _check_rows(self, tally: Tally, trace: Trace, found: Round, place: dict[str, Any]) -> int:
        """Compare the rows with a right prefix; returns how many drafts are right."""
        for i, row in enumerate(found.rows):
            at = found.position + i
            if trace.token(at) is None:
                return i - 1
            if found.batch[i] != trace.token(at):
                if i == 0:
                    differ("the round started from another token", self.text(trace.token(at)),
                           self.text(found.batch[0]), position=at, margin=trace.margin(at),
                           **place)  # fmt: skip
                return i - 1
            plain = trace.rows.get(at)
            if plain is None:
                return i
            self._check_row(plain, row, at, i, place)
            tally.add("rows of verify")
        return len(found.rows) - 1

    def _check_row(self, plain: Row, row: Row, at: int, i: int, place: dict[str, Any]) -> None:
        where = f"row {i} of verify, at position {at}"
        if not same_bits(plain.hidden, row.hidden):
            raise Parted(
                Difference(
                    "the hidden row of verify has other bits than the plain step's",
                    position=at, margin=plain.margin, expected="equal bits",
                    found=bits_apart(plain.hidden, row.hidden),
                    first_row=f"hidden, {where}", **place,
                )
            )  # fmt: skip
        # verify and plain_step keep the same values under the same names
        for name, bits in plain.values.items():
            if row.values.get(name) != bits:
                differ(f"`{name}` of verify has other bits than the plain step's", "equal bits",
                       "other bits", position=at, margin=plain.margin,
                       first_row=f"{name}, {where}", **place)  # fmt: skip
        if plain.choice != row.choice:
            differ("the choice of verify is not the plain step's", self.text(plain.choice),
                   self.text(row.choice), position=at + 1, margin=plain.margin,
                   **place)  # fmt: skip

    def _check_counters(
        self,
        found: Round,
        matched: int,
        expected: int | None,
        before: dict[str, int],
        place: dict[str, Any],
    ) -> None:
        place = {**place, "position": found.position}
        if found.accepted != matched:
            differ("accepted drafts", matched, found.accepted, **place)
        if expected is not None and "in_round" in self.manifest.gates:
            expected = min(expected, len(found.rows) - 1)  # doubt may have ended the chain
        if expected is not None and found.accepted != expected:
            differ("accepted drafts against the forced ones", expected, found.accepted, **place)
        at = self.device.get("position")
        if at != found.position + matched + 1:
            differ("position after the round", found.position + matched + 1, at, **place)
        if found.committed != found.batch[: matched + 1]:
            differ("tokens in the ring", found.batch[: matched + 1], found.committed, **place)
        added = {n: self.device.get(f"total_{n}") - before[n] for n in before}
        wanted = {"drafted": len(found.rows) - 1, "accepted": matched}
        if added != wanted:
            differ("drafts counted", wanted, added, **place)

    def _expect_pending(self, trace: Trace, position: int, place: dict[str, Any]) -> None:
        """The pending token and the carried hidden row are those of the plain run."""
        token, pending = trace.token(position), self.device.get("pending")
        if token is not None and pending != token:
            differ("the pending token", self.text(token), self.text(pending),
                   position=position, margin=trace.margin(position), **place)  # fmt: skip
        row, hidden = trace.rows.get(position - 1), np.asarray(self.device.plane("hidden"))
        if row is not None and not same_bits(row.hidden, hidden):
            differ("the hidden row carried to the next round", "that of the last committed row",
                   bits_apart(row.hidden, hidden), position=position - 1,
                   first_row=f"plane `hidden`, position {position - 1}", **place)  # fmt: skip

    def _check_cache(
        self,
        tally: Tally,
        trace: Trace,
        found: dict[tuple[str, int], bytes],
        place: dict[str, Any],
    ) -> None:
        bad = first_unequal(trace.cache, found)
        if bad is not None:
            differ("a cache row has other bits than in a run that never drafted", "equal bits",
                   "other bits", position=bad[1], margin=trace.margin(bad[1]),
                   first_row=f"cache `{bad[0]}`, position {bad[1]}", **place)  # fmt: skip
        tally.add("cache rows", len(found))

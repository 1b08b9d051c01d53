"""What a check found: outcomes, the first difference, and how a report reads."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NoReturn

PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
CAUGHT, NOT_CAUGHT = "caught", "NOT CAUGHT"

#: Standard deviations by which the declared wiring must win.
SIGMAS = 2.0

_INDENT = " " * 16


@dataclass(frozen=True)
class Difference:
    """Where two runs that must be equal part first.

    `position` counts the tokens of the text from 0, the prompt included. `margin` is the plain
    step's logit of its choice less the next best, at the position before: a tiny one means a near
    tie. `first_row` names the first row whose bits differ, which may lie before the token.
    """

    what: str
    prompt: str = ""
    setting: str = ""
    position: int | None = None
    expected: str = ""
    found: str = ""
    margin: float | None = None
    first_row: str = ""

    def lines(self) -> list[str]:
        where = [f"prompt `{self.prompt}`"] if self.prompt else []
        where += [self.setting] if self.setting else []
        where += [f"position {self.position}"] if self.position is not None else []
        lines = [f"first difference: {self.what}" + (f" ({', '.join(where)})" if where else "")]
        if self.expected or self.found:
            lines.append(f"expected {self.expected}, found {self.found}")
        if self.margin is not None:
            lines.append(f"logit margin of the plain step there: {self.margin:.6g}")
        if self.first_row:
            lines.append(f"first row whose bits part: {self.first_row}")
        return lines


class Parted(Exception):  # noqa: N818 - not an error: the finding of a check
    """Ends a check at the first difference."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.what)
        self.difference = difference


class NotApplicable(Exception):  # noqa: N818
    """Ends a check that has nothing to look at, with the reason."""


def differ(what: str, expected: object, found: object, **place: Any) -> NoReturn:
    """End the check: `what` should be `expected` and is `found`."""
    raise Parted(Difference(what, expected=str(expected), found=str(found), **place))


class Tally:
    """Counts of a running check, and remarks worth a line."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []

    def add(self, what: str, count: int = 1) -> None:
        self.counts[what] += count


@dataclass(frozen=True)
class Outcome:
    """The result of one check."""

    name: str
    shows: str
    status: str
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""
    difference: Difference | None = None
    seconds: float = 0.0

    def lines(self) -> list[str]:
        lines = [f"{self.status:<6}{self.name:<10}{self.shows}"]
        if self.status == NOT_APPLICABLE:
            lines = [f"{'-':<6}{self.name:<10}{self.shows}", f"{_INDENT}not applicable"]
            lines[-1] += f": {self.reason}"
            return lines
        counts = ", ".join(f"{n:,} {what}" for what, n in self.counts.items())
        lines += [_INDENT + counts] if counts else []
        lines += [_INDENT + note for note in self.notes]
        lines += [_INDENT + self.reason] if self.reason else []
        if self.difference is not None:
            lines += [_INDENT + line for line in self.difference.lines()]
        return lines


@dataclass(frozen=True)
class Arm:
    """A fault planted on purpose, and the checks that saw it."""

    name: str
    does: str
    status: str
    caught_by: tuple[str, ...] = ()
    reason: str = ""

    def lines(self) -> list[str]:
        by = f" by {', '.join(self.caught_by)}" if self.status == CAUGHT else ""
        why = f": {self.reason}" if self.reason else ""
        return [f"{self.status + by}: {self.name} ({self.does}){why}"]


@dataclass(frozen=True)
class Verdict:
    """The declared wiring against one that is wrong on purpose, over the same places.

    `declared` and `accepted` count drafts that are right; `example` shows drafted ids that differ.
    """

    arm: str
    declared: int
    accepted: int
    drafted: int
    places: int
    better: int
    worse: int
    different: int
    example: str = ""

    @property
    def sigmas(self) -> float:
        """How far the declared wiring wins, in standard deviations of a fair coin."""
        uneven = self.better + self.worse
        return (self.better - self.worse) / sqrt(uneven) if uneven else 0.0

    @property
    def caught(self) -> bool:
        return self.different > 0 and self.declared > self.accepted and self.sigmas >= SIGMAS

    @property
    def reversed(self) -> bool:
        return self.accepted > self.declared and self.sigmas <= -SIGMAS

    def lines(self) -> list[str]:
        share = [f"{n / self.drafted:.1%}" for n in (self.declared, self.accepted)]
        lines = [
            f"declared wiring {self.declared:,} drafts right ({share[0]}), {self.arm} "
            f"{self.accepted:,} ({share[1]}); better at {self.better}, worse at {self.worse} of "
            f"{self.places} places ({self.sigmas:+.1f} sigma), other drafts at {self.different}"
        ]
        return lines + ([f"  for example {self.example}"] if self.example else [])


@dataclass(frozen=True)
class Report:
    """Everything that memra-check found."""

    artifact: str
    target: str
    prompts: tuple[str, ...]
    max_new_tokens: int
    depths: tuple[str, ...]
    checks: tuple[Outcome, ...]
    wiring: tuple[Verdict, ...]
    red_arms: tuple[Arm, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """True when no check failed and no red arm slipped through."""
        return all(c.status != FAIL for c in self.checks) and all(
            a.status != NOT_CAUGHT for a in self.red_arms
        )

    def check(self, name: str) -> Outcome:
        return next(c for c in self.checks if c.name == name)

    def arm(self, name: str) -> Arm:
        return next(a for a in self.red_arms if a.name == name)

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **dataclasses.asdict(self)}

    def render(self) -> str:
        lines = [
            f"{self.artifact} on {self.target}: {len(self.prompts)} prompts "
            f"({', '.join(self.prompts)}), {self.max_new_tokens} new tokens each,",
            f"drafting at {', '.join(self.depths)}",
            "",
        ]
        for outcome in self.checks:
            lines += outcome.lines()
        lines += ["", "red arms: faults planted on purpose, so that the checks are checked"]
        for arm in self.red_arms:
            lines += ["  " + line for line in arm.lines()]
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        ran = [c for c in self.checks if c.status != NOT_APPLICABLE]
        failed = [c.name for c in ran if c.status == FAIL]
        live = [a for a in self.red_arms if a.status != NOT_APPLICABLE]
        missed = [a.name for a in live if a.status == NOT_CAUGHT]
        if self.passed:
            return (
                f"passed: {len(ran)} checks, {len(live)} of {len(live)} red arms caught "
                f"({self.seconds:.1f} s). Speculation changes nothing but speed."
            )
        parts = [f"checks that failed: {', '.join(failed)}"] if failed else []
        parts += [f"red arms not caught: {', '.join(missed)}"] if missed else []
        return f"FAILED: {'; '.join(parts)} ({self.seconds:.1f} s)"

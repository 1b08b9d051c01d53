"""The worst error of each family of tests, for a table at the end of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Worst:
    """Comparisons of a family, and the one that came nearest to its limit."""

    count: int = 0
    error: float = 0.0
    allowed: float = 0.0

    @property
    def share(self) -> float:
        """The error as a part of what is allowed; where nothing is, any error is too much."""
        return self.error / self.allowed if self.allowed else float(self.error > 0)


#: Sentences for the end of the run.
REMARKS: list[str] = []
#: By family, in the order of their first comparison.
FAMILIES: dict[str, Worst] = {}


def note(family: str, error: float, allowed: float) -> None:
    """Remember a comparison; the assertion is the caller's."""
    worst = FAMILIES.setdefault(family, Worst())
    worst.count += 1
    if Worst(0, error, allowed).share >= worst.share:
        worst.error, worst.allowed = error, allowed


def remark(text: str) -> None:
    """Say something at the end of the run."""
    REMARKS.append(text)


def table() -> list[str]:
    """A line a family, then the remarks."""
    return [
        f"{name:24} {w.count:7,} comparisons  worst {w.error:8.2e}  allowed {w.allowed:8.2e}"
        for name, w in FAMILIES.items()
    ] + REMARKS

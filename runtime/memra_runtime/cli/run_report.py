"""What memra-run tells: memory, how rounds run, acceptance, and where a round's time goes."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from memra_runtime.cli.app import size
from memra_runtime.model import MemoryPlan
from memra_runtime.session import Policy, Session, Stats

#: Plain steps that are timed at the end of a run, and the longest that may take.
PLAIN_STEPS = 8
PLAIN_SECONDS = 2.0


def memory_line(plan: MemoryPlan) -> str:
    """What loading will take, and what is free."""
    free = f" ({size(plan.available)} free)" if plan.available is not None else ""
    return (
        f"arena {size(plan.arena)} + weights {size(plan.weights)} + process "
        f"{size(plan.resident)} = peak {size(plan.peak)}{free}"
    )


def rounds_line(target: str, policy: Policy, plain: bool, depth: int | None) -> str:
    """How rounds run here, or why the drafter is not used."""
    if plain:
        return f"{target}: one call a token; the drafter is loaded but not used (--plain)"
    if policy.cap == 0:
        return (
            f"{target}: one call a round, depth 0; the drafter is loaded but not used (--depth 0)"
        )
    if not policy.adaptive:
        why = "--depth" if depth is not None else "fixed"
        return f"{target}: one call a round, depth {policy.cap} ({why})"
    least = min(policy.floor_short, policy.floor_deep)
    return f"{target}: one call a round, depth {least}..{policy.cap} (accepted_plus_one)"


def finish_line(finish: str, wanted: int) -> str:
    """Why the text ends where it ends."""
    reasons = {
        "length": f"{wanted} tokens were asked for",
        "eos": "the model ended the text",
        "context": "the context is full",
    }
    return f"{finish}: {reasons.get(finish, finish)}"


@dataclass(frozen=True)
class RunStats:
    """Measured facts of one run; units are in the names. Acceptance = accepted / drafted."""

    prompt_tokens: int
    prompt_s: float
    tokens: int
    decode_s: float
    tokens_per_s: float
    tokens_per_s_with_prompt: float
    rounds: int
    tokens_per_round: float
    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None
    attempted_by_position: list[int]
    accepted_by_position: list[int]
    round_ms: dict[str, float]
    plain_step_ms: float | None
    break_even_acceptance: float | None
    peak_memory_bytes: int | None
    stated_peak_memory_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """The table of `--stats`: (label, text) a line."""
        whole = self.prompt_s + self.decode_s
        alone = f"{self.tokens_per_s:,.1f} tok/s ({self.tokens} tokens in {self.decode_s:.3f} s)"
        both = f"{self.tokens_per_s_with_prompt:,.1f} tok/s ({whole:.3f} s)"
        rows = [
            ("speed", f"{alone}, with the prompt {both}"),
            ("prompt", f"{self.prompt_tokens} tokens in {self.prompt_s:.3f} s"),
        ]
        rows += self._speculation()
        rows += self._time()
        if self.peak_memory_bytes is not None:
            rows.append(("memory", f"peak {size(self.peak_memory_bytes)} measured, "
                                   f"{size(self.stated_peak_memory_bytes)} stated"))  # fmt: skip
        return rows

    def _speculation(self) -> list[tuple[str, str]]:
        rows = [("rounds", f"{self.rounds}, {self.tokens_per_round:.2f} tokens a round")]
        if self.acceptance is None:
            return [*rows, ("drafts", "none: the text was decoded plainly")]
        rows.append(
            ("drafts", f"{self.accepted_tokens} of {self.drafted_tokens} drafted tokens accepted: "
                       f"acceptance {self.acceptance:.1%} (accepted / drafted)")
        )  # fmt: skip
        pairs = zip(self.accepted_by_position, self.attempted_by_position, strict=True)
        by_position = [
            f"{i}: {accepted}/{tried} = {accepted / tried:.0%}"
            for i, (accepted, tried) in enumerate(pairs, 1)
            if tried
        ]
        return [*rows, ("", f"by position (accepted/attempted)  {'   '.join(by_position)}")]

    def _time(self) -> list[tuple[str, str]]:
        if not self.round_ms or not self.rounds:
            return []
        total = sum(self.round_ms.values())
        split = ", ".join(f"{name} {spent:.2f}" for name, spent in self.round_ms.items())
        rows = [("time", f"{total:.2f} ms a round ({split})")]
        if self.plain_step_ms is None:
            return [*rows, ("", "the plain step could not be timed: no room for more tokens")]
        rows[0] = ("time", f"{rows[0][1]}; a plain step takes {self.plain_step_ms:.2f} ms")
        if self.break_even_acceptance is None or self.acceptance is None:
            return rows
        drafts = self.drafted_tokens / self.rounds
        text = (
            f"a round with {drafts:.2f} drafts takes {total / self.plain_step_ms:.2f} plain steps"
        )
        if self.break_even_acceptance > 1:
            text += ": it cannot pay at any acceptance"
        else:
            pays = "pays" if self.acceptance > self.break_even_acceptance else "does not pay"
            text += f": it breaks even at acceptance {self.break_even_acceptance:.1%}; "
            text += f"at {self.acceptance:.1%} it {pays}"
        return [*rows, ("", text)]


def time_plain_steps(session: Session) -> float | None:
    """Milliseconds of a plain step after the end of a text, by the median of a few.

    The session is not to be continued. None where the context has no room for three steps.
    """
    steps = min(PLAIN_STEPS, session.capacity - session.position)
    if steps < 3:
        return None
    spent: list[float] = []
    begin = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        session.step("plain")
        spent.append(time.perf_counter() - start)
        if time.perf_counter() - begin > PLAIN_SECONDS and len(spent) >= 3:
            break
    return 1e3 * statistics.median(spent)


def run_stats(stats: Stats, plain_ms: float | None, peak: int | None, stated: int) -> RunStats:
    """Put together what was counted and measured."""
    rounds = max(stats.rounds, 1)
    order = ("draft", "verify", "rest")
    round_ms = {p: 1e3 * stats.phase_s[p] / rounds for p in order if p in stats.phase_s}
    break_even = None
    if plain_ms and stats.drafted and round_ms:
        ratio = sum(round_ms.values()) / plain_ms
        break_even = max(0.0, (ratio - 1) * stats.rounds / stats.drafted)
    return RunStats(
        prompt_tokens=stats.prompt_tokens,
        prompt_s=stats.prompt_s,
        tokens=stats.tokens,
        decode_s=stats.seconds,
        tokens_per_s=_rate(stats.tokens, stats.seconds),
        tokens_per_s_with_prompt=_rate(stats.tokens, stats.seconds + stats.prompt_s),
        rounds=stats.rounds,
        tokens_per_round=stats.tokens_per_round,
        drafted_tokens=stats.drafted,
        accepted_tokens=stats.accepted,
        acceptance=stats.acceptance if stats.drafted else None,
        attempted_by_position=stats.attempted_at,
        accepted_by_position=stats.accepted_at,
        round_ms=round_ms,
        plain_step_ms=plain_ms,
        break_even_acceptance=break_even,
        peak_memory_bytes=peak,
        stated_peak_memory_bytes=stated,
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0

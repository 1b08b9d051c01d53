"""What memra-run tells: memory, how rounds run, acceptance, and where a round's time goes."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from memra_runtime.bench.report import depths_text
from memra_runtime.cli.app import size
from memra_runtime.errors import fail
from memra_runtime.model import MemoryPlan
from memra_runtime.session import Policy, Session, Stats

#: Rounds and plain steps that are timed at the end of a run, and the longest either may take.
SPLIT_ROUNDS = 8
PLAIN_STEPS = 8
TIMING_SECONDS = 2.0


def memory_line(plan: MemoryPlan) -> str:
    """What loading will take, and what is free."""
    parts = f"arena {size(plan.arena)} + weights {size(plan.weights)}"
    if plan.gpu:
        staging = f" + {size(plan.staging)} to repack them" if plan.staging else ""
        need = f"{parts}{staging} = {size(plan.need)} on {plan.gpu}"
    else:
        need = f"{parts} + process {size(plan.resident)} = peak {size(plan.peak)}"
    return need + (f" ({size(plan.available)} free)" if plan.available is not None else "")


def rounds_line(how: str, policy: Policy, plain: bool, depth: int | None) -> str:
    """How rounds run here, as the device says it, and how deep; or why nothing is drafted."""
    if plain:
        return f"{how}; the drafter is loaded but not used (--plain)"
    if policy.cap == 0:
        return f"{how}, depth 0; the drafter is loaded but not used (--depth 0)"
    if not policy.adaptive:
        return f"{how}, depth {policy.cap} ({'--depth' if depth is not None else 'fixed'})"
    least = min(policy.floor_short, policy.floor_deep, policy.floor_least)
    return f"{how}, depth {least}..{policy.cap} (accepted_plus_one)"


def finish_line(finish: str, wanted: int) -> str:
    """Why the text ends where it ends."""
    reasons = {
        "length": f"{wanted} tokens were asked for",
        "eos": "the model ended the text",
        "context": "the context is full",
    }
    return f"{finish}: {reasons.get(finish, finish)}"


@dataclass(frozen=True)
class Ran:
    """How the rounds of a text ran: as the device says it, and as counted."""

    how: str
    launches: int
    reads: int


@dataclass(frozen=True)
class Split:
    """Rounds after the end of a text, timed program by program; times are means."""

    rounds: int
    depth: int
    round_ms: dict[str, float]


@dataclass(frozen=True)
class RunStats:
    """Measured facts of one run; units are in the names. Acceptance = accepted / drafted."""

    prompt_tokens: int
    kept_tokens: int
    prompt_s: float
    tokens: int
    decode_s: float
    tokens_per_s: float
    tokens_per_s_with_prompt: float
    rounds: int
    rounds_ran: str
    launches: int
    host_reads: int
    tokens_per_round: float
    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None
    attempted_by_position: list[int]
    accepted_by_position: list[int]
    rounds_by_drafts: list[int]
    cut_rounds: int
    round_ms: float | None
    split: Split | None
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
        kept = f", behind {self.kept_tokens} that were kept" if self.kept_tokens else ""
        both = f"{self.tokens_per_s_with_prompt:,.1f} tok/s ({whole:.3f} s)"
        rows = [
            ("speed", f"{alone}, with the prompt {both}"),
            ("prompt", f"{self.prompt_tokens} tokens in {self.prompt_s:.3f} s{kept}"),
        ]
        rows += [("ran", self._ran()), *self._speculation()]
        rows += self._time()
        if self.peak_memory_bytes is not None:
            rows.append(("memory", f"{size(self.peak_memory_bytes)} measured, "
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
        rows.append(("", f"by position (accepted/attempted)  {'   '.join(by_position)}"))
        return [*rows, ("", depths_text(self.rounds_by_drafts, self.cut_rounds))]

    def _ran(self) -> str:
        rounds = max(self.rounds, 1)
        return (
            f"{self.rounds_ran}: {self.launches / rounds:.2f} launches and "
            f"{self.host_reads / rounds:.2f} host reads a round, counted"
        )

    def require_whole(self) -> None:
        """Refuse rounds that took more than a launch each. Raises: MemraError."""
        if max(self.launches, self.host_reads) > self.rounds:
            fail("strict", f"rounds did not run as one launch each: {self._ran()}", "--strict")

    def _time(self) -> list[tuple[str, str]]:
        if self.round_ms is None:
            return []
        time = f"{self.round_ms:.2f} ms a round"
        if self.plain_step_ms is None:
            return [("time", time), ("", "no room for more tokens, so no plain step was timed")]
        rows = [("time", f"{time}; a plain step takes {self.plain_step_ms:.2f} ms")]
        if self.split is not None:
            parts = ", ".join(f"{name} {ms:.2f}" for name, ms in self.split.round_ms.items())
            rows.append(
                ("", f"{self.split.rounds} more rounds at depth {self.split.depth}, program by "
                     f"program: {parts}")
            )  # fmt: skip
        if self.break_even_acceptance is None or self.acceptance is None:
            return rows
        drafts = self.drafted_tokens / self.rounds
        text = (
            f"a round with {drafts:.2f} drafts takes {self.round_ms / self.plain_step_ms:.2f} "
            "plain steps"
        )
        if self.break_even_acceptance > 1:
            text += ": it cannot pay at any acceptance"
        else:
            pays = "pays" if self.acceptance > self.break_even_acceptance else "does not pay"
            text += f": it breaks even at acceptance {self.break_even_acceptance:.1%}; "
            text += f"at {self.acceptance:.1%} it {pays}"
        return [*rows, ("", text)]


def split_rounds(session: Session, sequence: str) -> Split | None:
    """Time a few rounds after the end of a text, program by program, at its mean depth.

    The text itself runs in whole rounds, which have no seams to time. The session is not to be
    continued. None where the context has no room for a round.
    """
    from memra_runtime.bench.timers import COLUMNS, timer_for

    timer, stats = timer_for(session.device), session.stats
    depth = round(stats.drafted / stats.rounds) if sequence == "round" and stats.rounds else 0
    spent = dict.fromkeys(("draft", "verify", "rest"), 0.0)
    rounds, begin = 0, time.perf_counter()
    while rounds < SPLIT_ROUNDS and time.perf_counter() - begin < TIMING_SECONDS:
        if session.position + depth + 1 > session.capacity:
            break
        session.device.put({"depth": depth, "doubt": 0})
        for program, times in timer.parts(sequence, depth).items():
            spent[COLUMNS.get(program, "rest")] += sum(times)
        rounds += 1
    if not rounds:
        return None
    return Split(rounds, depth, {k: 1e3 * s / rounds for k, s in spent.items()})


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
        if time.perf_counter() - begin > TIMING_SECONDS and len(spent) >= 3:
            break
    return 1e3 * statistics.median(spent)


def run_stats(
    stats: Stats, ran: Ran, split: Split | None, plain_ms: float | None, held: int | None,
    stated: int,
) -> RunStats:  # fmt: skip
    """Put together what was counted and measured."""
    round_ms = 1e3 * stats.seconds / stats.rounds if stats.rounds else None
    break_even = None
    if plain_ms and stats.drafted and round_ms:
        break_even = max(0.0, (round_ms / plain_ms - 1) * stats.rounds / stats.drafted)
    return RunStats(
        prompt_tokens=stats.prompt_tokens,
        kept_tokens=stats.kept_tokens,
        prompt_s=stats.prompt_s,
        tokens=stats.tokens,
        decode_s=stats.seconds,
        tokens_per_s=_rate(stats.tokens, stats.seconds),
        tokens_per_s_with_prompt=_rate(stats.tokens, stats.seconds + stats.prompt_s),
        rounds=stats.rounds,
        rounds_ran=ran.how,
        launches=ran.launches,
        host_reads=ran.reads,
        tokens_per_round=stats.tokens_per_round,
        drafted_tokens=stats.drafted,
        accepted_tokens=stats.accepted,
        acceptance=stats.acceptance if stats.drafted else None,
        attempted_by_position=stats.attempted_at,
        accepted_by_position=stats.accepted_at,
        rounds_by_drafts=stats.rounds_at_depth,
        cut_rounds=stats.cut_rounds,
        round_ms=round_ms,
        split=split,
        plain_step_ms=plain_ms,
        break_even_acceptance=break_even,
        peak_memory_bytes=held,
        stated_peak_memory_bytes=stated,
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0

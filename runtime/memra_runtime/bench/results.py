"""Everything memra-bench measured; each number's unit is in its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memra_runtime.bench.measure import Floor, Times


@dataclass(frozen=True)
class ProgramResult:
    """One program at one row count."""

    name: str
    rows_count: int
    launches_count: int
    time: Times
    bytes: int
    flops: int
    bandwidth_gb_s: float
    compute_gflop_s: float
    floor_ms: float
    over_floor_ratio: float


@dataclass(frozen=True)
class RoundResult:
    """One round at one depth. draft + verify + rest + gaps = round."""

    depth_tokens: int
    draft_ms: float
    verify_ms: float
    rest_ms: float
    gaps_ms: float
    round_ms: float
    plain_ratio: float
    floor_ms: float
    over_floor_ratio: float
    break_even_accepted_tokens: float
    #: None at depth 0: there is nothing to accept.
    break_even_acceptance_ratio: float | None


@dataclass(frozen=True)
class KernelResult:
    """All launches of one kernel in a program, alone. `of` is the weight it reads first, if any."""

    program: str
    rows_count: int
    name: str
    of: str
    launches_count: int
    time_ms: float
    launch_us: float
    bytes: int
    bandwidth_gb_s: float
    floor_share_ratio: float


@dataclass(frozen=True)
class ContextResult:
    """One sequence at another length of context: `plain`, or a round of `depth_tokens` drafts."""

    context_tokens: int
    sequence: str
    depth_tokens: int
    time: Times
    floor_ms: float
    over_floor_ratio: float
    #: Against the plain step at this context.
    plain_ratio: float
    #: Against the same sequence at the context of all other tables.
    growth_ratio: float


@dataclass(frozen=True)
class Counted:
    """What a round costs the host, as counted: graph launches (CUDA) or calls (CPU), and reads."""

    launches_ratio: float
    reads_ratio: float


@dataclass(frozen=True)
class Fit:
    """round(k) = plain + fixed + per_draft * k, by least squares over the depths from 1."""

    plain_ms: float
    fixed_ms: float
    per_draft_ms: float
    draft_step_ms: float
    verify_row_ms: float
    residual_ms: float


@dataclass(frozen=True)
class ForcedResult:
    """A round of the largest depth in which a given number of drafts is right."""

    accepted_tokens: int
    time: Times
    speed_tok_s: float
    speedup_ratio: float


@dataclass(frozen=True)
class StreamResult:
    """A whole generation. `mode` is `plain`, `depth K` or `spec policy`."""

    mode: str
    speed_tok_s: float
    min_tok_s: float
    max_tok_s: float
    speedup_ratio: float
    acceptance_ratio: float
    tokens_per_round_ratio: float
    rounds_count: int
    #: Rounds that verified 0, 1, ... drafts, and those whose chain was ended by doubt.
    rounds_at_depth_count: tuple[int, ...] = ()
    cut_rounds_count: int = 0


@dataclass(frozen=True)
class BenchResult:
    """The whole measurement."""

    artifact: str
    target: str
    machine: str
    pinned: bool
    threads_count: int
    context_tokens: int
    new_tokens: int
    repeat_count: int
    floor: Floor
    programs: tuple[ProgramResult, ...]
    rounds: tuple[RoundResult, ...]
    fit: Fit
    forced: tuple[ForcedResult, ...]
    forced_spread_ratio: float
    streams: tuple[StreamResult, ...]
    prompt_tok_s: float
    plain_step_ms: float
    #: How a round runs here, in the device's words, and what it was counted to take.
    rounds_run: str
    per_round: Counted
    #: CUDA only.
    kernels: tuple[KernelResult, ...] = ()
    #: The lengths that were asked for.
    contexts: tuple[ContextResult, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def table(self) -> Iterator[tuple[str, str, str, float]]:
        """Every number as (section, item, quantity, value): the lines of the CSV file."""
        parts: list[tuple[str, str, Any]] = [
            ("floor", "", self.floor), ("fit", "", self.fit), ("per round", "", self.per_round),
        ]  # fmt: skip
        parts += [("program", f"{p.name} x{p.rows_count}", p) for p in self.programs]
        parts += [("round", f"depth {r.depth_tokens}", r) for r in self.rounds]
        parts += [("forced", f"accepted {f.accepted_tokens}", f) for f in self.forced]
        parts += [("stream", s.mode, s) for s in self.streams]
        parts += [("kernel", f"{k.program} {k.name}", k) for k in self.kernels]
        parts += [
            ("context", f"{c.context_tokens} {c.sequence} {c.depth_tokens}", c)
            for c in self.contexts
        ]
        yield "prompt", "", "speed_tok_s", self.prompt_tok_s
        for section, item, record in parts:
            for name, value in _numbers(dataclasses.asdict(record)):
                yield section, item, name, value


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, (int, float)):
            yield name, value

"""The tables of memra-bench, with the meaning of each number below them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from memra_runtime.bench.measure import Floor
from memra_runtime.bench.results import BenchResult, KernelResult, ProgramResult, RoundResult

_TIMES = {
    "cpu": """\
time          median of all repeats, with the shortest and longest, after a warm-up; one core""",
    "cuda": """\
time          median of all repeats, with the shortest and the longest, after a warm-up; of a
              program (prefill aside) on the GPU's own clock, as a graph of its own""",
}
_FLOORS = {
    "cpu": """\
floor         NumPy copy, reads plus writes: of a large array (memory) or of as many bytes as the
              weights have (cached); cached is the basis where the weights fit the last cache""",
    "cuda": """\
floor         a copy of a large array within the GPU's memory, reads plus writes
kernel        all launches of one kernel in a program, one after another, without the others;
              `of` is the weight it reads first; of floor: its GB/s over those of the floor""",
}
_WHOLE = """\
draft, verify, rest
              programs of a round launched one by one; rest: begin, accept, rollback, commit, adapt
gaps          round launched whole, until the host has its result, less the sum of its programs;
              below zero, launching whole saves
x plain       round over the plain step: the tokens a round must give to break even
break even    accepted drafts, and their share of the drafted, at which a round is as fast as plain
fixed         what a round costs beyond the plain step before its first draft
accepted      accepted / drafted;  tokens a round: accepted drafts plus the one from the target
tok/s         tokens after the first over decoding time, the prompt left out"""
_MOVES = """\
moves         bytes a run must read and write at this context, weights and caches included
GB/s, Gflop/s moves and arithmetic over the median time
x floor       median time over the floor: moves at the floor's bandwidth"""
_CONTEXTS = """\
x short       time over that at the context of the tables above; caches are filled with noise"""


def render(result: BenchResult) -> str:
    """All tables, as text of at most 110 columns."""
    parts = [_head(result), _programs(result), *_kernels(result), _rounds(result), _forced(result)]
    parts += [_contexts(result)] if result.contexts else []
    return "\n\n".join([*parts, _streams(result), definitions(result)])


def definitions(r: BenchResult) -> str:
    """What each number of this report means."""
    kind = r.target.partition(":")[0]
    parts = [_TIMES[kind], _MOVES, _FLOORS[kind], _WHOLE, *([_CONTEXTS] if r.contexts else [])]
    return "\n".join(parts)


def _head(r: BenchResult) -> str:
    threads = f", {r.threads_count} thread" if r.target == "cpu" else ""
    per_round = (
        f"{r.per_round.launches_ratio:.2f} launches, {r.per_round.reads_ratio:.2f} host reads"
    )
    return (
        f"{r.artifact} on {r.target}: {r.machine}{threads}"
        f"{', pinned to one core' if r.pinned else ''}\n"
        f"context {r.context_tokens} tokens, {r.new_tokens} new tokens, {r.repeat_count} repeats\n"
        f"{_floor(r.floor)}\n"
        f"rounds: {r.rounds_run}; counted a round: {per_round}"
    )


def _floor(floor: Floor) -> str:
    if floor.cached_gb_s is None or floor.matmul_gflop_s is None or floor.cache_bytes is None:
        return f"floor: memory {floor.memory_gb_s:,.1f} GB/s"
    fits = (
        f"weights ({_size(floor.weights_bytes)}) and arena ({_size(floor.arena_bytes)}) fit the "
        f"last cache ({_size(floor.cache_bytes)}): the floor is the cached copy"
        if floor.basis == "cached"
        else f"weights ({_size(floor.weights_bytes)}) are streamed from memory"
    )
    return (
        f"floor: memory {floor.memory_gb_s:.1f} GB/s, cached {floor.cached_gb_s:.1f} GB/s, "
        f"float32 matrix product {floor.matmul_gflop_s:.0f} Gflop/s\n{fits}"
    )


def _programs(r: BenchResult) -> str:
    head = ("program", "rows", "launches", "time ms", "min", "max", "moves", "GB/s", "Mflop",
            "Gflop/s", "floor ms", "x floor")  # fmt: skip
    rows = [_program(p) for p in r.programs if p.flops]
    rest = [p for p in r.programs if not p.flops]
    if rest:
        median, least, most = (
            sum(getattr(p.time, f"{k}_ms") for p in rest) for k in ("median", "min", "max")
        )
        count = str(sum(p.launches_count for p in rest))
        rows.append(["rest", "", count, f"{median:.4f}", f"{least:.4f}", f"{most:.4f}",
                     _size(sum(p.bytes for p in rest)), "", "", "", "", ""])  # fmt: skip
    return table(head, rows)


def _program(p: ProgramResult) -> list[str]:
    t = p.time
    return [
        p.name, str(p.rows_count), str(p.launches_count), f"{t.median_ms:.3f}", f"{t.min_ms:.3f}",
        f"{t.max_ms:.3f}", _size(p.bytes), f"{p.bandwidth_gb_s:.1f}", f"{p.flops / 1e6:.1f}",
        f"{p.compute_gflop_s:.1f}", f"{p.floor_ms:.3f}", f"{p.over_floor_ratio:.2f}",
    ]  # fmt: skip


def _kernels(r: BenchResult) -> Iterator[str]:
    """One table a program, slowest kernel first; what takes less than 1% is one line."""
    whole = {(p.name, p.rows_count): p.time.median_ms for p in r.programs}
    for (program, rows), found in groupby(r.kernels, lambda k: (k.program, k.rows_count)):
        members = list(found)
        total = sum(k.time_ms for k in members)
        small = [k for k in members if k.time_ms < total / 100]
        head = (f"kernel of {program}, {rows} row{'' if rows == 1 else 's'}", "of", "launches",
                "us each", "ms", "moves", "GB/s", "of floor")  # fmt: skip
        lines = [_kernel(k) for k in members if k not in small]
        lines += [_kernel_sum(f"{len(small)} smaller", small)] if small else []
        lines.append(_kernel_sum("sum", members))
        yield table(head, lines) + f"\nas one graph: {whole[program, rows]:.3f} ms"


def _kernel_sum(name: str, members: Sequence[KernelResult]) -> list[str]:
    return [name, "", str(sum(k.launches_count for k in members)), "",
            f"{sum(k.time_ms for k in members):.3f}", _size(sum(k.bytes for k in members)),
            "", ""]  # fmt: skip


def _kernel(k: KernelResult) -> list[str]:
    speeds = [f"{k.bandwidth_gb_s:,.0f}", f"{k.floor_share_ratio:.0%}"] if k.bytes else ["", ""]
    return [k.name, k.of, str(k.launches_count), f"{k.launch_us:.2f}", f"{k.time_ms:.3f}",
            _size(k.bytes), *speeds]  # fmt: skip


def _contexts(r: BenchResult) -> str:
    head = ("other contexts", "", "time ms", "min", "max", "x short", "x plain", "floor ms",
            "x floor")  # fmt: skip
    rows = [
        [f"{c.context_tokens:,} tokens",
         c.sequence if c.sequence == "plain" else f"depth {c.depth_tokens}",
         f"{c.time.median_ms:.3f}", f"{c.time.min_ms:.3f}", f"{c.time.max_ms:.3f}",
         f"{c.growth_ratio:.3f}", f"{c.plain_ratio:.2f}", f"{c.floor_ms:.3f}",
         f"{c.over_floor_ratio:.2f}"]
        for c in r.contexts
    ]  # fmt: skip
    return table(head, rows)


def _rounds(r: BenchResult) -> str:
    head = ("round", "draft ms", "verify ms", "rest ms", "gaps ms", "round ms", "x plain",
            "x floor", "break even")  # fmt: skip
    fit = r.fit
    return (
        table(head, [_round(x) for x in r.rounds])
        + f"\nplain step {r.plain_step_ms:.3f} ms. round(k) = plain {fit.plain_ms:.3f} + fixed "
        f"{fit.fixed_ms:.3f} + {fit.per_draft_ms:.3f} k ms,\n"
        f"{fit.per_draft_ms:.3f} being a draft step of {fit.draft_step_ms:.3f} and a row of verify "
        f"of {fit.verify_row_ms:.3f}; off by {fit.residual_ms:.3f} ms at most"
    )


def _round(x: RoundResult) -> list[str]:
    share = x.break_even_acceptance_ratio
    even = f"{x.break_even_accepted_tokens:.2f} = {share:.0%}" if share is not None else "-"
    return [
        f"depth {x.depth_tokens}", f"{x.draft_ms:.3f}", f"{x.verify_ms:.3f}", f"{x.rest_ms:.4f}",
        f"{x.gaps_ms:.4f}", f"{x.round_ms:.3f}", f"{x.plain_ratio:.2f}",
        f"{x.over_floor_ratio:.2f}", even,
    ]  # fmt: skip


def _forced(r: BenchResult) -> str:
    depth = len(r.forced) - 1
    head = (f"depth {depth}, forced", "round ms", "min", "max", "tok/s", "x plain speed")
    rows = [
        [f"{f.accepted_tokens} accepted", f"{f.time.median_ms:.3f}", f"{f.time.min_ms:.3f}",
         f"{f.time.max_ms:.3f}", f"{f.speed_tok_s:,.0f}", f"{f.speedup_ratio:.2f}"]
        for f in r.forced
    ]  # fmt: skip
    spread = f"\nthe time of a round varies by {r.forced_spread_ratio:.1%} with what is accepted"
    return table(head, rows) + spread


def _streams(r: BenchResult) -> str:
    head = ("end to end", "tok/s", "min", "max", "x plain", "accepted", "tokens a round", "rounds")
    rows = [
        [s.mode, f"{s.speed_tok_s:,.0f}", f"{s.min_tok_s:,.0f}", f"{s.max_tok_s:,.0f}",
         f"{s.speedup_ratio:.2f}", f"{s.acceptance_ratio:.1%}", f"{s.tokens_per_round_ratio:.2f}",
         str(s.rounds_count)]
        for s in r.streams
    ]  # fmt: skip
    chosen = [
        f"\n{s.mode}: {depths_text(s.rounds_at_depth_count, s.cut_rounds_count)}"
        for s in r.streams
        if s.mode == "spec policy"
    ]
    return table(head, rows) + "".join(chosen) + f"\nprompt: {r.prompt_tok_s:,.0f} tok/s"


def depths_text(rounds: Sequence[int], cuts: int) -> str:
    """Rounds by the drafts they verified, and how many chains doubt has ended, if any."""
    used = ", ".join(f"{depth}: {count}" for depth, count in enumerate(rounds) if count)
    doubt = f"; {cuts} chains were ended by doubt" if cuts else ""
    return f"rounds by drafts  {used}{doubt}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need; the first to the left, numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _size(count: int) -> str:
    if count < 1 << 10:
        return f"{count} B"
    if count < 1 << 20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 1 << 30 else f"{count / 2**30:.2f} GiB"

"""The tables of memra-bench, with the meaning of each number below them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memra_runtime.bench.results import BenchResult, ProgramResult, RoundResult

DEFINITIONS = """\
time          median of all repeats, with the shortest and the longest; one core, after a warm-up
moves         bytes a run must read and write at this context, weights and caches included
GB/s, Gflop/s moves and arithmetic over the median time
x floor       median time over the floor: moves at the floor's bandwidth
floor         NumPy copy, reads plus writes: of a large array (memory) or of as many bytes as the
              weights have (cached); cached is the basis where the weights fit the last cache
draft, verify, rest
              programs of a round launched one by one; rest: begin, accept, rollback, commit, adapt
gaps          round launched whole less the sum of its programs; below zero, launching whole saves
x plain       round over the plain step: the tokens a round must give to break even
break even    accepted drafts, and their share of the drafted, at which a round is as fast as plain
fixed         what a round costs beyond the plain step before its first draft
accepted      accepted / drafted;  tokens a round: accepted drafts plus the one from the target
tok/s         tokens after the first over decoding time, the prompt left out"""


def render(result: BenchResult) -> str:
    """All tables, as text of at most 100 columns."""
    parts = [_head(result), _programs(result), _rounds(result), _forced(result), _streams(result)]
    return "\n\n".join([*parts, DEFINITIONS])


def _head(r: BenchResult) -> str:
    floor = r.floor
    fits = (
        f"weights ({_size(floor.weights_bytes)}) and arena ({_size(floor.arena_bytes)}) fit the "
        f"last cache ({_size(floor.cache_bytes)}): the floor is the cached copy"
        if floor.basis == "cached"
        else f"weights ({_size(floor.weights_bytes)}) are streamed from memory"
    )
    return (
        f"{r.artifact} on {r.target}: {r.cpu}, {r.threads_count} thread"
        f"{', pinned to one core' if r.pinned else ''}\n"
        f"context {r.context_tokens} tokens, {r.new_tokens} new tokens, {r.repeat_count} repeats\n"
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
        rows.append(["rest", "", str(len(rest)), f"{median:.4f}", f"{least:.4f}", f"{most:.4f}",
                     _size(sum(p.bytes for p in rest)), "", "", "", "", ""])  # fmt: skip
    return table(head, rows)


def _program(p: ProgramResult) -> list[str]:
    t = p.time
    return [
        p.name, str(p.rows_count), str(p.launches_count), f"{t.median_ms:.3f}", f"{t.min_ms:.3f}",
        f"{t.max_ms:.3f}", _size(p.bytes), f"{p.bandwidth_gb_s:.1f}", f"{p.flops / 1e6:.1f}",
        f"{p.compute_gflop_s:.1f}", f"{p.floor_ms:.3f}", f"{p.over_floor_ratio:.2f}",
    ]  # fmt: skip


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
    return table(head, rows) + f"\nprompt: {r.prompt_tok_s:,.0f} tok/s"


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

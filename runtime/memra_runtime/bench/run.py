"""Run the whole measurement on a loaded model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memra_runtime.bench.kernels import kernel_results
from memra_runtime.bench.measure import measure_floor, quiet_core
from memra_runtime.bench.results import BenchResult, KernelResult, StreamResult
from memra_runtime.bench.rounds import (
    RoundClock,
    context_results,
    fit_rounds,
    forced_results,
    program_results,
    round_result,
)
from memra_runtime.bench.timers import KernelTimer, timer_for
from memra_runtime.device import Device
from memra_runtime.errors import fail
from memra_runtime.session import Policy, Session


@dataclass(frozen=True)
class Options:
    """What a bench may be told. No depths: 0, 1, 3 and 5 as far as compiled, and the largest.

    `contexts` are other numbers of committed tokens at which to time rounds as well.
    """

    ids: tuple[int, ...]
    max_new: int = 128
    depths: tuple[int, ...] = ()
    repeat: int = 50
    stream_repeat: int = 7
    threads: int = 1
    contexts: tuple[int, ...] = ()


def run_bench(
    device: Device, options: Options, tell: Callable[[str, str], None] | None = None
) -> BenchResult:
    """Measure floor, programs, rounds, and whole generations. Raises: MemraError."""
    say = tell or (lambda _label, _text: None)
    manifest, policy = device.manifest, Policy.of(device.manifest)
    depths = chosen_depths(options.depths, policy)
    session = Session(device, policy)
    # behind the prompt there must be room for the widest program
    widest = max(p.rows for p in manifest.programs)
    session.prime(options.ids, max(options.max_new, widest + 2))
    check_contexts(options.contexts, session.capacity - policy.cap - 1)
    timer = timer_for(device)
    with quiet_core(pin=manifest.target == "cpu") as core:
        say("bench", "floor of this machine")
        floor = measure_floor(manifest, timer.copy_gb_s())
        say("bench", f"{len(depths) + 1} ways to generate, {options.stream_repeat} times each")
        tokens, streams, prompt_speed = measure_streams(device, options, depths)
        say("bench", f"rounds and programs, {options.repeat} times each")
        session.policy = policy.fixed(policy.cap)
        session.prime(options.ids)
        clock = RoundClock(session, timer)
        clock.sweep(options.repeat)
        prefill = clock.prefill([tokens[0]] * 64, options.repeat)
        forced = forced_results(clock, clock.forced(tokens, options.repeat))
        per_round = clock.counted()
        programs = program_results(clock, prefill, manifest, floor)
        rounds, fit = tuple(round_result(clock, k, floor) for k in depths), fit_rounds(clock)
        kernels: tuple[KernelResult, ...] = ()
        if isinstance(timer, KernelTimer):
            say("bench", "each kernel alone")
            kernels = kernel_results(manifest, timer, floor, clock.context, clock.verifying)
        if options.contexts:
            say("bench", f"{len(options.contexts)} other lengths of context")
        contexts = context_results(clock, options.contexts, depths, options.repeat, floor)
    times = [f.time.median_ms for f in forced]
    return BenchResult(
        manifest.name, manifest.target, timer.name, core is not None, options.threads,
        len(options.ids), options.max_new, options.repeat, floor, programs, rounds, fit, forced,
        (max(times) - min(times)) / statistics.median(times), streams, prompt_speed,
        clock.plain().median_ms, device.runs("round"), per_round, kernels, contexts,
    )  # fmt: skip


def check_contexts(contexts: Sequence[int], most: int) -> None:
    """Refuse lengths behind which no round fits. Raises: MemraError."""
    wrong = [n for n in contexts if not 0 < n <= most]
    if wrong:
        fail(
            "context-full",
            f"there is no room for a round behind {wrong[0]:,} tokens of context",
            "--context",
            hints=(f"give 1 to {most:,}, or raise `runtime.max_context` and compile again",),
        )


def chosen_depths(given: Sequence[int], policy: Policy) -> tuple[int, ...]:
    """The depths to report, in order. Raises: MemraError for one that is not compiled."""
    wanted = given or [k for k in (0, 1, 3, 5) if k <= policy.cap] + [policy.cap]
    return tuple(sorted({policy.fixed(k).cap for k in wanted}))


def measure_streams(
    device: Device, options: Options, depths: Sequence[int]
) -> tuple[list[int], tuple[StreamResult, ...], float]:
    """Generate in every way, interleaved; returns the plain stream, the results, prompt speed."""
    policy = Policy.of(device.manifest)
    modes = {"plain": ("plain", policy.fixed(0))}
    modes |= {f"depth {k}": ("round", policy.fixed(k)) for k in depths}
    if policy.adaptive:
        modes["spec policy"] = ("round", policy)
    count = max(options.max_new, policy.cap + 2)
    speeds: dict[str, list[float]] = {name: [] for name in modes}
    prompts, counts, plain = [], {}, list[int]()
    for turn in range(options.stream_repeat + 1):
        for name, (sequence, chosen) in modes.items():
            session = Session(device, chosen)
            session.prime(options.ids, count)
            found = list(session.generate(count, sequence=sequence))
            plain = plain or found
            if found != plain:
                fail(
                    "diverged",
                    f"`{name}` gives another text than plain decoding: its speed means nothing",
                    hints=("run memra-check, which says where and why",),
                )
            stats = session.stats
            if turn:  # the first turn warms up
                # the first token comes from the prompt, so it is not counted
                speeds[name].append((stats.tokens - 1) / stats.seconds)
                prompts.append(stats.prompt_tokens / stats.prompt_s)
            counts[name] = stats
    base = statistics.median(speeds["plain"])
    results = []
    for name, all_speeds in speeds.items():
        stats = counts[name]
        speed = statistics.median(all_speeds)
        results.append(
            StreamResult(
                name, speed, min(all_speeds), max(all_speeds), speed / base,
                stats.acceptance, 1 + stats.accepted / max(1, stats.rounds), stats.rounds,
                tuple(stats.rounds_at_depth), stats.cut_rounds,
            )
        )  # fmt: skip
    return plain, tuple(results), statistics.median(prompts)

"""Run all checks on a loaded model."""

from __future__ import annotations

import time
from collections.abc import Callable

from memra_runtime.check.arms import run_arms
from memra_runtime.check.exact_rows import check_forced, check_row_bits
from memra_runtime.check.report import (
    FAIL,
    NOT_APPLICABLE,
    PASS,
    Difference,
    NotApplicable,
    Outcome,
    Parted,
    Report,
    Tally,
    Verdict,
)
from memra_runtime.check.requests import check_requests
from memra_runtime.check.rig import Options, Rig
from memra_runtime.check.sessions import check_sessions
from memra_runtime.check.stepwise import check_launches
from memra_runtime.check.streams import check_stream
from memra_runtime.check.trim import check_trim
from memra_runtime.check.windows import check_windows
from memra_runtime.check.wiring import check_wiring
from memra_runtime.errors import MemraError
from memra_runtime.model import Model

Check = Callable[[Rig, Tally], object]

#: Name, what it shows, how; in the order of the report.
CHECKS: dict[str, tuple[str, Check]] = {
    "stream": (
        "plain and speculative decoding give the same tokens at every depth",
        check_stream,
    ),
    "row bits": (
        "each row of verify has the bits of the plain step: hidden row, logits, choice, caches",
        check_row_bits,
    ),
    "forced": (
        "right drafts are accepted up to the first wrong one, and leave caches as if never drafted",
        check_forced,
    ),
    "windows": (
        "the same holds where a window or a ring turns over and where the context ends",
        check_windows,
    ),
    "requests": (
        "a used session answers like a fresh one; ends of sequence and budgets cut exactly",
        check_requests,
    ),
    "sessions": (
        "bursts of any width, restored prefixes, demotion and texts in turns change nothing",
        check_sessions,
    ),
    "launches": (
        "a round launched whole leaves the bits of one launched program by program",
        check_launches,
    ),
    "trim": (
        "a trimmed head drafts tokens that it holds, the same ones in whatever row they are",
        check_trim,
    ),
    "wiring": (
        "the drafter is wired as it should be: it drafts better than when miswired on purpose",
        check_wiring,
    ),
}


def run_checks(
    model: Model, options: Options | None = None, tell: Callable[[str, str], None] | None = None
) -> Report:
    """Run every check, then every red arm. `tell(label, text)` reports progress."""
    start = time.perf_counter()
    rig = Rig(model, options or Options())
    outcomes, verdicts = [], []
    for name in checks_of(model):
        outcome, found = run_check(rig, name)
        outcomes.append(outcome)
        verdicts += found
        if tell is not None:
            tell("check", f"{name:<10} {outcome.status}  {outcome.seconds:.1f} s")
    arms = tuple(run_arms(rig, verdicts))
    return Report(
        rig.manifest.name, rig.manifest.target, tuple(p.name for p in rig.prompts), rig.max_new,
        tuple(name for name, _ in rig.policies()), tuple(outcomes), tuple(verdicts), arms,
        time.perf_counter() - start,
    )  # fmt: skip


def checks_of(model: Model) -> list[str]:
    """Names of the checks that say something of a model."""
    return [name for name in CHECKS if name != "trim" or model.trim is not None]


def run_check(rig: Rig, name: str) -> tuple[Outcome, list[Verdict]]:
    """Run one check by name; the wiring check also returns its verdicts."""
    shows, check = CHECKS[name]
    tally, start = Tally(), time.perf_counter()
    status, reason, difference, verdicts = PASS, "", None, []
    try:
        found = check(rig, tally)
        verdicts = found if isinstance(found, list) else []
    except Parted as parted:
        status, difference = FAIL, parted.difference
    except NotApplicable as none:
        status, reason = NOT_APPLICABLE, str(none)
    except MemraError as error:
        # a broken round may end in NaN logits or a full context: that is a finding, too
        status = FAIL
        difference = Difference(error.diagnostics[0].message)
    outcome = Outcome(
        name, shows, status, dict(tally.counts), tuple(tally.notes), reason, difference,
        time.perf_counter() - start,
    )  # fmt: skip
    return outcome, verdicts

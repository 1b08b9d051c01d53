"""Check `stream`: plain and speculative decoding give the same tokens."""

from __future__ import annotations

from memra_runtime.check.prompts import Prompt
from memra_runtime.check.report import Difference, Parted, Tally
from memra_runtime.check.rig import Rig, free
from memra_runtime.session import Policy


def check_stream(rig: Rig, tally: Tally) -> None:
    """Every prompt, plain through the session, then at every depth and with the spec's policy."""
    sums: dict[str, list[int]] = {}
    for prompt in rig.prompts:
        compare_stream(rig, prompt, ("plain", rig.fixed(0)), "plain")
        tally.add("tokens", rig.max_new)
        for name, policy in rig.policies():
            drafted, accepted = compare_stream(rig, prompt, (name, policy))
            total = sums.setdefault(name, [0, 0])
            total[0] += drafted
            total[1] += accepted
            tally.add("tokens", rig.max_new)
            tally.add("runs")
    shares = [f"{100 * a / d:.1f}% at {name}" for name, (d, a) in sums.items() if d]
    tally.notes.append(f"accepted of drafted: {', '.join(shares)}")


def compare_stream(
    rig: Rig, prompt: Prompt, setting: tuple[str, Policy], sequence: str = "round"
) -> tuple[int, int]:
    """One generation against the plain run; returns (drafted, accepted). Raises: Parted."""
    name, policy = setting
    trace = rig.trace(prompt)
    session = rig.session(policy)
    session.prime(prompt.ids, rig.max_new)
    found = list(session.generate(rig.max_new, sequence=sequence))
    at = first_apart(trace.tokens[: rig.max_new], found)
    if at is not None:
        position = len(prompt.ids) + at
        raise Parted(
            Difference(
                "the stream has another token than plain decoding", prompt.name, name, position,
                rig.text(trace.token(position)), rig.text(found[at] if at < len(found) else None),
                trace.margin(position), first_row(rig, prompt, setting, sequence),
            )
        )  # fmt: skip
    return session.stats.drafted, session.stats.accepted


def first_apart(expected: list[int], found: list[int]) -> int | None:
    """Index of the first token that differs or is missing on one side."""
    for i, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return i
    return min(len(expected), len(found)) if len(expected) != len(found) else None


def first_row(rig: Rig, prompt: Prompt, setting: tuple[str, Policy], sequence: str) -> str:
    """Run a failing case again, row by row, to say where its bits part."""
    if sequence == "plain":
        return "not known: the plain sequence itself is not repeatable"
    try:
        rig.follow(Tally(), prompt, setting, free, sequence=sequence)
    except Parted as parted:
        d = parted.difference
        where = f" at position {d.position}" if d.position is not None else ""
        return d.first_row or f"none before {d.what}{where}"
    return "none: every row agrees, so the fault lies between the device and the caller"

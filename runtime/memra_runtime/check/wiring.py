"""Check `wiring`: an oracle for faults of the draft side, which no exactness check can see.

A drafter that reads the wrong cache or starts from the wrong hidden row still gives the right
text, only slowly. So the declared wiring is weighed against wirings that are wrong on purpose. All
are asked at the same places of the same text: rounds with forced drafts walk along the plain run,
and after each round the draft chain runs once, and what it drafts is compared with the plain run.
Each place is a pair, so a sign test decides: of the places where one side gets further, the
declared wiring must win more than chance would give (two standard deviations).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memra_runtime.check.prompts import Prompt
from memra_runtime.check.report import SIGMAS, Difference, Parted, Tally, Verdict, differ
from memra_runtime.check.rig import Rig, right_until
from memra_runtime.device import calls

#: Least share of first drafts that must be right; below it the drafter does not fit the target.
LEAST_ACCEPTANCE = 0.02
#: Tokens of each prompt along which drafts are weighed, at least; and places asked twice.
PROBED_TOKENS, ASKED_TWICE = 96, 4
#: Faults of the draft side, in words; they change drafts and must never change a token.
DRAFT_SIDE = {
    "shift_kv_target": "drafter layers read the cache of the previous layer of the same kind",
    "wrong_carry_row": "the chain starts from another row's hidden",
    "skip_remap": "the row of a trimmed head is taken for a token id",
}


@dataclass
class Probes:
    """What a wiring drafted at each place: (prompt, position) to ids and the right ones' count."""

    drafts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    right: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        return sum(self.right.values())


def draft_arms(rig: Rig) -> list[str]:
    """The draft-side faults this artifact carries."""
    return [a for a in DRAFT_SIDE if f"round_fault_{a}" in rig.manifest.sequences]


def check_wiring(rig: Rig, tally: Tally) -> list[Verdict]:
    """Weigh the declared wiring; returns its verdict against each arm. Raises: Parted."""
    prompts = {p.ids: p for p in (*rig.prompts, *rig.built_in)}.values()
    rig.learn_runs(prompts, max(rig.max_new, PROBED_TOKENS))
    declared = Probes()
    for prompt in prompts:
        probe(rig, prompt, "round", declared, careful=True)
    places = len(declared.drafts)
    first = sum(1 for n in declared.right.values() if n)
    tally.add("places", places)
    tally.add("drafts right", declared.accepted)
    tally.add("first drafts right", first)
    verdicts = []
    for arm in draft_arms(rig):
        probes = Probes()
        for prompt in prompts:
            probe(rig, prompt, f"round_fault_{arm}", probes)
        verdicts.append(weigh(arm, declared, probes))
        tally.notes += verdicts[-1].lines()
    for verdict in verdicts:
        if verdict.reversed:
            # a KV target that is wrong in the spec looks like this
            raise Parted(Difference(
                f"the spec's wiring looks wrong: with `{verdict.arm}` "
                f"({DRAFT_SIDE[verdict.arm]}) more drafts are right than as the spec declares",
                expected=f"more than {verdict.accepted} drafts right",
                found=str(verdict.declared),
            ))  # fmt: skip
    if first < LEAST_ACCEPTANCE * places:
        differ("acceptance is about zero: the drafter does not fit the target, or its wiring is "
               "wrong", f"at least {LEAST_ACCEPTANCE:.0%} of first drafts right",
               f"{first} of {places}")  # fmt: skip
    for verdict in verdicts:
        if not verdict.caught:
            differ(f"the declared wiring is not clearly better than `{verdict.arm}`; longer or "
                   "more prompts may tell", f"at least {SIGMAS:g} sigma",
                   f"{verdict.sigmas:+.1f}")  # fmt: skip
    return verdicts


def weigh(arm: str, declared: Probes, other: Probes) -> Verdict:
    """Compare place by place; both walked along the same plain runs."""
    pairs = [(declared.right[at], other.right[at]) for at in declared.right]
    apart = [at for at in declared.drafts if declared.drafts[at] != other.drafts[at]]
    example = ""
    if apart:
        prompt, position = apart[0]
        example = (
            f"prompt `{prompt}`, position {position}: declared {declared.drafts[apart[0]]}, "
            f"{arm} {other.drafts[apart[0]]}"
        )
    return Verdict(
        arm, declared.accepted, other.accepted, sum(map(len, declared.drafts.values())),
        len(pairs), sum(a > b for a, b in pairs), sum(a < b for a, b in pairs), len(apart), example,
    )  # fmt: skip


def probe(rig: Rig, prompt: Prompt, sequence: str, into: Probes, *, careful: bool = False) -> None:
    """Walk along the plain run by forced rounds; after each, see what the chain would draft.

    `careful` also asks twice at the first places, and holds the chain to leaving the caches alone.
    """
    count = max(rig.max_new, PROBED_TOKENS)
    count = max(1, min(count, rig.capacity - len(prompt.ids) - rig.cap - 1))
    trace = rig.trace(prompt, count + rig.cap + 1)
    rig.session(rig.fixed(rig.cap)).prime(prompt.ids)
    forced, end, place = (
        rig.device.plane("forced"),
        len(prompt.ids) + count,
        {"prompt": prompt.name},
    )
    step = 0
    while (position := rig.device.get("position")) < end and rig.device.get("depth") == rig.cap:
        right_until(step % min(3, rig.cap + 1), rig.vocab)(forced, trace, position, rig.cap)
        rig.device.launch(sequence)
        forced[:] = -1
        at = rig.device.get("position")
        if rig.device.get("depth") < rig.cap:
            break
        before = rig.cache.whole() if careful and not step else b""
        drafts = draft_chain(rig, sequence)
        if careful and step < ASKED_TWICE and draft_chain(rig, sequence) != drafts:
            differ("the same chain drafts other tokens the second time", drafts,
                   "other ids", position=at, **place)  # fmt: skip
        if before and rig.cache.whole() != before:
            differ("a draft chain changes the target's caches", "equal bits", "other bits",
                   position=at, **place)  # fmt: skip
        into.drafts[prompt.name, at] = drafts
        into.right[prompt.name, at] = agreeing(
            drafts, [trace.token(at + 1 + j) for j in range(rig.cap)]
        )
        step += 1


def draft_chain(rig: Rig, sequence: str) -> list[int]:
    """Run the draft part of a round and read the drafts; the next round starts over."""
    for program in calls(rig.device, sequence):
        if program.partition("_fault_")[0] not in ("begin", "draft"):
            break
        rig.device.launch(f"run_{program}")
    drafted: list[int] = rig.device.plane("batch")[1 : rig.device.get("drafted") + 1].tolist()
    return drafted


def agreeing(drafts: list[int], wanted: list[int | None]) -> int:
    """How many drafts, from the first, are the plain run's tokens."""
    for i, (a, b) in enumerate(zip(drafts, wanted, strict=True)):
        if a != b:
            return i
    return len(drafts)

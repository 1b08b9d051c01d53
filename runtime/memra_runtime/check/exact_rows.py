"""Checks `row bits` and `forced`: each row of a round, under drafts that are known in advance."""

from __future__ import annotations

from memra_runtime.check.report import Tally
from memra_runtime.check.rig import Rig, right_until


def check_row_bits(rig: Rig, tally: Tally) -> None:
    """All drafts right, at every depth: then every row of verify has a plain step to equal."""
    for prompt in rig.prompts:
        for name, policy in rig.policies():
            script = right_until(rig.cap, rig.vocab)
            rig.follow(tally, prompt, (f"{name}, all drafts right", policy), script)


def check_forced(rig: Rig, tally: Tally) -> None:
    """The first wrong draft at every place of the chain, and nowhere."""
    prompts = rig.prompts[:1] if rig.options.quick else rig.prompts
    for prompt in prompts:
        for wrong in range(rig.cap + 1):
            name = f"depth {rig.cap}, first wrong draft {wrong + 1}"
            if wrong == rig.cap:
                name = f"depth {rig.cap}, all drafts right"
            setting = (name, rig.fixed(rig.cap))
            rig.follow(tally, prompt, setting, right_until(wrong, rig.vocab))
            tally.add("runs")

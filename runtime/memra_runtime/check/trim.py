"""Check `trim`: a trimmed head drafts tokens, not rows.

The map from rows to tokens is on the draft side, where no exactness check sees it. But it does not
matter in which row a token is: with all rows in another order, map and weights alike, the same
tokens must be drafted. That holds only if the map is applied, to the right ids, and if a row that
is written while the model runs is the row that the kernels read.
"""

from __future__ import annotations

import numpy as np

from memra_runtime.check.report import NotApplicable, Tally, differ
from memra_runtime.check.rig import Rig, right_until
from memra_runtime.check.wiring import draft_chain

#: Places of each prompt where drafts are compared.
PLACES = 12


def check_trim(rig: Rig, tally: Tally, sequence: str = "round") -> None:
    """Draft along the plain runs twice: with the rows as they are, and in reverse order."""
    trim = rig.model.trim
    if trim is None:
        raise NotApplicable("the drafter's head holds every token")
    rig.learn_runs(
        rig.prompts, PLACES + rig.cap + 1
    )  # so that learned rows are among those that move
    before = _drafts(rig, sequence)
    order = list(range(trim.used))[::-1]
    trim.permute(order)
    try:
        after = _drafts(rig, sequence)
    finally:
        trim.permute(order)  # its own inverse
    held = set(trim.ids[: trim.used].tolist())
    for (prompt, position), drafts in before.items():
        place = {"prompt": prompt, "position": position}
        strange = [token for token in drafts if token not in held]
        if strange:
            differ("a trimmed head drafts a token that it does not hold", "one of its tokens",
                   rig.text(strange[0]), **place)  # fmt: skip
        if drafts != after[prompt, position]:
            differ("with its rows in another order, a trimmed head drafts other tokens", drafts,
                   after[prompt, position], **place)  # fmt: skip
    again = _drafts(rig, sequence)
    if again != before:
        differ("a trimmed head drafts other tokens once its rows are back in order", "the same",
               "others")  # fmt: skip
    tally.add("places", len(before))
    tally.add("rows moved", trim.used)
    tally.notes.append(f"{len(np.unique(np.concatenate(list(before.values()))))} tokens drafted")


def _drafts(rig: Rig, sequence: str) -> dict[tuple[str, int], list[int]]:
    """What the chain drafts at places of the plain runs, by prompt and position."""
    found: dict[tuple[str, int], list[int]] = {}
    script, forced = right_until(0, rig.vocab), rig.device.plane("forced")
    for prompt in rig.prompts:
        room = rig.capacity - len(prompt.ids) - rig.cap - 1
        trace = rig.trace(prompt, max(1, min(PLACES, room)) + rig.cap + 1)
        rig.session(rig.fixed(rig.cap)).prime(prompt.ids)
        for _ in range(min(PLACES, room)):
            position = rig.device.get("position")
            found[prompt.name, position] = draft_chain(rig, sequence)
            script(forced, trace, position, rig.device.get("depth"))
            rig.device.launch(sequence)  # of wrong drafts: one token further
            forced[:] = -1
    if not found:
        raise NotApplicable("the context is too short for a round of the largest depth")
    return found

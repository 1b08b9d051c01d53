"""The `round:` section: how deep to draft and what to accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from memra_compiler.layers.params import Params, Problem, param
from memra_runtime.artifact import MAX_DEPTH


class DepthFloor(Params):
    """The least draft depth after a miss; a deep context usually wants a lower one.

    It is a bet that the next round does better. After `patience` rounds in a row without an
    accepted draft the floor is 1 until one is accepted: a drafter that is always wrong then costs
    one draft step a round and no more.

    Starting points, measured on another engine with the gemma4 family against floor 1: in a short
    chat, floor 4 gained 16% on the 31B and 20% on the 12B, floor 2 gained 7% on the 26B; at 1,736
    tokens of context the 31B was faster with 1 again. Such numbers hold for the kernels they were
    measured with, so measure yours.
    """

    example: ClassVar[str] = "floor: {short: 4, deep: 1, boundary: 1024}\n"

    short: int = param(
        1, ge=1, le=MAX_DEPTH, unit="tokens", doc="Floor below `boundary` committed tokens."
    )
    deep: int = param(
        1, ge=1, le=MAX_DEPTH, unit="tokens", doc="Floor from `boundary` committed tokens on."
    )
    boundary: int = param(
        1024, ge=0, unit="tokens", doc="Committed tokens at which `deep` replaces `short`."
    )
    patience: int = param(
        4, ge=1, unit="rounds", doc="Rounds without an accepted draft that the floor outlasts."
    )


def _initial(values: Mapping[str, Any]) -> Any:
    return values.get("max", 1)


class Depth(Params):
    """How many tokens a round drafts.

    With `policy: accepted_plus_one` a round that accepted m drafts is followed by one of depth
    m + 1, held between the floor and `max`. The depth never changes a token.
    """

    example: ClassVar[str] = (
        "depth: {max: 5, policy: accepted_plus_one, floor: {short: 4, deep: 1, boundary: 1024}}\n"
    )

    max: int = param(
        ge=1, le=MAX_DEPTH, unit="tokens", doc="Largest depth; programs are compiled for it."
    )
    policy: Literal["accepted_plus_one", "fixed"] = param(
        "accepted_plus_one", doc="How the next depth follows from this round; `fixed` is `max`."
    )
    floor: DepthFloor = param(
        factory=DepthFloor, default_words="1 everywhere", doc="The least depth after a miss."
    )
    initial: int = param(
        factory=_initial,
        default_words="`max`",
        ge=1,
        le=MAX_DEPTH,
        unit="tokens",
        doc="Depth of the first round.",
    )

    def check(self) -> Iterator[Problem]:
        bounded = {
            ("floor", "short"): self.floor.short,
            ("floor", "deep"): self.floor.deep,
            ("initial",): self.initial,
        }
        for path, value in bounded.items():
            if value > self.max:
                yield Problem(
                    path,
                    f"`{'.'.join(path)}` is {value}, above the largest depth {self.max}",
                    label=f"must be at most {self.max}",
                    because=((("max",), "`max`"),),
                )


class RoundPolicy(Params):
    """One round: draft, verify, accept."""

    depth: Depth = param(doc="How many tokens a round drafts.")
    accept: Literal["greedy"] = param(
        "greedy",
        doc="`greedy`: keep the drafts that equal the target's argmax, so that the text is that "
        "of plain greedy decoding.",
    )

"""The `round:` section: how deep to draft and what to accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from memra_compiler.layers.params import Params, Problem, param
from memra_runtime.artifact import MAX_DEPTH


class DepthFloor(Params):
    """The least draft depth after a miss; a deep context usually wants a lower one.

    It is a bet that the next round does better. After `patience` rounds in a row without an
    accepted draft the depth is `least` until one is accepted. With 1, a drafter that is always
    wrong costs one draft step a round and no more. With 0 rounds rest: they are plain steps, and
    after `probe` of them one draft is tried again, so that a text that the drafter knows brings
    it back.

    A high floor that holds in short contexts only is `{short: 4, deep: 1}`; a mild one that holds
    everywhere states both. Starting points, measured on another engine with the gemma4 family
    against floor 1: in a short chat, floor 4 gained 16% on the 31B and 20% on the 12B, floor 2
    gained 7% on the 26B; at 1,736 tokens of context the 31B was faster with 1 again. Such numbers
    hold for the kernels they were measured with, so measure yours.
    """

    example: ClassVar[str] = "floor: {short: 4, deep: 1, boundary: 1024}\n"

    short: int = param(
        1, ge=1, le=MAX_DEPTH, unit="tokens", doc="Floor below `boundary` committed tokens."
    )
    deep: int = param(
        1, ge=1, le=MAX_DEPTH, unit="tokens", doc="Floor from `boundary` committed tokens on."
    )
    boundary: int = param(
        1024,
        ge=0,
        unit="tokens",
        doc="Committed tokens from which on a context is deep: `deep` replaces `short`, and "
        "`confidence.in_round` may act.",
    )
    patience: int = param(
        4, ge=1, unit="rounds", doc="Rounds without an accepted draft that the floor outlasts."
    )
    least: int = param(1, ge=0, le=1, unit="tokens", doc="Depth once `patience` has run out.")
    probe: int = param(
        16,
        ge=1,
        unit="rounds",
        doc="With `least: 0`, rounds without a draft before one is tried again.",
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


class InRound(Params):
    """The cut: a draft below `threshold` ends the chain of its own round.

    It saves the draft steps that would follow, and their rows of the verify. `when` says in which
    rounds: `after_miss_and_deep` is from `depth.floor.boundary` committed tokens on, after a round
    with a rejected draft. Deep texts with acceptance below 0.9 gained 1 to 3% that way on another
    engine; `always` lost 1 to 6% in short chats.
    """

    example: ClassVar[str] = "in_round: {threshold: 0.7, when: after_miss_and_deep}\n"

    threshold: float = param(0.7, gt=0, le=1, doc="Confidence below which a draft is doubtful.")
    when: Literal["never", "after_miss_and_deep", "always"] = param(
        "never", doc="Rounds in which a doubtful draft ends the chain."
    )
    doubtful: Literal["keep", "drop"] = param(
        "keep",
        doc="The doubtful draft itself: verified all the same, for it is made already; or dropped, "
        "unless it is the first.",
    )


class Confidence(Params):
    """What a drafter's doubt does: how sure it is of a draft may end a chain.

    The confidence of a draft is its softmax probability over the rows of the draft head. It is
    computed only if one of the gates is armed; it changes depths, never a token. A confidence that
    equals its threshold is not below it.
    """

    example: ClassVar[str] = (
        "confidence: {next_round: 0.3, in_round: {threshold: 0.7, when: after_miss_and_deep}}\n"
    )

    next_round: float = param(
        0.0,
        ge=0,
        le=1,
        doc="If draft f (from 0) is the first of a round below this, the next round drafts at "
        "most f + 1 tokens, or the floor where that is more. 0: off.",
    )
    in_round: InRound = param(
        factory=InRound, default_words="never", doc="Whether doubt ends the chain of its own round."
    )
    first: Literal["draft", "may_skip"] = param(
        "draft",
        doc="With `in_round.doubtful: drop`: whether the first draft always stays, or may be "
        "dropped too. A round that drops it is a plain step.",
    )

    @property
    def armed(self) -> bool:
        """Whether any gate reads confidences."""
        return self.next_round > 0 or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether a round may end its own chain."""
        return self.in_round.when != "never"

    def check(self) -> Iterator[Problem]:
        drops = self.cuts and self.in_round.doubtful == "drop"
        if self.first == "may_skip" and not drops:
            yield Problem(
                ("first",),
                "`first: may_skip` drops doubtful first drafts, and none is dropped here",
                label="nothing to skip",
                because=((("in_round",), "`in_round`, which drops none,"),),
                hint="`in_round: {when: always, doubtful: drop}` would drop them",
            )


class RoundPolicy(Params):
    """One round: draft, verify, accept."""

    depth: Depth = param(doc="How many tokens a round drafts.")
    confidence: Confidence = param(
        factory=Confidence,
        default_words="no gate armed",
        doc="What a drafter's doubt in its own drafts does to depths.",
    )
    accept: Literal["greedy"] = param(
        "greedy",
        doc="`greedy`: keep the drafts that equal the target's argmax, so that the text is that "
        "of plain greedy decoding.",
    )

    def check(self) -> Iterator[Problem]:
        if self.confidence.next_round > 0 and self.depth.policy == "fixed":
            yield Problem(
                ("confidence", "next_round"),
                "`next_round` bounds the next depth, and depths are fixed",
                label="has no effect",
                because=((("depth", "policy"), "`fixed`"),),
                hint="`depth.policy: accepted_plus_one` lets depths change",
            )

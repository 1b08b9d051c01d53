"""The chained drafter: one token a step, a hidden state carried from step to step.

Source: the gemma4 assistant (transformers `models/gemma4_assistant`, llama.cpp `draft-mtp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

from memra_compiler.drafters.base import DrafterParams, DraftPlace, DraftPositions
from memra_compiler.drafters.head import Chosen, TrimmableHead
from memra_compiler.ir.types import TensorType
from memra_compiler.layers.build import ProgramBuilder
from memra_compiler.layers.params import Params, Problem, Seq, param
from memra_compiler.ops.activation import Concat, SoftCap
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.chain import DraftToken
from memra_compiler.ops.clusters import ClusterLogits, ClusterToken, TopClusters
from memra_compiler.ops.confidence import Confidence, WeighDraft
from memra_compiler.ops.embed import Embed
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.state import Positions, ReadRow, ReadTokens, WriteRows


class ChainedInput(Params):
    """What enters the first layer: the listed vectors side by side, through `pre_projection`."""

    example: ClassVar[str] = "input: {concat: [target_embed, carry]}\n"

    concat: Seq[Literal["target_embed", "carry"]] = param(
        min_length=1,
        doc="`target_embed`: the scaled row of the target's embedding table; `carry`: the carried "
        "hidden state. Both, in the order of the columns of `pre_projection`.",
    )

    def check(self) -> Iterator[Problem]:
        if sorted(self.concat) != ["carry", "target_embed"]:
            yield Problem(
                ("concat",),
                "`concat` must list `target_embed` and `carry` once each",
                label=f"found {', '.join(self.concat)}",
                hint="the gemma4 assistant has `concat: [target_embed, carry]`",
            )


class ChainedCarry(Params):
    """The hidden state that goes from one step to the next."""

    example: ClassVar[str] = "carry: {from: target.hidden_post_norm, via: post_projection}\n"

    source: Literal["target.hidden_post_norm"] = param(
        alias="from",
        doc="Where the first step's hidden state comes from: the vector the target's head "
        "multiplies, after the output norm.",
    )
    via: Literal["post_projection"] = param(
        doc="What turns a step's output, after the drafter's own output norm, into the next "
        "step's hidden state."
    )


class CentroidHead(Params):
    """Only the tokens of the best clusters get logits; the others cannot be drafted.

    `centroids` scores the clusters, `token_ordering` lists the tokens of each. Costs less than the
    full head and now and then drafts another token; the text stays the same.
    """

    example: ClassVar[str] = "centroids: {count: 2048, active: 32}\n"

    count: int = param(auto=True, ge=1, doc="Clusters; must divide the vocabulary.")
    active: int = param(auto=True, ge=1, doc="Best clusters whose tokens get logits.")

    def check(self) -> Iterator[Problem]:
        if self.active > self.count:
            yield Problem(
                ("active",),
                f"{self.active} of {self.count} clusters cannot be active",
                label=f"must be at most {self.count}",
                because=((("count",), "`count`"),),
            )

    def logits(
        self, b: ProgramBuilder, x: str, table: str, width: int, vocab: int
    ) -> tuple[str, Callable[[str], str]]:
        """Emit the logits of the best clusters; returns them, and what makes a place a token."""
        at, module, size = ("drafter", "head", "centroids"), b.module, vocab // self.count
        shape = (self.count, width)
        centroids = module.weight("drafter", "centroids", shape, "matrix", path=at)
        ordering = module.weight("drafter", "ordering", (vocab,), "ids", path=at)
        scores = b.linear(x, centroids, label="drafter.centroids", path=at)
        best = b.one(TopClusters(self.active), scores, label="drafter.clusters", path=at)
        head = ClusterLogits(size)
        logits = b.one(head, x, best, ordering, table, label="drafter.head", path=at)

        def token(place: str) -> str:
            pick = ClusterToken(size)
            return b.one(pick, place, best, ordering, label="drafter.cluster_token", path=at)

        return logits, token


class ChainedHead(TrimmableHead):
    """From the last hidden state of a chained drafter to a token."""

    example: ClassVar[str] = "head: {tied: true, centroids: {count: 2048, active: 32}}\n"

    centroids: CentroidHead | None = param(
        None,
        auto=True,
        default_words="absent: the whole vocabulary",
        doc="Look only at the tokens of the best clusters. A file that has clusters may be used "
        "with the full head, too; `auto` uses them if there are any.",
    )

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        others = {"trim": self.trim, "map": self.map, "table": self.table == "target"}
        for name, given in others.items():
            if self.centroids and given:
                yield Problem(
                    (name,),
                    "clusters list tokens of the drafter's whole table",
                    label="leave it out",
                    because=((("centroids",), "`centroids`"),),
                )

    def choose(self, b: ProgramBuilder, place: DraftPlace, x: str, width: int) -> Chosen:
        """Emit the choice of a token for the normed row `x [1, width]`."""
        if self.centroids is None:
            return super().choose(b, place, x, width)
        at, module = ("drafter", "head"), b.module
        role = "embed" if self.tied else "head"
        table = module.weight("drafter", role, (place.vocab, width), "embed", path=at)
        logits, pick = self.centroids.logits(b, x, table, width, place.vocab)
        if self.softcap is not None:
            logits = b.one(SoftCap(self.softcap), logits, label="drafter.softcap", path=at)
        row = b.one(ArgMax(), logits, label="drafter.choice", path=at)
        return Chosen(pick(row), logits, row)


class ChainedParams(DrafterParams):
    """A small transformer run once per drafted token; it appends to no cache."""

    kind: Literal["chained"] = param(doc="`chained`: one token a step.")
    input: ChainedInput = param(doc="What enters the first layer.")
    carry: ChainedCarry = param(doc="The hidden state carried from step to step.")
    positions: DraftPositions = param(
        "anchored",
        doc="Position of the query in draft step j with N committed rows: N in every step "
        "(`anchored`, how the gemma4 assistant is trained), or N + j (`advancing`). The choice "
        "changes acceptance, never a token.",
    )
    head: ChainedHead = param(doc="From the last hidden state to logits.")

    def build(self, b: ProgramBuilder, place: DraftPlace) -> None:
        """Emit one draft step: token j of the chain to token j + 1."""
        module, width = b.module, place.target_width
        state, batch = place.state, place.batch
        anchored = "committed" if self.positions == "anchored" else "chain"
        at = ("drafter", "positions")
        position = b.one(Positions(anchored), state, label="drafter.position", path=at)
        ends = b.one(Positions("committed"), state, label="drafter.committed", path=at)
        token = b.one(ReadTokens(chain=True), batch, state, label="drafter.token")
        at = ("drafter", "input")
        parts = {
            "target_embed": b.one(
                Embed(place.embed_scale),
                token,
                "?target.embed",
                label="drafter.embed",
                path=at,
                types=(TensorType((b.rows, width)),),
            ),
            "carry": b.one(ReadRow(), place.carry, label="drafter.carry", path=at),
        }
        x = b.one(Concat(), *(parts[p] for p in self.input.concat), label="drafter.input", path=at)
        weight = module.weight("drafter", "pre_projection", (self.width, 2 * width), "matrix")
        x = b.linear(x, weight, label="drafter.pre_projection", path=at)
        for index, kind in self.layer_sequence():
            layer = place.layer(b, "drafter", index, kind, position, ends)
            x = self.layer_kinds[kind].build(layer, x)
        norm = module.weight("drafter", "output_norm", (self.width,), "norm")
        x = b.one(RMSNorm(self.norm_eps), x, norm, label="drafter.output_norm")
        chosen = self.head.choose(b, place, x, self.width)
        sure, at = "", ("round", "confidence")
        if place.weighs:  # over the rows that the head looks at
            what = (chosen.logits, chosen.row, *chosen.used)
            sure = b.one(Confidence(), *what, label="drafter.confidence", path=at)
            b.keep(sure)
        b.emit(DraftToken(), chosen.token, state, place.forced, batch, label="drafter.draft")
        if sure:
            b.emit(WeighDraft(), sure, state, label="drafter.weigh", path=at)
        via = ("drafter", "carry", "via")
        weight = module.weight("drafter", self.carry.via, (width, self.width), "matrix", path=via)
        carry = b.linear(x, weight, label="drafter.post_projection", path=via)
        b.emit(WriteRows(), carry, place.carry, label="drafter.carry_out", path=via)

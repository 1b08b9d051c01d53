"""The feed-forward part of a mixture of experts beside a dense branch.

Source: the Gemma 4 expert layers of transformers, `models/gemma4`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

from memra_compiler.layers.base import FfnParams
from memra_compiler.layers.build import LayerBuild
from memra_compiler.layers.gated_ffn import build_gated
from memra_compiler.layers.params import Path, Problem, param
from memra_compiler.ops.activation import Add
from memra_compiler.ops.experts import ExpertsDown, ExpertsGated
from memra_compiler.ops.top_experts import TopExperts


class MoeFfnParams(FfnParams):
    """A gated part that always runs, beside the few experts that a router picks for each row.

    With u the residual and z its norm, the output is
    `norm_1(dense(z)) + norm_2(sum of share_e * expert_e(pre_norm_2(u)))`, a gated part being
    `down(act(gate(x)) * up(x))`. The router's logits are `router(rms(u) * vector / sqrt(width))`;
    the shares of the chosen are their probabilities over the sum of these, times a stored scale of
    the expert, which is 1 for a file without one.
    """

    kind: ClassVar[str] = "moe"
    example: ClassVar[str] = (
        "ffn:\n"
        "  moe: {experts: 128, active: 8, expert_width: 704, dense_width: 2112, act: gelu_tanh}\n"
    )

    experts: int = param(auto=True, ge=1, doc="How many experts there are.")
    active: int = param(auto=True, ge=1, doc="How many of them a row meets.")
    expert_width: int = param(
        auto=True, ge=1, unit="elements", doc="Rows of `gate` and of `up` of an expert."
    )
    dense_width: int = param(
        auto=True, ge=1, unit="elements", doc="Rows of `gate` and of `up` of the dense branch."
    )
    act: Literal["gelu_tanh", "silu"] = param(
        auto=True, doc="Activation of every gate; `gelu_tanh` is the tanh form of GELU."
    )
    gate_up: Literal["fused", "split"] = param(
        "fused",
        auto=True,
        doc="Whether a file keeps the experts' `gate` and `up` in one tensor or in two.",
    )

    def check(self) -> Iterator[Problem]:
        if self.active > self.experts:
            yield Problem(
                ("active",),
                f"a row cannot meet {self.active} of {self.experts} experts",
                label=f"must be at most {self.experts}",
                because=((("experts",), "`experts`"),),
            )

    def row_lengths(self) -> Iterator[tuple[Path, int]]:
        yield ("expert_width",), self.expert_width
        yield ("dense_width",), self.dense_width

    def build(self, b: LayerBuild, x: str, residual: str) -> str:
        at = ("ffn", self.kind)
        dense = build_gated(b, x, self.dense_width, self.act, at)
        dense = b.norm(dense, "post_ffw_norm_1", at=at)
        routed = self._experts(b, residual, at)
        routed = b.norm(routed, "post_ffw_norm_2", at=at)
        return b.run(Add(), dense, routed, part="branches.add", at=at)

    def _experts(self, b: LayerBuild, residual: str, at: tuple[str, ...]) -> str:
        count, width = self.experts, self.expert_width
        ids, shares = self._router(b, residual, at)
        z = b.norm(residual, "pre_ffw_norm_2", at=at)
        roles = {"gate_up_exps": 2 * width} if self.gate_up == "fused" else {
            "gate_exps": width, "up_exps": width
        }  # fmt: skip
        weights = [
            b.weight(role, count * rows, b.width, stacked=count) for role, rows in roles.items()
        ]
        z = b.rows_of(z, *weights, part="experts", at=at)
        h = b.run(ExpertsGated(count, self.act), z, ids, *weights, part="experts", at=at)
        down = b.weight("down_exps", count * b.width, width, stacked=count)
        h = b.rows_of(h, down, part="experts_down", at=at)
        return b.run(ExpertsDown(count), h, ids, shares, down, part="experts_down", at=at)

    def _router(self, b: LayerBuild, residual: str, at: tuple[str, ...]) -> tuple[str, str]:
        """The experts of each row and their shares."""
        factor = 1 / math.sqrt(b.width)
        g = b.norm(residual, "router_norm", at=at, factor=factor)
        # every file keeps a router as precise as its norms
        router = b.weight("router", self.experts, b.width, use="norm")
        logits = b.linear(g, router, part="router", at=at)
        scale = b.weight("expert_scale", self.experts, use="norm", made=("ones",))
        ids, shares = b.emit(TopExperts(self.active), logits, scale, part="top_experts", at=at)
        return ids, shares

"""The gated feed-forward part of a dense layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from memra_compiler.layers.base import FfnParams
from memra_compiler.layers.build import LayerBuild
from memra_compiler.layers.params import Path, param
from memra_compiler.ops.activation import GateMul


class GatedFfnParams(FfnParams):
    """`down(act(gate(x)) * up(x))`."""

    kind: ClassVar[str] = "gated"
    example: ClassVar[str] = "ffn: {gated: {width: 21504, act: gelu_tanh}}\n"

    width: int = param(auto=True, ge=1, unit="elements", doc="Rows of `gate` and of `up`.")
    act: Literal["gelu_tanh", "silu"] = param(
        auto=True, doc="Activation of the gate; `gelu_tanh` is the tanh form of GELU."
    )

    def row_lengths(self) -> Iterator[tuple[Path, int]]:
        yield ("width",), self.width

    def build(self, b: LayerBuild, x: str) -> str:
        at = ("ffn", self.kind)
        gate = b.linear(x, b.weight("gate", self.width, b.width), part="gate", at=at)
        up = b.linear(x, b.weight("up", self.width, b.width), part="up", at=at)
        both = b.run(GateMul(self.act), gate, up, part="act", at=at)
        return b.linear(both, b.weight("down", b.width, self.width), part="down", at=at)

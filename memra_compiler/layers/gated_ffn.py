"""The gated feed-forward part of a dense layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from memra_compiler.layers.base import FfnParams
from memra_compiler.layers.build import LayerBuild
from memra_compiler.layers.params import Path, param
from memra_compiler.ops.activation import GateMul


def build_gated(b: LayerBuild, x: str, width: int, act: str, at: tuple[str, ...]) -> str:
    """Emit `down(act(gate(x)) * up(x))`; `at` is the path inside the layer kind."""
    gate = b.linear(x, b.weight("gate", width, b.width), part="gate", at=at)
    up = b.linear(x, b.weight("up", width, b.width), part="up", at=at)
    both = b.run(GateMul(act), gate, up, part="act", at=at)
    return b.linear(both, b.weight("down", b.width, width), part="down", at=at)


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

    def build(self, b: LayerBuild, x: str, residual: str) -> str:
        return build_gated(b, x, self.width, self.act, ("ffn", self.kind))

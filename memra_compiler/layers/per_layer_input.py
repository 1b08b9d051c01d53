"""The end of a layer that reads its slice of the per-layer embeddings."""

from __future__ import annotations

from typing import ClassVar, Literal

from memra_compiler.layers.build import LayerBuild
from memra_compiler.layers.params import Params, param
from memra_compiler.ops.activation import Add
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.per_layer import PerLayerGate


class PerLayerInput(Params):
    """`x + norm(project(act(gate(x)) * slice))`, after the feed-forward part, before `out_scale`.

    `slice` is what `target.per_layer_embed` holds for this layer; `gate` reads `x` as it is,
    without a norm.
    """

    example: ClassVar[str] = "per_layer_input: {act: gelu_tanh}\n"

    act: Literal["gelu_tanh", "silu"] = param(auto=True, doc="Activation of the gate.")

    def build(self, b: LayerBuild, x: str) -> str:
        """Emit this part for the residual `x [T, width]`; returns the next residual."""
        at, size = ("per_layer_input",), b.per_layer_width
        gate = b.linear(x, b.weight("per_layer_gate", size, b.width), part="per_layer_gate", at=at)
        op = PerLayerGate(b.index, self.act)
        own = b.run(op, gate, b.per_layer_inputs(), part="per_layer_slice", at=at)
        weight = b.weight("per_layer_proj", b.width, size)
        y = b.linear(own, weight, part="per_layer_proj", at=at)
        norm = b.weight("per_layer_post_norm", b.width, use="norm")
        y = b.run(RMSNorm(b.eps), y, norm, part="per_layer_norm", at=at)
        return b.run(Add(), x, y, part="per_layer.add", at=at)

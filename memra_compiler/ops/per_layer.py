"""Per-layer embeddings: a second, narrow embedding of a token, of which each layer reads a slice.

Source: transformers `models/gemma4` (`project_per_layer_inputs` and the end of the decoder layer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import ACTIVATIONS, activate, activate_reference
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, fixed, op, width
from memra_compiler.ops.emit import LANES, Buffer, Kernel
from memra_compiler.ops.norm import check_heads, emit_rms, rms_class, rms_reference
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import activate as te_activate
from memra_compiler.ops.te_math import f32, fma, reciprocal_sqrt, te

#: The factor that keeps the variance of a sum of two.
MEAN = math.sqrt(0.5)


@op("per_layer_mix")
@dataclass(frozen=True)
class PerLayerMix(Op):
    """(rmsnorm(context) * weight + token) / sqrt(2), each slice of P columns normed by itself.

    Shapes: context, token [T, L * P], weight [P] -> [T, L * P].
    """

    eps: float = 1e-6

    operands = (Operand("context"), Operand("token"), Operand("weight", "$"))
    adds_planes = ("context",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        context, token, weight = types
        expect(context == token, self, f"context {context} and token {token} differ")
        check_heads(self, context, fixed(self, weight, 0))
        return (token,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        context, token, weight = arrays
        slices = context[:rows].reshape(rows, -1, len(weight))
        normed = rms_reference(slices, self.eps, weight).reshape(rows, -1)
        return ((normed + token[:rows]) * MEAN,)

    def numeric_class(self, *types: TensorType) -> str:
        return f"{rms_class(types[2].max_shape[0])}; fma with the token, times sqrt(1/2)"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        context, token, weight, out = buffers
        (size,) = weight.type.max_shape
        with k.loop(k.rows * (width(self, token.type) // size)) as row:
            inverse = k.splat(emit_rms(k, context, row * size, size, self.eps))
            with k.loop(size // LANES) as i:
                at = row * size + i * LANES
                normed = k.load(context, at, LANES) * inverse
                value = k.fma(normed, k.floats(weight, i * LANES), k.load(token, at, LANES))
                k.store(out, at, value * k.splat(MEAN), LANES)

    def compute(self, *operands: TeOperand) -> Any:
        (size,) = operands[2].type.max_shape
        slices = math.prod(operands[0].type.max_shape[1:]) // size
        x, token = (operand.tensor(slices, size) for operand in operands[:2])
        weight = operands[2].tensor()
        k = te.reduce_axis((0, size), "k")

        def square(row: Any, part: Any) -> Any:
            return te.sum(x[row, part, k] * x[row, part, k], k)

        squares = te.compute(x.shape[:2], square, "squares")

        def inverse(row: Any, part: Any) -> Any:
            return reciprocal_sqrt(fma(squares[row, part], f32(1.0 / size), f32(self.eps)))

        inverses = te.compute(x.shape[:2], inverse, "inverse")

        def mixed(row: Any, part: Any, col: Any) -> Any:
            normed = x[row, part, col] * inverses[row, part]
            return fma(normed, weight[col], token[row, part, col]) * f32(MEAN)

        return te.compute(x.shape, mixed, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        wide, narrow = TensorType((3, 192)), TensorType((5, 512))
        return [
            Sample((wide, wide, TensorType((32,)))),
            Sample((narrow, narrow, TensorType((256,), "bf16")), (("eps", 1e-3),), rows=5),
        ]


@op("per_layer_gate")
@dataclass(frozen=True)
class PerLayerGate(Op):
    """act(gate) times one layer's slice of the per-layer embeddings.

    Shapes: gate [T, P], inputs [T, L * P] -> [T, P]; `layer` counts slices from 0.
    """

    layer: int = 0
    act: str = "gelu_tanh"

    operands = (Operand("gate"), Operand("inputs"))
    adds_planes = ("gate",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        gate, inputs = types
        size = width(self, gate)
        expect(self.act in ACTIVATIONS, self, f"unknown activation {self.act}")
        expect(gate.dtype == inputs.dtype == "f32", self, f"takes f32, got {gate}, {inputs}")
        expect(size % LANES == 0, self, f"row width must be a multiple of {LANES}, got {gate}")
        slices, rest = divmod(width(self, inputs), size)
        expect(rest == 0, self, f"{inputs} is not whole slices of {size}")
        expect(0 <= self.layer < slices, self, f"slice {self.layer} of {slices} does not exist")
        return (gate,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        gate, inputs = arrays
        own = inputs[:rows].reshape(rows, -1, gate.shape[1])[:, self.layer]
        return (activate_reference(self.act, gate[:rows]) * own,)

    def numeric_class(self, *types: TensorType) -> str:
        return f"f32 {self.act}, exp by polynomial"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        gate, inputs, out = buffers
        size, stride = width(self, gate.type), width(self, inputs.type)
        with k.loop(k.rows) as t, k.loop(size // LANES) as i:
            value = activate(k, self.act, k.let(k.load(gate, t * size + i * LANES, LANES)))
            own = k.load(inputs, t * stride + self.layer * size + i * LANES, LANES)
            k.store(out, t * size + i * LANES, value * own, LANES)

    def compute(self, *operands: TeOperand) -> Any:
        gate, inputs = (operand.tensor() for operand in operands)
        start = self.layer * math.prod(operands[0].type.max_shape[1:])

        def value(row: Any, col: Any) -> Any:
            return te_activate(self.act, gate[row, col]) * inputs[row, start + col]

        return te.compute(gate.shape, value, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        types = (TensorType((3, 32)), TensorType((3, 160)))
        return [Sample(types, (("layer", layer), ("act", act)))
                for layer, act in ((0, "gelu_tanh"), (4, "silu"))]  # fmt: skip

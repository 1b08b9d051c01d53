"""Matrix products of a few rows with stored weights: the ops that move the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import activate, activate_reference
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, fixed, op, type_bytes
from memra_compiler.ops.emit import LANES, Buffer, Kernel
from memra_compiler.ops.formats import WEIGHT_FORMATS, decode, step

#: Output rows decoded together, and the most inputs decoded at once (16 KB of float32: L1).
TILE_ROWS = 4
TILE_INPUTS = 1024
#: Rows of activations a kernel can be asked for; sizes its accumulators.
MAX_ROWS = 16


def tile_inputs(inputs: int, formats: Sequence[str]) -> int:
    """Inputs decoded at once: the largest divisor of `inputs` that fits the tile."""
    unit = math.lcm(*(step(f) for f in formats))
    best = unit
    for size in range(unit, min(inputs, TILE_INPUTS) + 1, unit):
        if inputs % size == 0:
            best = size
    return best


def scratch_for(inputs: int, formats: Sequence[str]) -> int:
    """Scratch floats of `emit_linear`: decoded weights and accumulators."""
    return TILE_ROWS * tile_inputs(inputs, formats) + MAX_ROWS * TILE_ROWS * LANES


def emit_linear(k: Kernel, x: Buffer, w: Buffer, y: Buffer, scratch: Buffer) -> None:
    """y[t, n] = sum over i of x[t, i] * w[n, i].

    Four weight rows are decoded once into L1 and then meet every row of x, so the cost of decoding
    does not grow with T. The code a row of x meets is the same whatever T is: lane l sums inputs
    l, l+16, ... in order with fused multiply-adds, and the sixteen lanes meet in a fixed tree.
    """
    outputs, inputs = w.type.max_shape
    tile = tile_inputs(inputs, [w.format])
    block = step(w.format)
    sums = TILE_ROWS * tile

    def accumulator(t: object, r: int) -> object:
        return sums + (t * TILE_ROWS + r) * LANES  # type: ignore[operator]

    with k.loop(outputs // TILE_ROWS) as n:
        with k.loop(k.rows) as t:
            for r in range(TILE_ROWS):
                k.store(scratch, accumulator(t, r), k.splat(0.0), LANES)
        with k.loop(inputs // tile) as part:
            with k.loop(TILE_ROWS) as r, k.loop(tile // block) as b:
                for chunk in range(block // LANES):
                    value = decode(k, w, n * TILE_ROWS + r, inputs, part * tile + b * block, chunk)
                    k.store(scratch, r * tile + b * block + chunk * LANES, value, LANES)
            with k.loop(k.rows) as t:
                held = k.local(TILE_ROWS * LANES)
                for r in range(TILE_ROWS):
                    k.store(held, r * LANES, k.load(scratch, accumulator(t, r), LANES), LANES)
                with k.loop(tile // LANES) as i:
                    xi = k.let(k.load(x, t * inputs + part * tile + i * LANES, LANES))
                    for r in range(TILE_ROWS):
                        wi = k.load(scratch, r * tile + i * LANES, LANES)
                        total = k.fma(wi, xi, k.load(held, r * LANES, LANES))
                        k.store(held, r * LANES, total, LANES)
                for r in range(TILE_ROWS):
                    k.store(scratch, accumulator(t, r), k.load(held, r * LANES, LANES), LANES)
        with k.loop(k.rows) as t:
            for r in range(TILE_ROWS):
                total = k.sum(k.load(scratch, accumulator(t, r), LANES))
                k.store(y, t * outputs + n * TILE_ROWS + r, total)


def check(op: Op, x: TensorType, w: TensorType) -> int:
    """Check that `w [out, in]` fits `x [T, in]`; returns out."""
    expect(len(w.shape) == 2, op, f"a weight must be a matrix, got {w}")
    outputs, inputs = fixed(op, w, 0), fixed(op, w, 1)
    expect(x.shape[1:] == (inputs,), op, f"weight {w} takes {inputs} inputs, got {x}")
    expect(x.dtype == "f32", op, f"activations must be f32, got {x}")
    expect(w.dtype in WEIGHT_FORMATS, op, f"cannot read weights stored as {w.dtype}")
    expect(inputs % 32 == 0, op, f"inputs must be a multiple of 32, got {inputs}")
    expect(outputs % TILE_ROWS == 0, op, f"outputs must be a multiple of {TILE_ROWS}: {outputs}")
    return outputs


def linear_class(w: TensorType) -> str:
    inputs = w.max_shape[-1]
    return f"f32 x {w.dtype}->f32, fma over {inputs // LANES} steps of 16 lanes, tree of 16"


def linear_cost(rows: int, x: TensorType, *weights: TensorType) -> Cost:
    moved, flops = type_bytes(x, rows), 0
    for w in weights:
        outputs, inputs = w.max_shape
        moved += w.nbytes + rows * outputs * 4
        flops += 2 * rows * outputs * inputs
    return Cost(moved, flops)


def _weight_samples(inputs: int, outputs: int, rows: int) -> list[tuple[TensorType, TensorType]]:
    x = TensorType((rows, inputs))
    formats = [f for f in WEIGHT_FORMATS if inputs % step(f) == 0]
    return [(x, TensorType((outputs, inputs), f)) for f in formats]


@op("linear")
@dataclass(frozen=True)
class Linear(Op):
    """Multiply each row by a stored matrix: y = W x.

    Shapes: x [T, K] f32, w [N, K] in any weight format -> [T, N] f32. K % 32 == 0, N % 4 == 0.
    """

    operands = (Operand("x"), Operand("w", "$"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, w = types
        return (TensorType((x.shape[0], check(self, x, w))),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, w = arrays
        return (x[:rows] @ w.T,)

    def numeric_class(self, *types: TensorType) -> str:
        return linear_class(types[1])

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return linear_cost(rows, *types)

    def scratch_floats(self, *types: TensorType) -> int:
        return scratch_for(types[1].max_shape[1], [types[1].dtype])

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, w, y, scratch = buffers
        emit_linear(k, x, w, y, scratch)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [*_weight_samples(256, 8, 3), *_weight_samples(1280, 4, 1)]
        cases += _weight_samples(32, 12, 9)
        return [Sample(types, rows=types[0].max_shape[0]) for types in cases]


@op("linear_group")
@dataclass(frozen=True)
class LinearGroup(Op):
    """Multiply each row by several stored matrices; one launch for q, k and v.

    Shapes: x [T, K], w_i [N_i, K] -> y_i [T, N_i].
    """

    operands = (Operand("x"), Operand("w", "$"))
    variadic = True

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, *weights = types
        return tuple(TensorType((x.shape[0], check(self, x, w))) for w in weights)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, *weights = arrays
        return tuple(x[:rows] @ w.T for w in weights)

    def numeric_class(self, *types: TensorType) -> str:
        return "; ".join(linear_class(w) for w in types[1:])

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return linear_cost(rows, *types)

    def scratch_floats(self, *types: TensorType) -> int:
        return max(scratch_for(w.max_shape[1], [w.dtype]) for w in types[1:])

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, *rest = buffers
        scratch = rest.pop()
        weights, outputs = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        for w, y in zip(weights, outputs, strict=True):
            emit_linear(k, x, w, y, scratch)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        w = [TensorType((n, 256), f) for n, f in ((16, "q8_0"), (8, "q4_k"), (8, "q6_k"))]
        return [Sample((TensorType((5, 256)), *w), rows=5), Sample((TensorType((1, 256)), w[0]), rows=1)]


@op("gated_linear")
@dataclass(frozen=True)
class GatedLinear(Op):
    """The first half of a gated feed-forward: act(W_gate x) * (W_up x).

    Shapes: x [T, K], gate and up [F, K] -> [T, F].
    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    act: str = "gelu_tanh"

    operands = (Operand("x"), Operand("gate", "$"), Operand("up", "$"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, gate, up = types
        outputs = check(self, x, gate)
        expect(check(self, x, up) == outputs, self, f"gate {gate} and up {up} differ in width")
        expect(outputs % LANES == 0, self, f"width must be a multiple of {LANES}, got {outputs}")
        return (TensorType((x.shape[0], outputs)),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, gate, up = arrays
        return (activate_reference(self.act, x[:rows] @ gate.T) * (x[:rows] @ up.T),)

    def numeric_class(self, *types: TensorType) -> str:
        return f"{self.act}({linear_class(types[1])}) * ({linear_class(types[2])})"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return linear_cost(rows, *types)

    def scratch_floats(self, *types: TensorType) -> int:
        _, gate, up = types
        outputs, inputs = gate.max_shape
        return scratch_for(inputs, [gate.dtype, up.dtype]) + MAX_ROWS * outputs

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, gate, up, y, scratch = buffers
        outputs = gate.type.max_shape[0]
        held = k.part(scratch, scratch.type.elements - MAX_ROWS * outputs, MAX_ROWS * outputs)
        emit_linear(k, x, gate, held, scratch)
        emit_linear(k, x, up, y, scratch)
        with k.loop(k.rows * (outputs // LANES)) as i:
            value = activate(k, self.act, k.let(k.load(held, i * LANES, LANES)))
            k.store(y, i * LANES, value * k.load(y, i * LANES, LANES), LANES)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, w = TensorType((3, 64)), TensorType((32, 64), "q8_0")
        down = TensorType((32, 64), "q4_0")
        return [
            Sample((x, w, down), (("act", "gelu_tanh"),)),
            Sample((x, w, w), (("act", "silu"),), rows=1),
        ]



"""Matrix products of a few rows with stored weights: the ops that move the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import activate, activate_reference
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, fixed, op, type_bytes
from memra_compiler.ops.cuda import AnyLaunch, CudaArch
from memra_compiler.ops.cuda_products import NARROW_ROWS, product_launches
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel, Register
from memra_compiler.ops.formats import WEIGHT_FORMATS, Chunks, decode_step, prefetch_step, step
from memra_compiler.ops.quantise import BLOCK, ROUNDINGS, emit_values
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import activate as te_activate
from memra_compiler.ops.te_math import te

#: Output rows computed together, and the most inputs decoded at once (16 KB of float32: L1).
TILE_ROWS = 4
TILE_INPUTS = 1024
#: Rows of activations that meet a decoded weight while a register holds it, largest first.
X_TILES = (4, 2, 1)
#: Rows of activations a kernel can be asked for; sizes its accumulators.
MAX_ROWS = 16
#: The largest block decoded four times over: one of 256 is slow to compile and gains 5 %.
MAX_UNROLLED = 32
#: Formats of the activations.
ROW_FORMATS = ("f32", *ROUNDINGS)


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

    Four weight rows are computed together. A single row of x meets the weights as they are decoded.
    Several rows share the decoding: it goes to scratch (L1), where up to four rows of x at a time
    meet it. Either way lane l of a sum adds inputs l, l+16, ... in order with fused multiply-adds
    and the lanes meet in a fixed tree, so the bits of a row do not depend on how many there are.
    """
    if step(w.format) > MAX_UNROLLED:
        _many_rows(k, x, w, y, scratch)
        return
    with k.when(k.rows == 1):
        _one_row(k, x, w, y)
    with k.when(k.rows > 1):
        _many_rows(k, x, w, y, scratch)


def _decode_ahead(k: Kernel, w: Buffer, row: Expr, number: Expr) -> Chunks:
    """Decode a step of a weight row, and have memory fetch the same step of the next tile."""
    prefetch_step(k, w, row + TILE_ROWS, number)
    return decode_step(k, w, row, number)


def tile_sums(k: Kernel, x: Buffer, x_at: Expr, w: Buffer, row: Expr) -> list[Expr]:
    """Lane sums of the four weight rows from `row` on with the row of x that begins at `x_at`."""
    inputs, block = w.type.max_shape[1], step(w.format)

    def meet(rows: Sequence[Chunks], b: Expr, sums: Sequence[Register]) -> None:
        for c in range(block // LANES):
            xi = k.let(k.load(x, x_at + b * block + c * LANES, LANES))
            for chunk, s in zip(rows, sums, strict=True):
                s.set(k.fma(chunk(c), xi, s.get()))

    if block <= MAX_UNROLLED:
        sums = [k.register(k.splat(0.0)) for _ in range(TILE_ROWS)]
        with k.loop(inputs // block) as b:
            meet([_decode_ahead(k, w, row + r, b) for r in range(TILE_ROWS)], b, sums)
        return [s.get() for s in sums]
    held = k.local(TILE_ROWS * LANES)
    with k.loop(TILE_ROWS) as r:
        one = k.register(k.splat(0.0))
        with k.loop(inputs // block) as b:
            meet([_decode_ahead(k, w, row + r, b)], b, [one])
        k.store(held, r * LANES, one.get(), LANES)
    return [k.load(held, r * LANES, LANES) for r in range(TILE_ROWS)]


def _one_row(k: Kernel, x: Buffer, w: Buffer, y: Buffer) -> None:
    with k.loop(w.type.max_shape[0] // TILE_ROWS) as n:
        sums = tile_sums(k, x, k.index(0), w, n * TILE_ROWS)
        k.store(y, n * TILE_ROWS, k.sum4(sums), TILE_ROWS)


def _many_rows(k: Kernel, x: Buffer, w: Buffer, y: Buffer, scratch: Buffer) -> None:
    outputs, inputs = w.type.max_shape
    block, tile = step(w.format), tile_inputs(inputs, [w.format])
    chunks, parts = block // LANES, inputs // tile
    # LLVM must not see this count: it would unroll the loop over a tile and lift all its loads of
    # weights out of the loop over rows, into registers that do not exist.
    steps = k.let(tile // LANES + (k.rows >> 20))

    with k.loop(outputs // TILE_ROWS) as n, k.loop(parts) as part:
        with k.loop(TILE_ROWS) as r, k.loop(tile // block) as b:
            chunk = _decode_ahead(k, w, n * TILE_ROWS + r, part * (tile // block) + b)
            for c in range(chunks):
                at = ((b * chunks + c) * TILE_ROWS + r) * LANES
                k.store(scratch, at, chunk(c), LANES)
        first = k.index(0)
        for size in X_TILES:
            count = k.let(k.floor_div(k.rows - first, size))
            with k.loop(count) as group:
                t0 = k.let(first + group * size)
                _meet(k, x, w, y, scratch, n, part, t0, size, steps)
            first = k.let(first + count * size)


def _meet(
    k: Kernel, x: Buffer, w: Buffer, y: Buffer, scratch: Buffer,
    n: Expr, part: Expr, t0: Expr, size: int, steps: Expr,
) -> None:  # fmt: skip
    """Multiply `size` rows of x, from `t0` on, by the decoded tile: part `part` of weight rows n.

    Between parts the accumulators rest behind the tile.
    """
    outputs, inputs = w.type.max_shape
    tile = tile_inputs(inputs, [w.format])
    parts = inputs // tile

    def resting(t: int, r: int) -> Expr:
        return TILE_ROWS * tile + ((t0 + t) * TILE_ROWS + r) * LANES

    def begin(t: int, r: int) -> Register:
        held = k.load(scratch, resting(t, r), LANES)
        return k.register(k.select(part > 0, held, k.splat(0.0)))

    sums = [[begin(t, r) for r in range(TILE_ROWS)] for t in range(size)]
    with k.loop(steps) as i:
        at = k.let(t0 * inputs + part * tile + i * LANES)
        xs = [k.let(k.load(x, at + t * inputs, LANES)) for t in range(size)]
        for r in range(TILE_ROWS):
            wi = k.let(k.load(scratch, (i * TILE_ROWS + r) * LANES, LANES))
            for xi, row in zip(xs, sums, strict=True):
                row[r].set(k.fma(wi, xi, row[r].get()))
    for t, row in enumerate(sums):
        if parts > 1:
            for r, total in enumerate(row):
                k.store(scratch, resting(t, r), total.get(), LANES)
        with k.when(part == parts - 1):
            at = (t0 + t) * outputs + n * TILE_ROWS
            k.store(y, at, k.sum4([s.get() for s in row]), TILE_ROWS)


def check(op: Op, x: TensorType, w: TensorType) -> int:
    """Check that `w [out, in]` fits `x [T, in]`; returns out."""
    expect(len(w.shape) == 2, op, f"a weight must be a matrix, got {w}")
    outputs, inputs = fixed(op, w, 0), fixed(op, w, 1)
    expect(x.shape[1:] == (inputs,), op, f"weight {w} takes {inputs} inputs, got {x}")
    expect(x.dtype in ROW_FORMATS, op, f"activations must be {', '.join(ROW_FORMATS)}, got {x}")
    expect(w.dtype in WEIGHT_FORMATS, op, f"cannot read weights stored as {w.dtype}")
    expect(inputs % 32 == 0, op, f"inputs must be a multiple of 32, got {inputs}")
    expect(outputs % TILE_ROWS == 0, op, f"outputs must be a multiple of {TILE_ROWS}: {outputs}")
    return outputs


def linear_class(x: TensorType, w: TensorType) -> str:
    """Numeric class of a product of rows `x` with weight `w`."""
    inputs = w.max_shape[-1]
    return f"{x.dtype} x {w.dtype}->f32, fma over {inputs // LANES} steps of 16 lanes, tree of 16"


def rows_scratch(x: TensorType) -> int:
    """Scratch floats for rows that are widened before they meet a weight."""
    return MAX_ROWS * x.max_shape[1] if x.dtype != "f32" else 0


def widen(k: Kernel, x: Buffer, scratch: Buffer, start: int) -> Buffer:
    """The rows of x as float32: x itself, or decoded to scratch from `start`."""
    if x.format == "f32":
        return x
    wide = k.part(scratch, start, rows_scratch(x.type))
    with k.loop(k.rows * (x.type.max_shape[1] // BLOCK)) as b:
        for half in range(2):
            k.store(wide, b * BLOCK + half * LANES, emit_values(k, x, b, half), LANES)
    return wide


def linear_cost(rows: int, x: TensorType, *weights: TensorType) -> Cost:
    """Bytes and operations of products of `x` with `weights`."""
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


def is_prompt(x: TensorType) -> bool:
    """Rows of float32 so many that TVM's tiles beat a warp an output."""
    return x.dtype == "f32" and x.max_shape[0] > NARROW_ROWS


def te_product(x: Any, w: Any, name: str) -> Any:
    """`name[row, n]`: the sum over k of x[row, k] * w[n, k], as a tensor expression."""
    k = te.reduce_axis((0, w.shape[1]), "k")
    return te.compute((x.shape[0], w.shape[0]), lambda row, n: te.sum(x[row, k] * w[n, k], k), name)


@op("linear")
@dataclass(frozen=True)
class Linear(Op):
    """Multiply each row by a stored matrix: y = W x.

    Shapes: x [T, K] f32, a8 or bf16, w [N, K] in any weight format -> [T, N] f32. K % 32 == 0,
    N % 4 == 0.
    """

    operands = (Operand("x"), Operand("w", "$"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, w = types
        return (TensorType((x.shape[0], check(self, x, w))),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, w = arrays
        return (x[:rows] @ w.T,)

    def numeric_class(self, *types: TensorType) -> str:
        return linear_class(*types)

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return linear_cost(rows, *types)

    def scratch_floats(self, *types: TensorType) -> int:
        x, w = types
        return scratch_for(w.max_shape[1], [w.dtype]) + rows_scratch(x)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, w, y, scratch = buffers
        rows = widen(k, x, scratch, scratch_for(w.type.max_shape[1], [w.format]))
        emit_linear(k, rows, w, y, scratch)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[AnyLaunch, ...]:
        x, w, y = types
        if is_prompt(x):
            return super().lower_cuda(arch, *types)
        return product_launches(arch, x, [w], [y])

    def compute(self, *operands: TeOperand) -> Any:
        x, w = (operand.tensor() for operand in operands)
        return te_product(x, w, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [*_weight_samples(256, 8, 3), *_weight_samples(1280, 4, 6)]
        cases += _weight_samples(32, 12, MAX_ROWS)
        for kind in ROUNDINGS:
            cases += [(replace(x, dtype=kind), w) for x, w in _weight_samples(256, 16, 5)]
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
        return "; ".join(linear_class(types[0], w) for w in types[1:])

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return linear_cost(rows, *types)

    @staticmethod
    def _product_scratch(weights: Sequence[TensorType]) -> int:
        return max(scratch_for(w.max_shape[1], [w.dtype]) for w in weights)

    def scratch_floats(self, *types: TensorType) -> int:
        x, *weights = types
        return self._product_scratch(weights) + rows_scratch(x)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, *rest = buffers
        scratch = rest.pop()
        weights, outputs = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        rows = widen(k, x, scratch, self._product_scratch([w.type for w in weights]))
        for w, y in zip(weights, outputs, strict=True):
            emit_linear(k, rows, w, y, scratch)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[AnyLaunch, ...]:
        x, *rest = types
        if is_prompt(x):
            return super().lower_cuda(arch, *types)
        half = len(rest) // 2
        return product_launches(arch, x, rest[:half], rest[half:])

    def outputs_of(self, types: int) -> int:
        return (types - 1) // 2

    def compute(self, *operands: TeOperand) -> Any:
        x, *weights = (operand.tensor() for operand in operands)
        return tuple(te_product(x, w, f"out{i}") for i, w in enumerate(weights))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        w = [TensorType((n, 256), f) for n, f in ((16, "q8_0"), (8, "q4_k"), (8, "q6_k"))]
        return [
            Sample((TensorType((5, 256)), *w), rows=5),
            Sample((TensorType((1, 256)), w[0]), rows=1),
            *(Sample((TensorType((4, 256), kind), *w), rows=4) for kind in ROUNDINGS),
        ]


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
        x, gate, up = types
        return f"{self.act}({linear_class(x, gate)}) * ({linear_class(x, up)})"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return linear_cost(rows, *types)

    def scratch_floats(self, *types: TensorType) -> int:
        x, gate, up = types
        outputs, inputs = gate.max_shape
        products = scratch_for(inputs, [gate.dtype, up.dtype])
        return products + rows_scratch(x) + MAX_ROWS * outputs

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, gate, up, y, scratch = buffers
        outputs, inputs = gate.type.max_shape
        held = k.part(scratch, scratch.type.elements - MAX_ROWS * outputs, MAX_ROWS * outputs)
        rows = widen(k, x, scratch, scratch_for(inputs, [gate.format, up.format]))
        emit_linear(k, rows, gate, held, scratch)
        emit_linear(k, rows, up, y, scratch)
        with k.loop(k.rows * (outputs // LANES)) as i:
            value = activate(k, self.act, k.let(k.load(held, i * LANES, LANES)))
            k.store(y, i * LANES, value * k.load(y, i * LANES, LANES), LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[AnyLaunch, ...]:
        x, gate, up, y = types
        if is_prompt(x):
            return super().lower_cuda(arch, *types)
        return product_launches(arch, x, [gate, up], [y], self.act)

    def compute(self, *operands: TeOperand) -> Any:
        x, *weights = (operand.tensor() for operand in operands)
        gate, up = (te_product(x, w, o) for w, o in zip(weights, ("gated", "raised"), strict=True))

        def value(row: Any, n: Any) -> Any:
            return te_activate(self.act, gate[row, n]) * up[row, n]

        return te.compute(gate.shape, value, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, w = TensorType((7, 64)), TensorType((32, 64), "q8_0")
        up = TensorType((32, 64), "q4_0")
        return [
            Sample((x, w, up), (("act", "gelu_tanh"),), rows=7),
            Sample((x, w, w), (("act", "silu"),), rows=1),
            *(Sample((replace(x, dtype=kind), w, up), rows=7) for kind in ROUNDINGS),
        ]


#: Every op that multiplies rows (its first operand) by matrices.
PRODUCTS = (Linear, LinearGroup, GatedLinear)

"""Rotary positions: the angles of a step, and their use on queries and keys.

Angles are computed once a step and layer kind, in float64, so that long contexts lose nothing and
every layer of the kind reads the same small table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, fixed, op, width
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.norm import check_heads, check_weight, emit_rms, rms_class, rms_reference
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import call, f32, f64, fma, te, tirx


@op("rope_angles")
@dataclass(frozen=True)
class RopeAngles(Op):
    """Cosines and sines of each rotary pair at each row's position.

    Pair i of a head of width d turns by `position * base^(-2i/d) / factor[i]`; pairs from
    `rotated` on do not turn. The exponent divides by the whole head width.

    Shapes: positions [T] i32, factors [d/2] f32 (optional) -> [T, 2, d/2] f32: cosines, sines.
    Source: Su et al. 2021, eq. 34; "proportional" partial rotation as in transformers, gemma4.
    """

    head_dim: int = 64
    base: float = 10000.0
    rotated: int = 0

    operands = (Operand("positions"), Operand("factors", "$"))
    variadic = True

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        positions, *factors = types
        pairs = self.head_dim // 2
        expect(positions.dtype == "i32", self, f"positions must be i32, got {positions}")
        expect(0 <= self.rotated <= pairs, self, f"rotated must be at most {pairs}")
        for f in factors:
            expect(f.shape == (pairs,), self, f"factors must be [{pairs}], got {f}")
        return (TensorType((positions.shape[0], 2, pairs)),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        positions, *factors = arrays
        pairs = np.arange(self.head_dim // 2)
        turn = np.where(pairs < self.rotated, self.base ** (-2.0 * pairs / self.head_dim), 0.0)
        for f in factors:
            turn = turn / f
        angle: Array = positions[:rows, None].astype(np.float64) * turn
        table: Array = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        return (table,)

    def numeric_class(self, *types: TensorType) -> str:
        return "f64 angle, cos and sin of the C library, rounded to f32"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        positions, *factors, out = buffers
        pairs = self.head_dim // 2
        with k.loop(k.rows) as t:
            at = k.let(k.cast(k.load(positions, t), "float64"))
            with k.loop(pairs) as i:
                exponent = k.cast(i, "float64") * k.const(
                    -2.0 / self.head_dim * math.log(self.base), "float64"
                )
                angle = at * k.extern("float64", "exp", exponent)
                for f in factors:
                    angle = angle / k.cast(k.floats(f, i, 1), "float64")
                turning = k.let(k.select(i < self.rotated, angle, k.const(0.0, "float64")))
                for part, function in enumerate(("cos", "sin")):
                    value = k.cast(k.extern("float64", function, turning), "float32")
                    k.store(out, (t * 2 + part) * pairs + i, value)

    def compute(self, *operands: TeOperand) -> Any:
        positions, *factors = (operand.tensor() for operand in operands)
        ln_base = call("log", f64(self.base), dtype="float64")

        def angle(row: Any, pair: Any) -> Any:
            exponent = pair.astype("float64") * f64(-2.0) / f64(self.head_dim) * ln_base
            turn = call("exp", exponent, dtype="float64")
            found = positions[row].astype("float64") * turn
            for f in factors:
                found = found / f[pair].astype("float64")
            return tirx.Select(pair < self.rotated, found, f64(0.0))

        def value(row: Any, half: Any, pair: Any) -> Any:
            cos, sin = (call(f, angle(row, pair), dtype="float64") for f in ("cos", "sin"))
            return tirx.if_then_else(half < 1, cos, sin).astype("float32")

        return te.compute((positions.shape[0], 2, self.head_dim // 2), value, "angles")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def positions(rng: np.random.Generator) -> Array:
            return np.array([0, 7, 100_000], np.int32)

        def factors(rng: np.random.Generator) -> Array:
            made: Array = np.concatenate([np.ones(16), np.full(16, 1e30)]).astype(np.float32)
            return made

        values = (("positions", positions), ("factors", factors))
        t, f = TensorType((3,), "i32"), TensorType((32,))
        full = (("head_dim", 64), ("base", 10000.0), ("rotated", 32))
        part = (("head_dim", 64), ("base", 1e6), ("rotated", 8))
        return [Sample((t,), part, values=values), Sample((t, f), full, values=values)]


def rope_reference(heads: Array, angles: Array) -> Array:
    """Turn `heads [T, H, d]` by `angles [T, 2, d/2]`: pairs are (i, i + d/2)."""
    half = heads.shape[-1] // 2
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    a, b = heads[..., :half], heads[..., half:]
    turned: Array = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned


def emit_rope_pair(k: Kernel, a: Expr, b: Expr, angles: Buffer, at: Expr) -> tuple[Expr, Expr]:
    """The turned halves of sixteen pairs whose cosines start at `at`."""
    pairs = angles.type.max_shape[-1]
    cos = k.let(k.load(angles, at, LANES))
    sin = k.let(k.load(angles, at + pairs, LANES))
    zero = k.splat(0.0)
    return k.fma(a, cos, zero - b * sin), k.fma(b, cos, a * sin)


def check_angles(op: Op, x: TensorType, angles: TensorType) -> int:
    """Check that rows of x are whole heads as wide as the angles; returns the head width d."""
    expect(
        len(angles.shape) == 3 and angles.shape[:2] == (x.shape[0], 2),
        op,
        f"angles must be [T, 2, d/2] for rows {x}, got {angles}",
    )
    size = 2 * fixed(op, angles, 2)
    expect(size % (2 * LANES) == 0, op, f"head width must be a multiple of {2 * LANES}: {size}")
    check_heads(op, x, size)
    return size


@op("rope")
@dataclass(frozen=True)
class Rope(Op):
    """Turn each head by its row's angles; halves pair up (i, i + d/2).

    Shapes: x [T, H * d], angles [T, 2, d/2] -> [T, H * d].
    """

    operands = (Operand("x"), Operand("angles"))
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        check_angles(self, *types)
        return (types[0],)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, angles = arrays
        heads = x[:rows].reshape(rows, -1, 2 * angles.shape[2])
        return (rope_reference(heads, angles[:rows]).reshape(rows, -1),)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32, one fma a half"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, angles, y = buffers
        size = 2 * angles.type.max_shape[2]
        heads = width(self, x.type) // size
        with k.loop(k.rows) as t, k.loop(heads) as h, k.loop(size // 2 // LANES) as i:
            at = k.let((t * heads + h) * size + i * LANES)
            a = k.let(k.load(x, at, LANES))
            b = k.let(k.load(x, at + size // 2, LANES))
            low, high = emit_rope_pair(k, a, b, angles, t * size + i * LANES)
            k.store(y, at, low, LANES)
            k.store(y, at + size // 2, high, LANES)

    def compute(self, *operands: TeOperand) -> Any:
        pairs = operands[1].type.max_shape[2]
        heads = math.prod(operands[0].type.max_shape[1:]) // (2 * pairs)
        x, turns = operands[0].tensor(heads, 2, pairs), operands[1].tensor()

        def turned(row: Any, head: Any, half: Any, pair: Any) -> Any:
            a, b = x[row, head, 0, pair], x[row, head, 1, pair]
            cos, sin = turns[row, 0, pair], turns[row, 1, pair]
            low, high = fma(a, cos, f32(0.0) - b * sin), fma(b, cos, a * sin)
            return tirx.if_then_else(half < 1, low, high)

        return te.compute(x.shape, turned, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [
            Sample((TensorType((3, h * d)), TensorType((3, 2, d // 2))))
            for h, d in ((1, 32), (3, 64), (2, 512))
        ]


@op("norm_rope")
@dataclass(frozen=True)
class NormRope(Op):
    """A head's norm with weight, then its rotation: what queries go through.

    Shapes: x [T, H * d], angles [T, 2, d/2], weight [d] -> [T, H * d].
    """

    eps: float = 1e-6

    operands = (Operand("x"), Operand("angles"), Operand("weight", "$"))
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        check_weight(self, check_angles(self, types[0], types[1]), types[2])
        return (types[0],)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, angles, weight = arrays
        heads = rms_reference(x[:rows].reshape(rows, -1, len(weight)), self.eps, weight)
        return (rope_reference(heads, angles[:rows]).reshape(rows, -1),)

    def numeric_class(self, *types: TensorType) -> str:
        return f"{rms_class(types[2].max_shape[0])}; one fma a half"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, angles, w, y = buffers
        size = w.type.max_shape[0]
        heads = width(self, x.type) // size
        with k.loop(k.rows) as t, k.loop(heads) as h:
            emit_norm_rope(k, x, (t * heads + h) * size, w, angles, t, y, (t * heads + h) * size,
                           self.eps)  # fmt: skip

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import norm_rope_launches

        return norm_rope_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [
            Sample((TensorType((3, h * d)), TensorType((3, 2, d // 2)), TensorType((d,))))
            for h, d in ((1, 32), (3, 64))
        ]


def emit_norm_rope(
    k: Kernel,
    x: Buffer,
    at: Expr,
    w: Buffer,
    angles: Buffer,
    t: Expr,
    out: Buffer | Any,
    out_at: Expr | int,
    eps: float,
) -> None:
    """Norm and rotate the head of x at `at`, and store it in `out` at `out_at`."""
    size = w.type.max_shape[0]
    half = size // 2
    at, out_at = k.let(at), k.let(k.index(out_at))
    inverse = k.splat(emit_rms(k, x, at, size, eps))
    with k.loop(half // LANES) as i:
        halves = []
        for start in (0, half):
            normed = k.load(x, at + start + i * LANES, LANES) * inverse
            halves.append(k.let(normed * k.floats(w, start + i * LANES)))
        a, b = halves
        low, high = emit_rope_pair(k, a, b, angles, t * size + i * LANES)
        k.put_floats(out, out_at + i * LANES, low)
        k.put_floats(out, out_at + half + i * LANES, high)

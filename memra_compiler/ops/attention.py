"""Keys and values: appending rows to a cache, and attending the visible ones.

A cache plane is `[kv heads, rows, d]`. Position p lives in row `p mod rows`, so a plane with as
many rows as the context is a plain cache and one with fewer is a ring; no op asks which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, op, width
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.norm import check_heads, check_weight, emit_rms, rms_class, rms_reference
from memra_compiler.ops.rope import check_angles, emit_norm_rope, rope_reference

V_NORMS = ("none", "unit")


def check_cache(op: Op, rows: TensorType, *planes: TensorType) -> int:
    """Check that planes [n, R, d] take rows [T, n * d]; returns d."""
    for plane in planes:
        expect(
            len(plane.shape) == 3 and width(op, rows) == plane.max_shape[0] * plane.max_shape[2],
            op,
            f"cache {plane} does not hold rows {rows}",
        )
    return planes[0].max_shape[2]


def store_rows_reference(plane: Array, rows: Array, positions: Array) -> None:
    """Write `rows [T, n, d]` at their positions."""
    for row, position in zip(rows, positions, strict=False):
        plane[:, int(position) % plane.shape[1]] = row.astype(plane.dtype)


def _heads(rows: Array, plane: Array) -> Array:
    return rows.reshape(len(rows), plane.shape[0], plane.shape[2])


def _slot(k: Kernel, plane: Buffer, positions: Buffer, t: Expr) -> Expr:
    return k.let(k.cast(k.load(positions, t), "int64") % plane.type.max_shape[1])


@op("kv_append")
@dataclass(frozen=True)
class KvAppend(Op):
    """Write this step's keys and values into their cache rows.

    Shapes: k, v [T, n * d], positions [T] i32, planes [n, R, d].
    """

    operands = (
        Operand("k"),
        Operand("v"),
        Operand("positions"),
        Operand("k_cache", "@", "update"),
        Operand("v_cache", "@", "update"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        k, v, positions, *planes = types
        expect(k == v, self, f"keys {k} and values {v} differ")
        expect(positions.dtype == "i32", self, f"positions must be i32, got {positions}")
        check_cache(self, k, *planes)
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        k, v, positions, k_cache, v_cache = arrays
        for plane, values in ((k_cache, k), (v_cache, v)):
            store_rows_reference(plane, _heads(values[:rows], plane), positions)
        return ()

    def numeric_class(self, *types: TensorType) -> str:
        return f"round to {types[3].dtype}"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return Cost(rows * width(self, types[0]) * 16, 0)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        keys, values, positions, k_cache, v_cache = buffers
        heads, limit, size = k_cache.type.max_shape
        with k.loop(k.rows) as t:
            slot = _slot(k, k_cache, positions, t)
            with k.loop(heads) as h, k.loop(size // LANES) as i:
                for source, plane in ((keys, k_cache), (values, v_cache)):
                    value = k.load(source, (t * heads + h) * size + i * LANES, LANES)
                    k.put_floats(plane, (h * limit + slot) * size + i * LANES, value)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [_append_sample((TensorType((3, 64)),) * 2, dtype) for dtype in ("f32", "f16")]


def _positions(rng: np.random.Generator) -> Array:
    return np.array([4, 5, 6], np.int32)  # wraps in a ring of 6 rows


def _append_sample(inputs: tuple[TensorType, ...], dtype: str, *rest: TensorType) -> Sample:
    planes = (TensorType((2, 6, 32), dtype),) * 2
    types = (*inputs, *rest, TensorType((3,), "i32"), *planes)
    return Sample(types, values=(("positions", _positions),))


@op("norm_rope_append")
@dataclass(frozen=True)
class NormRopeAppend(Op):
    """Key norm and rotation, value norm, and both into the cache: one launch.

    Shapes: k, v [T, n * d], angles [T, 2, d/2], weight [d], positions [T] i32, planes [n, R, d].
    """

    eps: float = 1e-6
    v_norm: str = "unit"

    operands = (
        Operand("k"),
        Operand("v"),
        Operand("angles"),
        Operand("weight", "$"),
        Operand("positions"),
        Operand("k_cache", "@", "update"),
        Operand("v_cache", "@", "update"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        k, v, angles, weight, positions, *planes = types
        expect(self.v_norm in V_NORMS, self, f"v_norm must be one of {V_NORMS}")
        expect(k == v, self, f"keys {k} and values {v} differ")
        expect(positions.dtype == "i32", self, f"positions must be i32, got {positions}")
        size = check_angles(self, k, angles)
        check_weight(self, size, weight)
        expect(check_cache(self, k, *planes) == size, self, f"heads of {planes[0]} are not {size}")
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        k, v, angles, weight, positions, k_cache, v_cache = arrays
        keys, values = _heads(k[:rows], k_cache), _heads(v[:rows], v_cache)
        keys = rope_reference(rms_reference(keys, self.eps, weight), angles[:rows])
        if self.v_norm == "unit":
            values = rms_reference(values, self.eps)
        store_rows_reference(k_cache, keys, positions)
        store_rows_reference(v_cache, values, positions)
        return ()

    def numeric_class(self, *types: TensorType) -> str:
        return f"{rms_class(types[3].max_shape[0])}; one fma a half; round to {types[5].dtype}"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return Cost(rows * width(self, types[0]) * 16, 0)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        keys, values, angles, w, positions, k_cache, v_cache = buffers
        heads, limit, size = k_cache.type.max_shape
        with k.loop(k.rows) as t:
            slot = _slot(k, k_cache, positions, t)
            with k.loop(heads) as h:
                at = k.let((t * heads + h) * size)
                to = k.let((h * limit + slot) * size)
                emit_norm_rope(k, keys, at, w, angles, t, k_cache, to, self.eps)
                unit = self.v_norm == "unit"
                inverse = emit_rms(k, values, at, size, self.eps) if unit else k.const(1.0)
                with k.loop(size // LANES) as i:
                    value = k.load(values, at + i * LANES, LANES) * k.splat(inverse)
                    k.put_floats(v_cache, to + i * LANES, value)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        inputs = (*(TensorType((3, 64)),) * 2, TensorType((3, 2, 16)))
        return [_append_sample(inputs, dtype, TensorType((32,))) for dtype in ("f32", "f16", "bf16")]


@op("attention")
@dataclass(frozen=True)
class Attention(Op):
    """Softmax attention of each row over the cached positions `[end - span, end)`.

    Query head h reads K/V head h // (H / n). `span` 0 means all positions from 0. Scores, softmax
    and sums are float32; position order is that of the absolute positions, so a row's bits depend
    on its own end only.

    Shapes: q [T, H * d], ends [T] i32, planes [n, R, d] -> [T, H * d].
    """

    scale: float = 1.0
    span: int = 0

    operands = (
        Operand("q"),
        Operand("ends"),
        Operand("k_cache", "@"),
        Operand("v_cache", "@"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        q, ends, k_cache, v_cache = types
        expect(k_cache == v_cache, self, f"caches {k_cache} and {v_cache} differ")
        expect(ends.dtype == "i32", self, f"ends must be i32, got {ends}")
        kv_heads, limit, size = k_cache.max_shape
        heads = check_heads(self, q, size)
        expect(heads % kv_heads == 0, self, f"{heads} query heads over {kv_heads} K/V heads")
        expect(0 <= self.span <= limit, self, f"span {self.span} exceeds the cache's {limit} rows")
        return (q,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        q, ends, k_cache, v_cache = arrays
        size = k_cache.shape[2]
        q = q[:rows].reshape(rows, -1, size)
        heads = q.shape[1]
        group = heads // len(k_cache)
        out = np.zeros((rows, heads, size))
        for t in range(rows):
            end = int(ends[t])
            first = max(0, end - self.span) if self.span else 0
            at = np.arange(first, end) % k_cache.shape[1]
            if not len(at):
                continue
            for h in range(heads):
                keys, values = (c[h // group, at].astype(np.float64) for c in (k_cache, v_cache))
                score = keys @ q[t, h] * self.scale
                weight = np.exp(score - score.max())
                out[t, h] = weight @ values / weight.sum()
        return (out.reshape(rows, heads * size),)

    def numeric_class(self, *types: TensorType) -> str:
        cache = types[2]
        return (
            f"f32 x {cache.dtype}->f32 over {cache.max_shape[2]}, 16 lanes, tree of 16; softmax f32, "
            "one split, sum by 16 lanes from the first visible position; values in position order"
        )

    def cost(self, rows: int, *types: TensorType) -> Cost:
        q, _, cache, _ = types
        size = cache.max_shape[2]
        heads = width(self, q) // size
        seen = self.span or cache.max_shape[1]
        per_row = 2 * TensorType((cache.max_shape[0], seen, size), cache.dtype).nbytes
        return Cost(per_row + 8 * rows * heads * size, 4 * rows * heads * seen * size)

    def scratch_floats(self, *types: TensorType) -> int:
        return types[2].max_shape[1] + 2 * LANES

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        q, ends, k_cache, v_cache, out, scratch = buffers
        kv_heads, limit, size = k_cache.type.max_shape
        heads = width(self, q.type) // size
        group, vectors = heads // kv_heads, size // LANES
        with k.loop(k.rows) as t:
            end = k.let(k.cast(k.load(ends, t), "int64"))
            first = k.let(k.at_least(end - self.span, 0) if self.span else end * 0)
            count, start = k.let(end - first), k.let(first % limit)
            with k.loop(heads) as h:
                plane = k.let(k.floor_div(h, group) * limit)
                row = k.let((t * heads + h) * size)

                def cached(j: Expr, plane: Expr = plane, start: Expr = start) -> Expr:
                    slot = k.let(start + j)
                    return k.let((plane + k.select(slot >= limit, slot - limit, slot)) * size)

                with k.loop(count) as j:
                    at = cached(j)
                    total = k.let(k.load(q, row, LANES) * k.floats(k_cache, at))
                    for i in range(1, vectors):
                        key = k.floats(k_cache, at + i * LANES)
                        total = k.let(k.fma(k.load(q, row + i * LANES, LANES), key, total))
                    k.store(scratch, j, k.sum(total) * k.const(self.scale))
                inverse = self._softmax(k, scratch, count)
                held = k.local(size)
                for i in range(vectors):
                    k.store(held, i * LANES, k.splat(0.0), LANES)
                with k.loop(count) as j:
                    at, weight = cached(j), k.let(k.load(scratch, j))
                    for i in range(vectors):
                        value = k.floats(v_cache, at + i * LANES)
                        total = k.fma(k.splat(weight), value, k.load(held, i * LANES, LANES))
                        k.store(held, i * LANES, total, LANES)
                for i in range(vectors):
                    value = k.load(held, i * LANES, LANES) * k.splat(inverse)
                    k.store(out, row + i * LANES, value, LANES)

    @staticmethod
    def _softmax(k: Kernel, scores: Buffer, count: Expr) -> Expr:
        """Replace scores by exp(score - max); returns 1 / their sum (0 when there are none)."""
        k.store(scores, count, k.splat(-3.0e38), LANES)
        steps = k.let(k.floor_div(count + (LANES - 1), LANES))
        best = k.local(LANES)
        k.store(best, 0, k.splat(-3.0e38), LANES)
        with k.loop(steps) as i:
            score = k.load(scores, i * LANES, LANES)
            k.store(best, 0, k.maximum(score, k.load(best, 0, LANES)), LANES)
        top = k.fold(k.load(best, 0, LANES), k.maximum)
        total = k.local(LANES)
        k.store(total, 0, k.splat(0.0), LANES)
        with k.loop(steps) as i:
            weight = k.exp(k.load(scores, i * LANES, LANES) - k.splat(top))
            k.store(scores, i * LANES, weight, LANES)
            k.store(total, 0, k.load(total, 0, LANES) + weight, LANES)
        mass = k.sum(k.load(total, 0, LANES))
        none = k.const(0.0)
        return k.let(k.select(count > 0, k.const(1.0) / mass, none))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def ends(rng: np.random.Generator) -> Array:
            return np.array([1, 17, 40], np.int32)

        def sample(heads: int, kv: int, d: int, rows: int, span: int, dtype: str) -> Sample:
            q, end = TensorType((3, heads * d)), TensorType((3,), "i32")
            plane = TensorType((kv, rows, d), dtype)
            attrs = (("scale", 1.0 / d**0.5), ("span", span))
            return Sample((q, end, plane, plane), attrs, values=(("ends", ends),))

        return [
            sample(4, 2, 64, 64, 0, "f32"),
            sample(4, 1, 128, 64, 0, "f16"),
            sample(2, 2, 32, 24, 16, "bf16"),
            sample(2, 2, 32, 24, 17, "f16"),
            sample(16, 1, 16, 40, 0, "f32"),
        ]

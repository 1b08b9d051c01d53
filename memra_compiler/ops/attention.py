"""Keys and values: appending rows to a cache, and attending the visible ones.

A cache plane is `[kv heads, rows, d]`, and `kv_rows` says what a row of each format holds. Position
p lives in row `p mod rows`, so a plane with as many rows as the context is a plain cache and one
with fewer is a ring; no op asks which. A chunk plane is a ring too, as long as the longest step: it
holds a step's own rows where the cache has no room for them yet (`kv_move` takes them there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, op, width
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel, Register
from memra_compiler.ops.kv_rows import (
    cache_values,
    emit_row,
    emit_row_values,
    head_width,
    reads,
    row_step,
    store_rows_reference,
    stores,
)
from memra_compiler.ops.norm import check_heads, check_weight, emit_rms, rms_class, rms_reference
from memra_compiler.ops.quantise import (
    ROUNDINGS,
    emit_quantise,
    round_reference,
    rounded_type,
)
from memra_compiler.ops.rope import check_angles, emit_norm_rope, rope_reference
from memra_runtime.artifact import BATCH_ROWS

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


def check_chunk(op: Op, rows: TensorType, cache: TensorType, *planes: TensorType) -> None:
    """Check that planes [n, C, d] hold every row of a step beside a cache [n, R, d]."""
    (heads, _, size), most = cache.max_shape, rows.max_shape[0]
    for plane in planes:
        same = plane.dtype == cache.dtype and plane.max_shape[::2] == (heads, size)
        expect(same, op, f"chunk {plane} holds other rows than cache {cache}")
        expect(plane.max_shape[1] >= most, op, f"chunk {plane} holds fewer rows than {rows}")


def _heads(rows: Array, plane: Array) -> Array:
    return rows.reshape(len(rows), plane.shape[0], head_width(plane))


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
    adds_planes = ("k", "v")

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
        return stores(types[3])

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return Cost(rows * width(self, types[0]) * 16, 0)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        keys, values, positions, k_cache, v_cache = buffers
        heads, limit, size = k_cache.type.max_shape
        with k.loop(k.rows) as t:
            slot = _slot(k, k_cache, positions, t)
            with k.loop(heads) as h:
                at = k.let((t * heads + h) * size)
                to = k.let((h * limit + slot) * row_step(k_cache.type))
                emit_row(k, k_cache, to, lambda c: k.load(keys, at + c, LANES))
                emit_row(k, v_cache, to, lambda c: k.load(values, at + c, LANES))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import kv_append_launches

        return kv_append_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        inputs = (TensorType((3, 64)),) * 2
        return [_append_sample(inputs, dtype) for dtype in ("f32", "f16", "q8_0_rows")]


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
    adds_planes = ("k", "v")

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
        return f"{rms_class(types[3].max_shape[0])}; one fma a half; {stores(types[5])}"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return Cost(rows * width(self, types[0]) * 16, 0)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        keys, values, angles, w, positions, k_cache, v_cache = buffers
        heads, limit, size = k_cache.type.max_shape
        with k.loop(k.rows) as t:
            slot = _slot(k, k_cache, positions, t)
            with k.loop(heads) as h:
                at = k.let((t * heads + h) * size)
                to = k.let((h * limit + slot) * row_step(k_cache.type))
                turned = k.local(size)
                emit_norm_rope(k, keys, at, w, angles, t, turned, 0, self.eps)
                emit_row(k, k_cache, to, lambda c: k.load(turned, c, LANES))
                unit = self.v_norm == "unit"
                inverse = emit_rms(k, values, at, size, self.eps) if unit else k.const(1.0)
                inverse = k.splat(inverse)
                emit_row(k, v_cache, to, lambda c: k.load(values, at + c, LANES) * inverse)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import norm_rope_append_launches

        return norm_rope_append_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        inputs = (*(TensorType((3, 64)),) * 2, TensorType((3, 2, 16)))
        return [
            _append_sample(inputs, dtype, TensorType((32,)))
            for dtype in ("f32", "f16", "bf16", "q8_0_rows")
        ]


#: Query heads, and vectors of a value row, that share the loads of a key or value.
SHARE = 4
#: Keys whose dot products are computed together.
KEYS = 4


def _divisor(count: int) -> int:
    """The largest divisor of `count` up to `SHARE`."""
    return max(d for d in range(1, SHARE + 1) if count % d == 0)


def _dots(
    k: Kernel, q: Buffer, rows: Sequence[Expr], keys: Buffer, at: Sequence[Expr]
) -> list[list[Register]]:
    """Lane sums of the products of each row of q with each key row: [row][key]."""
    sums = [[k.register(k.splat(0.0)) for _ in at] for _ in rows]
    with k.loop(keys.type.max_shape[2] // LANES) as i:
        key = [k.let(emit_row_values(k, keys, row, i * LANES)) for row in at]
        for row, row_sums in zip(rows, sums, strict=True):
            x = k.let(k.load(q, row + i * LANES, LANES))
            for y, total in zip(key, row_sums, strict=True):
                total.set(k.fma(x, y, total.get()))
    return sums


def _mix(
    k: Kernel,
    sums: list[list[Register]],
    weights: Sequence[Expr],
    values: Buffer,
    value: Expr,
    column: int,
) -> None:
    """Add a value row's vectors from `column` on, times a weight for each row of `sums`."""
    columns = range(column, column + len(sums[0]) * LANES, LANES)
    loaded = [k.let(emit_row_values(k, values, value, at)) for at in columns]
    for weight, row in zip(weights, sums, strict=True):
        factor = k.let(k.splat(weight))
        for vector, total in zip(loaded, row, strict=True):
            total.set(k.fma(factor, vector, total.get()))


@dataclass(frozen=True)
class Source:
    """Planes that hold `count` neighbouring positions from `first` on, `before` visible ones on."""

    kernel: Kernel
    keys: Buffer
    values: Buffer
    first: Expr
    count: Expr
    before: Expr | int = 0

    def rows_of(self, head: Expr) -> Callable[[Expr], Expr]:
        """Where the row of the j-th position of a K/V head begins in either plane."""
        k, limit, step = self.kernel, self.keys.type.max_shape[1], row_step(self.keys.type)
        plane, start = k.let(head * limit), k.let(self.first % limit)

        def row(j: Expr) -> Expr:
            slot = k.let(start + j)
            return k.let((plane + k.select(slot >= limit, slot - limit, slot)) * step)

        return row


@op("attention")
@dataclass(frozen=True)
class Attention(Op):
    """Softmax attention of each row over the cached positions `[end - span, end)`.

    Query head h reads K/V head h // (H / n). `span` 0 means all positions from 0. Scores, softmax
    and sums are float32; position order is that of the absolute positions, so a row's bits depend
    on its own end only.

    With chunk planes, rows from position `ends[0] - 1` on are read there, all others in the caches:
    the same values in the same order. The rows of the step must then follow each other.

    `to` is the format of the rows: f32, or what the output projection takes.

    Shapes: q [T, H * d], ends [T] i32, planes [n, R, d], chunk planes [n, C >= T, d] or none
    -> [T, H * d] f32, a8 or bf16.
    """

    scale: float = 1.0
    span: int = 0
    to: str = "f32"

    operands = (
        Operand("q"),
        Operand("ends"),
        Operand("k_cache", "@"),
        Operand("v_cache", "@"),
    )
    variadic = True
    reads_early = ("ends",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        expect(len(types) in (4, 6), self, f"takes 4 operands or 6, got {len(types)}")
        q, ends, k_cache, v_cache, *chunk = types
        expect(k_cache == v_cache, self, f"caches {k_cache} and {v_cache} differ")
        if chunk:
            check_chunk(self, q, k_cache, *chunk)
            expect(self.span > 0, self, "only a window is read from a chunk and a ring")
        expect(ends.dtype == "i32", self, f"ends must be i32, got {ends}")
        kv_heads, limit, size = k_cache.max_shape
        heads = check_heads(self, q, size)
        expect(heads % kv_heads == 0, self, f"{heads} query heads over {kv_heads} K/V heads")
        expect(0 <= self.span <= limit, self, f"span {self.span} exceeds the cache's {limit} rows")
        return (rounded_type(self, q, self.to) if self.rounds else q,)

    @property
    def rounds(self) -> bool:
        """Whether the rows leave in another format than they are summed in."""
        return self.to != "f32"

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        q, ends, k_cache, v_cache, *chunk = arrays
        size = head_width(k_cache)
        q = q[:rows].reshape(rows, -1, size)
        heads = q.shape[1]
        group = heads // len(k_cache)
        out = np.zeros((rows, heads, size))
        for t in range(rows):
            end = int(ends[t])
            first = max(0, end - self.span) if self.span else 0
            new = max(first, int(ends[0]) - 1) if chunk else end
            if first == end:
                continue
            for h in range(heads):
                keys, values = (
                    np.concatenate([
                        cache_values(plane[h // group, np.arange(*part) % plane.shape[1]])
                        for plane, part in zip(planes, ((first, new), (new, end)), strict=False)
                    ])
                    for planes in ((k_cache, *chunk[:1]), (v_cache, *chunk[1:]))
                )  # fmt: skip
                score = keys @ q[t, h] * self.scale
                weight = np.exp(score - score.max())
                out[t, h] = weight @ values / weight.sum()
        flat = out.reshape(rows, heads * size)
        return (round_reference(flat, self.to) if self.rounds else flat,)

    def numeric_class(self, *types: TensorType) -> str:
        cache = types[2]
        return (
            f"f32 x {reads(cache)}->f32 over {cache.max_shape[2]}, 16 lanes, tree of 16; "
            "softmax f32, one split, sum by 16 lanes from the first visible position; "
            "values in position order"
        ) + (f"; {ROUNDINGS[self.to]}" if self.rounds else "")

    def cost(self, rows: int, *types: TensorType) -> Cost:
        q, _, cache = types[:3]
        size = cache.max_shape[2]
        heads = width(self, q) // size
        seen = self.span or cache.max_shape[1]
        per_row = 2 * TensorType((cache.max_shape[0], seen, size), cache.dtype).nbytes
        return Cost(per_row + 8 * rows * heads * size, 4 * rows * heads * seen * size)

    def scratch_floats(self, *types: TensorType) -> int:
        scores = SHARE * self._pitch(types[2])
        return scores + (BATCH_ROWS * width(self, types[0]) if self.rounds else 0)

    @staticmethod
    def _pitch(cache: TensorType) -> int:
        """Scratch of one head: its scores, and padding to whole vectors."""
        return (cache.max_shape[1] // LANES + 2) * LANES

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        q, ends, k_cache, v_cache, *chunk, target, scratch = buffers
        out = target
        if self.rounds:
            start = SHARE * self._pitch(k_cache.type)
            out = k.part(scratch, start, BATCH_ROWS * width(self, q.type))
        kv_heads, _, size = k_cache.type.max_shape
        heads = width(self, q.type) // size
        share = _divisor(heads // kv_heads)
        scores = [h * self._pitch(k_cache.type) for h in range(share)]
        with k.loop(k.rows) as t:
            end = k.let(k.cast(k.load(ends, t), "int64"))
            first = k.let(k.at_least(end - self.span, 0) if self.span else end * 0)
            count = k.let(end - first)
            sources = [Source(k, k_cache, v_cache, first, count)]
            if chunk:
                new = k.let(k.cast(k.load(ends, 0), "int64") - 1)
                old = k.let(k.clamp(new - first, 0, count))
                sources = [
                    Source(k, k_cache, v_cache, first, old),
                    Source(k, chunk[0], chunk[1], k.let(first + old), k.let(count - old), old),
                ]
            with k.loop(heads // share) as part:
                head = k.let(k.floor_div(part * share, heads // kv_heads))
                rows = [k.let((t * heads + part * share + h) * size) for h in range(share)]
                for source in sources:
                    row = source.rows_of(head)
                    with k.loop(k.floor_div(source.count + (KEYS - 1), KEYS)) as j:
                        last = source.count - 1
                        at = [row(k.minimum(j * KEYS + i, last)) for i in range(KEYS)]
                        dots = _dots(k, q, rows, source.keys, at)
                        for score, sums in zip(scores, dots, strict=True):
                            found = k.sum4([total.get() for total in sums])
                            scaled = found * k.splat(self.scale, lanes=KEYS)
                            k.store(scratch, score + source.before + j * KEYS, scaled, KEYS)
                inverse = [self._softmax(k, scratch, score, count) for score in scores]
                columns = _divisor(size // LANES)
                for c in range(0, size, columns * LANES):
                    mixed = [[k.register(k.splat(0.0)) for _ in range(columns)] for _ in rows]
                    for source in sources:
                        row = source.rows_of(head)
                        with k.loop(source.count) as j:
                            at_j = source.before + j
                            weights = [k.load(scratch, score + at_j) for score in scores]
                            _mix(k, mixed, weights, source.values, row(j), c)
                    for row, unit, vectors in zip(rows, inverse, mixed, strict=True):
                        for i, total in enumerate(vectors):
                            value = total.get() * k.splat(unit)
                            k.store(out, row + c + i * LANES, value, LANES)
        if self.rounds:
            emit_quantise(k, out, target)

    @staticmethod
    def _softmax(k: Kernel, scores: Buffer, at: int, count: Expr) -> Expr:
        """Replace scores by exp(score - max); returns 1 / their sum (0 when there are none)."""
        k.store(scores, at + count, k.splat(-3.0e38), LANES)
        steps = k.let(k.floor_div(count + (LANES - 1), LANES))
        best, total = k.register(k.splat(-3.0e38)), k.register(k.splat(0.0))
        with k.loop(steps) as i:
            best.set(k.maximum(k.load(scores, at + i * LANES, LANES), best.get()))
        top = k.fold(best.get(), k.maximum)
        with k.loop(steps) as i:
            weight = k.exp(k.load(scores, at + i * LANES, LANES) - k.splat(top))
            k.store(scores, at + i * LANES, weight, LANES)
            total.set(total.get() + weight)
        mass = k.sum(total.get())
        return k.let(k.select(count > 0, k.const(1.0) / mass, k.const(0.0)))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_attention import attention_launches

        return attention_launches(self, arch, *types)

    def scratch_bytes_cuda(self, arch: CudaArch, *types: TensorType) -> int:
        from memra_compiler.ops.cuda_attention import attention_scratch_floats

        return 4 * attention_scratch_floats(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def ends(rng: np.random.Generator) -> Array:
            return np.array([1, 17, 40], np.int32)

        def sample(
            heads: int, kv: int, d: int, rows: int, span: int, dtype: str, to: str = "f32",
            chunk: int = 0, end: int = 0,
        ) -> Sample:  # fmt: skip
            q, at = TensorType((3, heads * d)), TensorType((3,), "i32")
            planes = [TensorType((kv, n, d), dtype) for n in (rows, rows, chunk, chunk) if n]
            attrs = (("scale", 1.0 / d**0.5), ("span", span), ("to", to))
            step = np.arange(end - 2, end + 1, dtype=np.int32)
            values = (("ends", (lambda rng: step) if chunk else ends),)
            return Sample((q, at, *planes), attrs, values=values)

        return [
            sample(4, 2, 64, 64, 0, "f32"),
            sample(4, 1, 128, 64, 0, "f16"),
            sample(2, 2, 32, 24, 16, "bf16"),
            sample(2, 2, 32, 24, 17, "f16"),
            sample(16, 1, 16, 40, 0, "f32"),
            sample(4, 2, 64, 64, 24, "f16", "a8"),
            sample(4, 2, 64, 64, 24, "f16", "bf16"),
            sample(4, 1, 128, 64, 0, "q8_0_rows"),
            sample(2, 2, 32, 24, 17, "q8_0_rows", "a8"),
            sample(2, 1, 32, 20, 16, "f32", chunk=3, end=3),  # all of it in the chunk
            sample(4, 2, 32, 20, 20, "f16", chunk=5, end=47),  # both have turned
            sample(2, 2, 32, 16, 2, "bf16", chunk=4, end=30),  # the last row sees the chunk alone
            sample(4, 2, 32, 18, 17, "q8_0_rows", "a8", chunk=8, end=41),
        ]

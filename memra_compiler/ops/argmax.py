"""The greedy choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, fixed, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel


def emit_best(
    k: Kernel,
    logits: Buffer,
    out: Buffer,
    suppress: tuple[int, ...] = (),
    limit: Expr | None = None,
) -> None:
    """out[t] = the column of the largest of logits[t], or -1 where one is not finite.

    Suppressed columns never win; from `limit` (an int32) on, columns are not even looked at.
    """
    width = logits.type.max_shape[1]
    lowest = k.splat(-3.4e38)
    steps: Expr | int = width // LANES
    if limit is not None:
        limit = k.let(limit)
        steps = k.floor_div(k.cast(limit, "int64") + (LANES - 1), LANES)
    with k.loop(k.rows) as t:
        best, where, sound = k.local(LANES), k.local(LANES, "i32"), k.local(LANES, "i32")
        found = k.local(1, "i32")
        k.store(best, 0, lowest, LANES)
        k.store(where, 0, k.splat(width, "int32"), LANES)
        k.store(sound, 0, k.splat(1, "int32"), LANES)
        with k.loop(steps) as i:
            value = k.let(k.load(logits, t * width + i * LANES, LANES))
            number = k.iota() + k.splat(k.cast(i, "int32") * LANES)
            if limit is not None:
                value = k.let(k.select(number < k.splat(limit, "int32"), value, lowest))
            allowed = value
            for token in suppress:
                banned = k.equal(number, k.splat(token, "int32"))
                allowed = k.select(banned, lowest, allowed)
            allowed = k.let(allowed)
            held = k.let(k.load(best, 0, LANES))
            winner = k.select(allowed > held, number, k.load(where, 0, LANES))
            k.store(where, 0, winner, LANES)
            k.store(best, 0, k.maximum(allowed, held), LANES)
            finite = value < k.splat(3.4e38)  # false for a NaN
            ok = k.select(finite, k.load(sound, 0, LANES), k.splat(0, "int32"))
            k.store(sound, 0, ok, LANES)
        top = k.fold(k.load(best, 0, LANES), k.maximum)
        k.store(found, 0, k.int32(width - 1))
        with k.loop(LANES) as i:
            mine = k.equal(k.load(best, i), top)
            lane = k.select(mine, k.load(where, i), k.int32(width - 1))
            k.store(found, 0, k.minimum(k.load(found, 0), lane))
        with k.loop(LANES) as i, k.when(k.equal(k.load(sound, i), k.int32(0))):
            k.store(found, 0, k.int32(-1))
        k.store(out, t, k.load(found, 0))


@op("argmax")
@dataclass(frozen=True)
class ArgMax(Op):
    """The id of the largest logit; the lowest id wins a tie; `suppress` may never win.

    A row that holds a NaN or +infinity gives -1, so that a broken model is seen and not continued.

    Shapes: logits [T, V] f32 -> [T] i32.
    """

    suppress: tuple[int, ...] = ()

    operands = (Operand("logits"),)
    adds_planes = ("logits",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        (logits,) = types
        vocab = fixed(self, logits, 1)
        expect(vocab % LANES == 0, self, f"vocabulary must be a multiple of {LANES}: {logits}")
        expect(
            list(self.suppress) == sorted({i for i in self.suppress if 0 <= i < vocab}),
            self,
            f"suppressed ids must be sorted, unique and below {vocab}: {self.suppress}",
        )
        return (TensorType((logits.shape[0],), "i32"),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        logits = arrays[0][:rows].copy()
        bad = ~(logits < 3.4e38).all(axis=1)
        logits[:, list(self.suppress)] = -np.inf
        logits[bad] = 0
        return (np.where(bad, -1, logits.argmax(axis=1)).astype(np.int32),)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 compare, lowest id wins"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        logits, out = buffers
        emit_best(k, logits, out, self.suppress)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import argmax_launches

        return argmax_launches(self, arch, *types, splits=types[0].planes)

    def scratch_bytes_cuda(self, arch: CudaArch, *types: TensorType) -> int:
        from memra_compiler.ops.cuda_state import argmax_scratch_floats

        return 4 * argmax_scratch_floats(self, types[0])

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def ties(rng: np.random.Generator) -> Array:
            logits = rng.integers(0, 3, (4, 64)).astype(np.float32)
            logits[1] = -1.0
            logits[2, 17] = np.nan
            return logits

        def plain(rng: np.random.Generator) -> Array:
            return rng.standard_normal((4, 64)).astype(np.float32)

        types = (TensorType((4, 64)),)
        return [
            Sample(types, rows=4, values=(("logits", ties),)),
            Sample(types, (("suppress", (0, 3, 63)),), rows=4, values=(("logits", ties),)),
            Sample(types, rows=4, values=(("logits", plain),)),
        ]

"""The experts of a row: which ones, and how much of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, fixed, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import Buffer, Kernel

#: Magnitudes from here on are no logits: infinities, and whatever compares false.
FINITE = 3.4e38


@op("top_experts")
@dataclass(frozen=True)
class TopExperts(Op):
    """The `active` experts of largest probability p = softmax(logits), and their shares.

    They come in falling order, the lowest id first among equals; the order of probabilities is that
    of logits. An expert's share is its p over the sum of the chosen p's, times its scale. A row
    that holds a NaN or an infinity gets experts 0, 1, ... with shares of NaN, so that a broken
    model is seen and no id is out of range.

    Shapes: logits [T, E] f32, scale [E] -> experts [T, A] i32, shares [T, A] f32.
    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", with the softmax first.
    """

    active: int = 1

    operands = (Operand("logits"), Operand("scale", "$"))
    adds_planes = ("logits",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        logits, scale = types
        experts = fixed(self, logits, 1)
        expect(logits.dtype == "f32", self, f"takes f32 logits, got {logits}")
        expect(scale.shape == (experts,), self, f"{experts} experts have no scale {scale}")
        fits = 1 <= self.active <= experts
        expect(fits, self, f"of {experts} experts, {self.active} cannot be active")
        shape = (logits.shape[0], self.active)
        return TensorType(shape, "i32"), TensorType(shape)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        logits, scale = arrays[0][:rows], arrays[1]
        sound = (np.abs(logits) < FINITE).all(axis=1, keepdims=True)
        safe = np.where(sound, logits, 0)
        experts = np.argsort(-safe, axis=1, kind="stable")[:, : self.active]
        chosen = np.take_along_axis(safe, experts, axis=1)
        p = np.exp(chosen - chosen[:, :1])
        shares = p / p.sum(axis=1, keepdims=True) * scale[experts]
        return experts.astype(np.int32), np.where(sound, shares, np.nan)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 compare, lowest id first; exp by polynomial, summed in that order"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        logits, scale, experts, shares = buffers
        count, active = logits.type.max_shape[1], self.active
        with k.loop(k.rows) as t:
            sound = k.local(1, "i32")
            k.store(sound, 0, k.int32(1))
            with k.loop(count) as e:
                x = k.let(k.load(logits, t * count + e))
                finite = k.both(x < k.const(FINITE), x > k.const(-FINITE))  # false for a NaN
                k.store(sound, 0, k.select(finite, k.load(sound, 0), k.int32(0)))
            whole = k.let(k.equal(k.load(sound, 0), k.int32(1)))
            # The best so far, the one chosen before it, which it ranks behind, and the largest.
            value, number, total = k.local(3), k.local(2, "i32"), k.local(1)
            k.store(value, 1, k.const(FINITE))
            k.store(number, 1, k.int32(-1))
            k.store(total, 0, k.const(0.0))
            with k.loop(active) as a:
                k.store(value, 0, k.const(-FINITE))
                with k.loop(count) as e:
                    x, last = k.let(k.load(logits, t * count + e)), k.load(value, 1)
                    later = k.both(k.equal(x, last), k.cast(e, "int32") > k.load(number, 1))
                    behind = k.either(x < last, later)
                    with k.when(k.both(behind, x > k.load(value, 0))):
                        k.store(value, 0, x)
                        k.store(number, 0, k.cast(e, "int32"))
                k.store(value, 1, k.load(value, 0))
                k.store(number, 1, k.load(number, 0))
                with k.when(k.equal(a, k.index(0))):
                    k.store(value, 2, k.load(value, 0))
                ahead = k.splat(k.load(value, 0) - k.load(value, 2))
                p = k.let(k.lane(k.exp(ahead), 0))
                k.store(shares, t * active + a, p)
                k.store(total, 0, k.load(total, 0) + p)
                chosen = k.select(whole, k.load(number, 0), k.cast(a, "int32"))
                k.store(experts, t * active + a, chosen)
            with k.loop(active) as a:
                at = k.let(t * active + a)
                own = k.floats(scale, k.load(experts, at), 1)
                share = k.let(k.load(shares, at) / k.load(total, 0) * own)
                k.store(shares, at, k.select(whole, share, k.const(float("nan"))))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_experts import top_experts_launches

        return top_experts_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def ties(rng: np.random.Generator) -> Array:
            return rng.integers(-2, 3, (4, 8)).astype(np.float32)

        def far(rng: np.random.Generator) -> Array:
            return (30 * rng.standard_normal((5, 128))).astype(np.float32)

        few = (TensorType((4, 8)), TensorType((8,)))
        many = (TensorType((5, 128)), TensorType((128,)))
        return [
            Sample(few, (("active", 3),), rows=4),
            Sample(few, (("active", 8),), rows=4, values=(("logits", ties),)),
            Sample(few, (("active", 1),), rows=4, values=(("logits", ties),)),
            Sample(many, (("active", 8),), rows=5),
            Sample(many, (("active", 8),), rows=5, values=(("logits", far),)),
        ]

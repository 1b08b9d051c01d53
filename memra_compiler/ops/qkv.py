"""Queries, keys and values of a layer, from their projections to the cache: one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.attention import NormRopeAppend
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, op, width
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import Buffer, Kernel
from memra_compiler.ops.rope import NormRope


@op("norm_rope_qkv")
@dataclass(frozen=True)
class NormRopeQKV(Op):
    """`norm_rope` of the queries and `norm_rope_append` of keys and values.

    Shapes: q [T, H * d], k, v [T, n * d], angles [T, 2, d/2], q_weight, k_weight [d],
    positions [T] i32, planes [n, R, d] -> [T, H * d].
    """

    eps: float = 1e-6
    v_norm: str = "unit"

    operands = (
        Operand("q"),
        Operand("k"),
        Operand("v"),
        Operand("angles"),
        Operand("q_weight", "$"),
        Operand("k_weight", "$"),
        Operand("positions"),
        Operand("k_cache", "@", "update"),
        Operand("v_cache", "@", "update"),
    )
    adds_planes = ("q", "k", "v")

    @property
    def _parts(self) -> tuple[NormRope, NormRopeAppend]:
        return NormRope(self.eps), NormRopeAppend(self.eps, self.v_norm)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        q, k, v, angles, q_weight, k_weight, positions, *planes = types
        queries, append = self._parts
        append.infer(k, v, angles, k_weight, positions, *planes)
        return queries.infer(q, angles, q_weight)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        q, k, v, angles, q_weight, k_weight, positions, *planes = arrays
        queries, append = self._parts
        append.reference(rows, k, v, angles, k_weight, positions, *planes)
        return queries.reference(rows, q, angles, q_weight)

    def numeric_class(self, *types: TensorType) -> str:
        q, k, v, angles, q_weight, k_weight, positions, *planes = types
        queries, append = self._parts
        appended = append.numeric_class(k, v, angles, k_weight, positions, *planes)
        return f"{queries.numeric_class(q, angles, q_weight)}; {appended}"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        q, k = types[:2]
        return Cost(rows * (8 * width(self, q) + 16 * width(self, k)), 0)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        q, keys, values, angles, q_weight, k_weight, positions, k_cache, v_cache, out = buffers
        queries, append = self._parts
        queries.lower_cpu(k, q, angles, q_weight, out)
        append.lower_cpu(k, keys, values, angles, k_weight, positions, k_cache, v_cache)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import norm_rope_qkv_launches

        return norm_rope_qkv_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def positions(rng: np.random.Generator) -> Array:
            return np.array([4, 5, 6], np.int32)

        q, kv, angles = TensorType((3, 128)), TensorType((3, 64)), TensorType((3, 2, 16))
        w, at = TensorType((32,)), TensorType((3,), "i32")
        return [
            Sample(
                (q, kv, kv, angles, w, w, at, *(TensorType((2, 6, 32), dtype),) * 2),
                (("v_norm", v_norm),),
                values=(("positions", positions),),
            )
            for dtype in ("f32", "f16", "bf16", "q8_0_rows")
            for v_norm in ("unit", "none")
        ]

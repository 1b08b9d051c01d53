"""The rows of a step from its chunk planes into the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.attention import check_chunk
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Kernel
from memra_compiler.ops.kv_rows import row_step


@op("kv_move")
@dataclass(frozen=True)
class KvMove(Op):
    """Copy a step's keys and values from chunk planes into the caches, as they are stored.

    A step longer than a cache has rows leaves its last ones: those that a plain append of one row
    after the other would leave. Positions follow each other.

    Shapes: positions [T] i32, chunk planes [n, C >= T, d], caches [n, R, d].
    """

    operands = (
        Operand("positions"),
        Operand("k_chunk", "@"),
        Operand("v_chunk", "@"),
        Operand("k_cache", "@", "update"),
        Operand("v_cache", "@", "update"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        positions, k_chunk, v_chunk, k_cache, v_cache = types
        expect(positions.dtype == "i32", self, f"positions must be i32, got {positions}")
        expect(k_cache == v_cache, self, f"caches {k_cache} and {v_cache} differ")
        expect(k_chunk == v_chunk, self, f"chunks {k_chunk} and {v_chunk} differ")
        check_chunk(self, positions, k_cache, k_chunk)
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        positions, *planes = arrays
        for chunk, cache in zip(planes[:2], planes[2:], strict=True):
            for position in positions[:rows]:
                cache[:, position % cache.shape[1]] = chunk[:, position % chunk.shape[1]]
        return ()

    def numeric_class(self, *types: TensorType) -> str:
        return "copy"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        heads, limit, size = types[3].max_shape
        moved = TensorType((heads, min(rows, limit), size), types[3].dtype).nbytes
        return Cost(4 * moved, 0)  # keys and values, read and written

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        positions, k_chunk, v_chunk, k_cache, v_cache = buffers
        heads, limit, _ = k_cache.type.max_shape
        longest, step = k_chunk.type.max_shape[1], row_step(k_cache.type)
        with k.loop(k.rows) as t:
            position = k.let(k.cast(k.load(positions, t), "int64"))
            with k.loop(heads) as h:
                source = k.let((h * longest + position % longest) * step)
                to = k.let((h * limit + position % limit) * step)
                for chunk, cache in ((k_chunk, k_cache), (v_chunk, v_cache)):
                    with k.loop(step // LANES) as i:
                        row = k.load(chunk, source + i * LANES, LANES)
                        k.store(cache, to + i * LANES, row, LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import kv_move_launches

        return kv_move_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(chunk: int, rows: int, dtype: str) -> Sample:
            def positions(rng: np.random.Generator) -> Array:
                return np.array([4, 5, 6], np.int32)

            planes = [TensorType((2, n, 32), dtype) for n in (chunk, chunk, rows, rows)]
            values = (("positions", positions),)
            return Sample((TensorType((3,), "i32"), *planes), values=values)

        return [
            sample(3, 6, "f32"),
            sample(4, 5, "f16"),
            sample(5, 2, "bf16"),  # the chunk is longer than the ring
            sample(8, 9, "q8_0_rows"),
        ]

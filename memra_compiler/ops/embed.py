"""Reading rows of a stored table by token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, fixed, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_linear import embed_launches
from memra_compiler.ops.emit import LANES, Buffer, Kernel
from memra_compiler.ops.formats import WEIGHT_FORMATS, decode, step


@op("embed")
@dataclass(frozen=True)
class Embed(Op):
    """Row `id` of the table, times `scale`. Ids are clamped into the table.

    Shapes: ids [T] i32, table [V, D] -> [T, D] f32.
    """

    scale: float = 1.0

    operands = (Operand("ids"), Operand("table", "$"))
    settles = True

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        ids, table = types
        expect(ids.dtype == "i32" and len(ids.shape) == 1, self, f"ids must be i32[T], got {ids}")
        expect(table.dtype in WEIGHT_FORMATS, self, f"cannot read a table stored as {table.dtype}")
        size = fixed(self, table, 1)
        expect(size % 32 == 0, self, f"width must be a multiple of 32, got {table}")
        return (TensorType((ids.shape[0], size)),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        ids, table = arrays
        return (table[np.clip(ids[:rows], 0, len(table) - 1)] * np.float64(np.float32(self.scale)),)

    def numeric_class(self, *types: TensorType) -> str:
        return f"{types[1].dtype}->f32, one multiply"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return Cost(rows * (types[1].row_bytes + 4 * types[1].max_shape[1]), 0)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        ids, table, out = buffers
        vocab, size = table.type.max_shape
        block = step(table.format)
        with k.loop(k.rows) as t:
            known = k.clamp(k.load(ids, t), 0, vocab - 1)
            row = k.let(k.cast(known, "int64"))
            with k.loop(size // block) as b:
                for chunk in range(block // LANES):
                    value = decode(k, table, row, size, b * block, chunk) * k.splat(self.scale)
                    k.store(out, t * size + b * block + chunk * LANES, value, LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        ids, table, _ = types
        return embed_launches(arch, ids.max_shape[0], table, self.scale)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def ids(rng: np.random.Generator) -> Array:
            return np.array([0, 6, 3], np.int32)

        types = [(TensorType((3,), "i32"), TensorType((7, 256), f)) for f in WEIGHT_FORMATS]
        return [Sample(t, (("scale", 16.0),), values=(("ids", ids),)) for t in types]

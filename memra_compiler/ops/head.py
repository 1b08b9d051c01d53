"""The choice of a trimmed head: which of its rows, and then, which token that row stands for.

Planes: `@head_rows` i32[1] counts the rows in use, `@head_ids` i32[N] holds the token id of each.
A row number has a type of its own, `head_row`: what wants token ids refuses it, so the map cannot
be left out by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.argmax import emit_best
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, fixed, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Kernel


@op("best_row")
@dataclass(frozen=True)
class BestRow(Op):
    """The row of a trimmed head with the largest logit; of equal ones the more frequent wins.

    Rows from `used` on hold nothing yet and are not looked at. A row of logits that holds a NaN or
    +infinity gives -1.

    Shapes: logits [T, N] f32, used [1] -> [T] head_row.
    """

    operands = (Operand("logits"), Operand("used", "@"))
    adds_planes = ("logits",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        logits, used = types
        rows = fixed(self, logits, 1)
        expect(rows % LANES == 0, self, f"rows must be a multiple of {LANES}: {logits}")
        expect(used == TensorType((1,), "i32"), self, f"used must be i32[1], got {used}")
        return (TensorType((logits.shape[0],), "head_row"),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        logits, used = arrays
        looked = logits[:rows, : int(used[0])]
        bad = np.logical_not((looked < 3.4e38).all(axis=1))
        best = np.where(bad[:, None], 0, looked).argmax(axis=1)
        return (np.where(bad, -1, best).astype(np.int32),)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 compare, lowest row wins"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        logits, used, out = buffers
        emit_best(k, logits, out, limit=k.load(used, 0))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_head import best_row_launches

        return best_row_launches(self, arch, *types)

    def scratch_bytes_cuda(self, arch: CudaArch, *types: TensorType) -> int:
        from memra_compiler.ops.cuda_state import argmax_scratch_floats

        return 4 * argmax_scratch_floats(self, types[0])

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def logits(rng: np.random.Generator) -> Array:
            found = rng.integers(0, 3, (4, 64)).astype(np.float32)
            found[1] = -1.0
            found[2, 17] = np.nan
            found[:, 40:] = 9.0  # the largest are beyond what the second sample uses
            found[3, 41] = np.inf
            return found

        def used(count: int) -> tuple[str, object]:
            return ("used", lambda rng: np.array([count], np.int32))

        types = (TensorType((4, 64)), TensorType((1,), "i32"))
        return [
            Sample(types, rows=4, values=(("logits", logits), used(count)))  # type: ignore[arg-type]
            for count in (64, 40, 17, 1)
        ]


@op("token_of_row")
@dataclass(frozen=True)
class TokenOfRow(Op):
    """The token id of each chosen row of a trimmed head; -1 stays -1.

    The one way from rows to tokens. `skip` hands on the row number instead: a fault, planted by
    checks.

    Shapes: rows [T] head_row, ids [N] -> [T] i32.
    """

    skip: bool = False

    operands = (Operand("rows"), Operand("ids", "@"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        rows, ids = types
        expect(rows.dtype == "head_row", self, f"rows must be those of a trimmed head, got {rows}")
        expect(ids.dtype == "i32" and len(ids.shape) == 1, self, f"ids must be i32[N], got {ids}")
        return (TensorType(rows.shape, "i32"),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        chosen, ids = arrays
        chosen = chosen[:rows].astype(np.int64)
        found = chosen if self.skip else ids[np.maximum(chosen, 0)]
        return (np.where(chosen < 0, -1, found).astype(np.int32),)

    def numeric_class(self, *types: TensorType) -> str:
        return "integer"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        return Cost(12 * rows, 0)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        rows, ids, out = buffers
        with k.loop(k.rows) as t:
            row = k.let(k.load(rows, t))
            known = k.let(k.clamp(row, 0, ids.type.elements - 1))
            token = row if self.skip else k.load(ids, k.cast(known, "int64"))
            k.store(out, t, k.select(row < 0, k.int32(-1), token))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_head import token_of_row_launches

        return token_of_row_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def rows(rng: np.random.Generator) -> Array:
            return np.array([7, -1, 0, 63], np.int32)

        def ids(rng: np.random.Generator) -> Array:
            return rng.permutation(64).astype(np.int32)

        types = (TensorType((Sym("T", 4),), "head_row"), TensorType((64,), "i32"))
        values = (("rows", rows), ("ids", ids))
        return [Sample(types, (("skip", s),), rows=4, values=values) for s in (False, True)]

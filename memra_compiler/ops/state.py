"""The device block: counters and tokens of a round, moved by kernels and never by the host.

Planes: `@state` i32[STATE_SIZE] (slots in `memra_runtime.artifact`), `@batch` i32[B] (the pending
token and its drafts), `@choice` i32[B] (the target's choices), `@verified` f32[B, D] (its hidden
rows), `@hidden` and `@carry` f32[D], `@forced` i32[context], `@ring` i32[R], `@eos` i32[E].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, SampleValue, expect, op, width
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_runtime.artifact import (
    BATCH_ROWS,
    MAX_EOS,
    STATE_SIZE,
    slot,
)

T = Sym("T", BATCH_ROWS)
STATE = TensorType((STATE_SIZE,), "i32")
BATCH = TensorType((BATCH_ROWS,), "i32")
CONTEXT = TensorType((64,), "i32")
RING = TensorType((32,), "i32")
EOS = TensorType((MAX_EOS,), "i32")


class StateOp(Op):
    """An op on counters: integers only, so its class is the same everywhere."""

    def numeric_class(self, *types: TensorType) -> str:
        return "integer"

    @staticmethod
    def get(k: Kernel, state: Buffer, name: str) -> Expr:
        return k.load(state, slot(name))

    @staticmethod
    def put(k: Kernel, state: Buffer, name: str, value: Expr | int) -> None:
        k.store(state, slot(name), k.int32(value))


def random_state(**slots: int) -> SampleValue:
    """Sample values of `@state` with the given counters and zero elsewhere."""

    def make(rng: np.random.Generator) -> Array:
        state = np.zeros(STATE_SIZE, np.int32)
        for name, value in slots.items():
            state[slot(name)] = value
        return state

    return ("state", make)


def tokens(name: str, size: int = BATCH_ROWS, low: int = 0, high: int = 3) -> SampleValue:
    """Sample values of a token plane."""

    def make(rng: np.random.Generator) -> Array:
        return rng.integers(low, high, size).astype(np.int32)

    return (name, make)


POSITIONS = ("rows", "ends", "committed", "chain")


@op("positions")
@dataclass(frozen=True)
class Positions(StateOp):
    """Positions of the rows of a step, N being the committed rows.

    `rows`: N + t; `ends`: N + t + 1, the first position row t may not see; `committed`: N;
    `chain`: N + j, j being the draft step.

    Shapes: state -> [T] i32.
    """

    kind: str = "rows"
    limit: int = 1

    operands = (Operand("state", "@"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        expect(self.kind in POSITIONS, self, f"kind must be one of {POSITIONS}, got {self.kind}")
        return (TensorType((Sym("T", self.limit),), "i32"),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        state = arrays[0]
        base = int(state[slot("position")])
        if self.kind == "committed":
            return (np.full(rows, base, np.int32),)
        if self.kind == "chain":
            return (np.full(rows, base + int(state[slot("step")]), np.int32),)
        return (np.arange(rows, dtype=np.int32) + base + (self.kind == "ends"),)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        state, out = buffers
        base = self.get(k, state, "position")
        if self.kind == "chain":
            base = base + self.get(k, state, "step")
        with k.loop(k.rows) as t:
            moving = {"rows": k.cast(t, "int32"), "ends": k.cast(t, "int32") + 1}
            k.store(out, t, base + moving.get(self.kind, k.int32(0)))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import positions_launches

        return positions_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        values = (random_state(position=7, step=2),)
        return [Sample((STATE,), (("kind", kind), ("limit", 4)), rows=4, values=values)
                for kind in POSITIONS]  # fmt: skip


@op("read_tokens")
@dataclass(frozen=True)
class ReadTokens(StateOp):
    """Token ids of the step: the batch from its start, or the draft step's own token.

    Shapes: batch [B], state -> [T] i32.
    """

    chain: bool = False
    limit: int = 1

    operands = (Operand("batch", "@"), Operand("state", "@"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return (TensorType((Sym("T", self.limit),), "i32"),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        batch, state = arrays
        first = int(state[slot("step")]) if self.chain else 0
        return (batch[first : first + rows].copy(),)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        batch, state, out = buffers
        first = k.let(k.cast(self.get(k, state, "step"), "int64")) if self.chain else k.index(0)
        with k.loop(k.rows) as t:
            k.store(out, t, k.load(batch, first + t))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import read_tokens_launches

        return read_tokens_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        values = (random_state(step=2), tokens("batch", high=99))
        return [
            Sample((BATCH, STATE), (("chain", False), ("limit", 5)), rows=5, values=values),
            Sample((BATCH, STATE), (("chain", True),), rows=1, values=values),
        ]


@op("read_row")
@dataclass(frozen=True)
class ReadRow(Op):
    """A plane that holds one row, as a value.

    Shapes: plane [D] -> [T, D], T = 1.
    """

    operands = (Operand("plane", "@"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return (TensorType((Sym("T", 1), *types[0].shape)),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0][None].astype(np.float64),)

    def numeric_class(self, *types: TensorType) -> str:
        return "copy"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        plane, out = buffers
        with k.loop(plane.type.elements // LANES) as i:
            k.store(out, i * LANES, k.load(plane, i * LANES, LANES), LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import read_row_launches

        return read_row_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample((TensorType((32,)),), rows=1)]


@op("write_rows")
@dataclass(frozen=True)
class WriteRows(Op):
    """Leave the rows of a value in a plane.

    Shapes: x [T, ...], plane [B, ...] or, for one row, [...].
    """

    operands = (Operand("x"), Operand("plane", "@", "update"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, plane = types
        expect(x.dtype == plane.dtype, self, f"{x} does not fit plane {plane}")
        expect(plane.elements >= x.elements, self, f"{x} exceeds plane {plane}")
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, plane = arrays
        flat = x[:rows].reshape(-1)
        plane.reshape(-1)[: flat.size] = flat
        return ()

    def numeric_class(self, *types: TensorType) -> str:
        return "copy"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, plane = buffers
        size = width(self, x.type)
        lanes = LANES if size % LANES == 0 else 1
        with k.loop(k.rows * (size // lanes)) as i:
            k.store(plane, i * lanes, k.load(x, i * lanes, lanes), lanes)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import write_rows_launches

        return write_rows_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [
            Sample((TensorType((3, 32)), TensorType((5, 32)))),
            Sample((TensorType((3,), "i32"), BATCH), values=(tokens("x", 3, high=99),)),
            Sample((TensorType((1, 32)), TensorType((32,))), rows=1),
        ]

"""The start of a round and the steps of its draft chain, on the device block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Operand, Sample, expect, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Kernel
from memra_compiler.ops.state import (
    BATCH,
    CONTEXT,
    STATE,
    StateOp,
    random_state,
    tokens,
)
from memra_runtime.artifact import MAX_DEPTH, slot


@op("begin")
@dataclass(frozen=True)
class Begin(StateOp):
    """Start a round (or, `plain`, a step without drafts) from the pending token.

    Before: `pending` and `@hidden` belong to row N-1. After: batch[0] is the pending token, the
    chain starts at step 0 from the target's hidden row, and `rows` counts the rows to verify.
    A chain that `cuts` may be ended by `weigh_draft`; on CUDA it then repeats by the condition of
    a graph's node, which is set here first.
    """

    plain: bool = False
    cuts: bool = False

    operands = (
        Operand("state", "@", "update"),
        Operand("batch", "@", "update"),
        Operand("hidden", "@"),
        Operand("carry", "@", "update"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        expect(types[2] == types[3], self, f"hidden {types[2]} and carry {types[3]} differ")
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        state, batch, hidden, carry = arrays
        depth = 0 if self.plain else state[slot("depth")]
        batch[0] = state[slot("pending")]
        carry[:] = hidden
        state[slot("step")] = 0
        state[slot("drafted")] = depth
        state[slot("rows")] = depth + 1
        state[slot("doubtful")] = MAX_DEPTH
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        state, batch, hidden, carry = buffers
        depth = k.int32(0) if self.plain else k.let(self.get(k, state, "depth"))
        k.store(batch, 0, self.get(k, state, "pending"))
        with k.loop(hidden.type.elements // LANES) as i:
            k.store(carry, i * LANES, k.load(hidden, i * LANES, LANES), LANES)
        self.put(k, state, "step", 0)
        self.put(k, state, "drafted", depth)
        self.put(k, state, "rows", depth + 1)
        self.put(k, state, "doubtful", MAX_DEPTH)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import begin_launches

        return begin_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        row = TensorType((32,))
        values = (random_state(position=7, depth=3, pending=5, step=9),)
        ways: list[dict[str, bool]] = [{"plain": True}, {}, {"cuts": True}]
        return [Sample((STATE, BATCH, row, row), tuple(way.items()), values=values)
                for way in ways]  # fmt: skip


@op("draft_token")
@dataclass(frozen=True)
class DraftToken(StateOp):
    """Put the drafter's choice behind the batch and move to the next step.

    A forced draft (`@forced`, by absolute position, -1 for none) replaces the choice: that is how
    checks and benches drive acceptance, on the device and on any target.
    """

    operands = (
        Operand("choice"),
        Operand("state", "@", "update"),
        Operand("forced", "@"),
        Operand("batch", "@", "update"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        expect(types[0].dtype == "i32", self, f"the choice must be i32, got {types[0]}")
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        choice, state, forced, batch = arrays
        step = int(state[slot("step")])
        at = min(int(state[slot("position")]) + step + 1, len(forced) - 1)
        batch[step + 1] = forced[at] if forced[at] >= 0 else choice[0]
        state[slot("step")] = step + 1
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        choice, state, forced, batch = buffers
        step = k.let(self.get(k, state, "step"))
        at = k.clamp(self.get(k, state, "position") + step + 1, 0, forced.type.elements - 1)
        wanted = k.let(k.load(forced, at))
        token = k.select(wanted >= 0, wanted, k.load(choice, 0))
        k.store(batch, step + 1, token)
        self.put(k, state, "step", step + 1)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import draft_token_launches

        return draft_token_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        types = (TensorType((1,), "i32"), STATE, CONTEXT, BATCH)
        return [
            Sample(
                types,
                rows=1,
                values=(
                    random_state(position=position, step=2),
                    tokens("choice", 1, 9, 10),
                    tokens("forced", 64, low, 1),
                    tokens("batch"),
                ),
            )
            for position, low in ((7, -1), (7, 0), (62, 0))
        ]


@op("advance")
@dataclass(frozen=True)
class Advance(StateOp):
    """Commit the rows of a prompt chunk: N += rows."""

    operands = (Operand("state", "@", "update"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        arrays[0][slot("position")] += arrays[0][slot("rows")]
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        (state,) = buffers
        total = self.get(k, state, "position") + self.get(k, state, "rows")
        self.put(k, state, "position", total)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import advance_launches

        return advance_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample((STATE,), values=(random_state(position=7, rows=3),))]

"""How sure the drafter is of a draft, and what follows from it; only where a spec arms a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, fixed, op, type_bytes
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Kernel
from memra_compiler.ops.state import STATE, StateOp, random_state
from memra_runtime.artifact import MAX_DEPTH, slot

#: How many rows of a trimmed head are in use.
USED = TensorType((1,), "i32")


@op("confidence")
@dataclass(frozen=True)
class Confidence(Op):
    """The softmax probability of the choice: 1 / sum over v of e^(logits[v] - logits[choice]).

    The choice is that of `argmax`, so no term is above 1; where it is -1, the row is unsound and
    its confidence 0. A trimmed head is given its chosen row, and how many of its rows are in use:
    the others are left out of the sum.

    Shapes: logits [T, V] f32, choice [T] i32, or [T] head_row and used [1] -> [T] f32.
    """

    operands = (Operand("logits"), Operand("choice"), Operand("used", "@"))
    adds_planes = ("logits",)
    variadic = True

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        logits, choice, *used = types
        vocab = fixed(self, logits, 1)
        expect(vocab % LANES == 0, self, f"vocabulary must be a multiple of {LANES}: {logits}")
        wanted = "head_row" if used else "i32"
        expect(choice.dtype == wanted, self, f"the choice must be {wanted}, got {choice}")
        expect(used in ([], [USED]), self, f"the rows in use must be {USED}, got {used}")
        return (TensorType((logits.shape[0],)),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        logits, choice, *used = arrays
        logits, choice = logits[:rows].astype(np.float64), choice[:rows]
        count = int(used[0][0]) if used else logits.shape[1]
        found = np.zeros(rows)
        for t in np.flatnonzero(choice >= 0):
            found[t] = 1 / np.exp(logits[t, :count] - logits[t, choice[t]]).sum()
        return (found,)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 exp, f32 sum by lane, then a tree"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        logits = types[0]
        moved = type_bytes(logits, rows) + 8 * rows
        return Cost(bytes=moved, flops=20 * rows * logits.max_shape[1])

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        logits, choice, *used, out = buffers
        vocab = logits.type.max_shape[1]
        with k.loop(k.rows) as t:
            chosen = k.let(k.load(choice, t))
            top = k.let(k.load(logits, t * vocab + k.index(k.clamp(chosen, 0, vocab - 1))))
            total = k.register(k.splat(0.0))
            with k.loop(vocab // LANES) as i:
                value = k.load(logits, t * vocab + i * LANES, LANES)
                term = k.exp(value - k.splat(top))
                if used:
                    number = k.iota() + k.splat(k.cast(i, "int32") * LANES)
                    end = k.splat(k.load(used[0], 0), "int32")
                    term = k.select(number < end, term, k.splat(0.0))
                total.set(total.get() + term)
            found = k.const(1.0) / k.sum(total.get())
            k.store(out, t, k.select(chosen >= 0, found, k.const(0.0)))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_confidence import confidence_launches

        return confidence_launches(self, arch, *types, splits=types[0].planes)

    def scratch_bytes_cuda(self, arch: CudaArch, *types: TensorType) -> int:
        from memra_compiler.ops.cuda_confidence import confidence_scratch_floats

        return 4 * confidence_scratch_floats(self, types[0])

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sharp(rng: np.random.Generator) -> Array:
            logits = rng.standard_normal((4, 64)).astype(np.float32)
            logits[np.arange(4), CHOSEN] = [4, 60, 200, 9]  # from doubtful to certain
            logits[2, 8] = -np.inf
            return logits

        def chosen(rng: np.random.Generator) -> Array:
            return CHOSEN.astype(np.int32)

        def unsound(rng: np.random.Generator) -> Array:
            return np.array([5, -1, 63, 0], np.int32)

        types = (TensorType((4, 64)), TensorType((4,), "i32"))
        trimmed = (types[0], TensorType((4,), "head_row"), USED)

        def few(rng: np.random.Generator) -> Array:
            return np.array([37], np.int32)

        return [
            Sample(types, rows=4, values=(("logits", sharp), ("choice", chosen))),
            Sample(types, rows=4, values=(("logits", sharp), ("choice", unsound))),
            Sample(
                trimmed,
                rows=4,
                values=(("logits", sharp), ("choice", chosen), ("used", few)),
            ),
        ]


#: Choices of the samples, by row.
CHOSEN = np.array([5, 0, 17, 36])


@op("weigh_draft")
@dataclass(frozen=True)
class WeighDraft(StateOp):
    """What the confidence of the draft just made does to this round and to the next.

    The first draft below `late_below` is noted (`doubtful`): `adapt_depth` bounds the next round
    by it. A draft below `doubt`, this round's threshold, ends its chain: `drafted` is lowered, and
    with it the rows to verify. The draft itself is kept or, with `cut_drops`, goes too; but not the
    first, without which there would be no round, unless `cut_first`. A first draft that stays does
    not end the chain, then. A confidence that equals its threshold is not below it.
    """

    operands = (Operand("confidence"), Operand("state", "@", "update"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        one = types[0].dtype == "f32" and len(types[0].shape) == 1
        expect(one, self, f"the confidence must be f32[T], got {types[0]}")
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        confidence, state = arrays
        bits = int(confidence.astype(np.float32).view(np.int32)[0])
        draft, drafted = int(state[slot("step")]) - 1, int(state[slot("drafted")])
        if draft >= drafted:
            return ()
        if bits < state[slot("late_below")]:
            state[slot("doubtful")] = min(int(state[slot("doubtful")]), draft)
        drops, first = state[slot("cut_drops")], state[slot("cut_first")]
        kept = draft if drops else draft + 1
        may_go = not drops or draft > 0 or first
        if bits < state[slot("doubt")] and may_go and kept < drafted:
            state[slot("drafted")], state[slot("rows")] = kept, kept + 1
            state[slot("cuts")] += 1
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        confidence, state = buffers
        bits = k.let(k.reinterpret(k.load(confidence, 0), "int32"))
        draft = k.let(self.get(k, state, "step") - 1)
        drafted = k.let(self.get(k, state, "drafted"))
        doubtful = k.let(self.get(k, state, "doubtful"))
        with k.when(k.both(draft < drafted, bits < self.get(k, state, "late_below"))):
            self.put(k, state, "doubtful", k.minimum(doubtful, draft))
        drops = k.let(self.get(k, state, "cut_drops"))
        kept = k.let(draft + 1 - drops)
        # draft + cut_first is 0 only for a first draft that must stay
        may_go = k.either(drops == 0, draft + self.get(k, state, "cut_first") > 0)
        below = k.both(bits < self.get(k, state, "doubt"), may_go)
        with k.when(k.both(below, k.both(draft < drafted, kept < drafted))):
            self.put(k, state, "drafted", kept)
            self.put(k, state, "rows", kept + 1)
            self.put(k, state, "cuts", self.get(k, state, "cuts") + 1)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_confidence import weigh_draft_launches

        return weigh_draft_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(confidence: float, **slots: int) -> Sample:
            def made(rng: np.random.Generator) -> Array:
                return np.array([confidence], np.float32)

            base = {"drafted": 4, "rows": 5, "doubtful": MAX_DEPTH, "cuts": 7,
                    "late_below": float_bits(0.5), "doubt": float_bits(0.5)}  # fmt: skip
            values = (("confidence", made), random_state(**base | slots))
            return Sample((TensorType((1,)), STATE), rows=1, values=values)

        cases: list[dict[str, int]] = [
            {"step": step, "cut_drops": drops, "cut_first": first}
            for step in (1, 2, 4, 5)
            for drops in (0, 1)
            for first in (0, 1)
        ]
        cases += [{"step": 2, "doubt": 0}, {"step": 2, "late_below": 0}]
        cases += [{"step": 3, "doubtful": 1}, {"step": 1, "drafted": 1, "rows": 2}]
        return [sample(p, **case) for p in (0.25, 0.5, 0.75) for case in cases]


def float_bits(value: float) -> int:
    """A float32 as an int32 counter; of numbers that are not negative, bits compare as they do."""
    return int(np.float32(value).view(np.int32))

"""The end of a round: accept, roll back, commit, choose the next depth; all on the device block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Operand, Sample, expect, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.state import (
    BATCH,
    EOS,
    RING,
    STATE,
    StateOp,
    random_state,
    tokens,
)
from memra_runtime.artifact import (
    BATCH_ROWS,
    MAX_DEPTH,
    MAX_EOS,
    STATE_ACCEPTED,
    STATE_ATTEMPTED,
    slot,
)
from memra_runtime.artifact import STATE as COUNTERS


@op("accept")
@dataclass(frozen=True)
class Accept(StateOp):
    """Count the longest prefix of drafts the target agrees with.

    Before: batch[1..k] are the drafts, choice[i] is the target's token after batch[0..i].
    After: `accepted` is the largest m with batch[i+1] = choice[i] for all i < m.
    """

    operands = (
        Operand("state", "@", "update"),
        Operand("batch", "@"),
        Operand("choice", "@"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        state, batch, choice = arrays
        k = int(state[slot("drafted")])
        agrees = batch[1 : k + 1] == choice[:k]
        m = int(np.cumprod(agrees).sum())
        state[slot("accepted")] = m
        state[slot("rounds")] += 1
        state[slot("total_drafted")] += k
        state[slot("total_accepted")] += m
        state[STATE_ATTEMPTED : STATE_ATTEMPTED + k] += 1
        state[STATE_ACCEPTED : STATE_ACCEPTED + m] += 1
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        state, batch, choice = buffers
        found = k.local(2, "i32")
        k.store(found, 0, k.int32(0))
        k.store(found, 1, k.int32(1))
        with k.loop(self.get(k, state, "drafted")) as i:
            agrees = k.cast(k.load(batch, i + 1) == k.load(choice, i), "int32")
            alive = k.let(k.load(found, 1) * agrees)
            k.store(found, 1, alive)
            k.store(found, 0, k.load(found, 0) + alive)
            k.store(state, STATE_ATTEMPTED + i, k.load(state, STATE_ATTEMPTED + i) + 1)
            k.store(state, STATE_ACCEPTED + i, k.load(state, STATE_ACCEPTED + i) + alive)
        m = k.let(k.load(found, 0))
        self.put(k, state, "accepted", m)
        self.put(k, state, "rounds", self.get(k, state, "rounds") + 1)
        for total, part in (("total_drafted", "drafted"), ("total_accepted", "accepted")):
            self.put(k, state, total, self.get(k, state, total) + self.get(k, state, part))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import accept_launches

        return accept_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def agreeing(rng: np.random.Generator) -> Array:
            return np.array([9, *[1] * 7, *[0] * 8], np.int32)

        def ones(rng: np.random.Generator) -> Array:
            return np.ones(BATCH_ROWS, np.int32)

        def sample(drafted: int) -> Sample:
            values = (random_state(drafted=drafted, rounds=3), ("batch", agreeing),
                      ("choice", ones))  # fmt: skip
            return Sample((STATE, BATCH, BATCH), values=values)

        return [sample(n) for n in (0, 1, 7, 8, 15)]


@op("rollback")
@dataclass(frozen=True)
class Rollback(StateOp):
    """Forget the rejected rows: N += accepted + 1.

    Cache rows are addressed by position, so moving N back is the whole rollback of a `truncate`
    plane. `skip` keeps every row of the round: a fault, planted by checks.
    """

    skip: bool = False

    operands = (Operand("state", "@", "update"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        state = arrays[0]
        state[slot("position")] += state[slot("drafted" if self.skip else "accepted")] + 1
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        (state,) = buffers
        kept = self.get(k, state, "drafted" if self.skip else "accepted")
        self.put(k, state, "position", self.get(k, state, "position") + kept + 1)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import rollback_launches

        return rollback_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        values = (random_state(position=7, drafted=5, accepted=2),)
        return [Sample((STATE,), (("skip", s),), values=values) for s in (False, True)]


@op("commit")
@dataclass(frozen=True)
class Commit(StateOp):
    """Publish the accepted tokens and set up the next round.

    After: batch[0..m] are in the ring, `pending` is choice[m] and `@hidden` the row that chose it;
    `ended` is set once any of these tokens is an end of sequence. `row_shift` takes the hidden of
    another row: a fault, planted by checks.
    """

    row_shift: int = 0

    operands = (
        Operand("state", "@", "update"),
        Operand("batch", "@"),
        Operand("choice", "@"),
        Operand("verified", "@"),
        Operand("hidden", "@", "update"),
        Operand("ring", "@", "update"),
        Operand("eos", "@"),
    )

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        verified, hidden, ring = types[3], types[4], types[5]
        expect(verified.shape[1:] == hidden.shape, self, f"{verified} holds no rows {hidden}")
        expect(ring.elements & (ring.elements - 1) == 0, self, f"ring {ring}: not a power of two")
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        state, batch, choice, verified, hidden, ring, eos = arrays
        m, k = int(state[slot("accepted")]), int(state[slot("drafted")])
        count = int(state[slot("ring_count")])
        for i in range(m + 1):
            ring[(count + i) % len(ring)] = batch[i]
        state[slot("ring_count")] = count + m + 1
        state[slot("pending")] = choice[m]
        hidden[:] = verified[(m + self.row_shift) % (k + 1)]
        if np.isin([*batch[: m + 1], choice[m]], eos[eos >= 0]).any():
            state[slot("ended")] = 1
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        state, batch, choice, verified, hidden, ring, eos = buffers
        m = k.let(self.get(k, state, "accepted"))
        count = k.let(self.get(k, state, "ring_count"))
        pending = k.let(k.load(choice, m))

        def watch(token: Expr) -> None:
            with k.loop(eos.type.elements) as e:
                end = k.let(k.load(eos, e))
                with k.when(k.both(end >= 0, end == token)):
                    self.put(k, state, "ended", 1)

        with k.loop(m + 1) as i:
            token = k.let(k.load(batch, i))
            k.store(ring, (count + k.cast(i, "int32")) & (ring.type.elements - 1), token)
            watch(token)
        watch(pending)
        self.put(k, state, "ring_count", count + m + 1)
        self.put(k, state, "pending", pending)
        row = m
        if self.row_shift:
            row = (m + self.row_shift) % (self.get(k, state, "drafted") + 1)
        size = hidden.type.elements
        at = k.let(k.cast(row, "int64") * size)
        with k.loop(size // LANES) as i:
            k.store(hidden, i * LANES, k.load(verified, at + i * LANES, LANES), LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import commit_launches

        return commit_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        types = (STATE, BATCH, BATCH, TensorType((BATCH_ROWS, 32)), TensorType((32,)), RING, EOS)

        def sample(accepted: int, shift: int, eos: int) -> Sample:
            values = (
                random_state(drafted=5, accepted=accepted, ring_count=29),
                tokens("batch"),
                tokens("choice"),
                tokens("ring", 32),
                tokens("eos", MAX_EOS, eos, eos + 1),
            )
            return Sample(types, (("row_shift", shift),), values=values)

        return [sample(0, 0, -1), sample(5, 0, 1), sample(3, 0, 7), sample(5, 1, 0)]


@op("adapt_depth")
@dataclass(frozen=True)
class AdaptDepth(StateOp):
    """Choose the next round's depth: the one place where a depth is ever decided.

    Adaptive: clamp(m + 1, floor(N), cap); fixed: cap. Then never more than the context still
    holds: N + depth + 1 <= capacity, and never below 0. `fresh` starts a session at
    `depth_initial`.

    Once `floor_patience` rounds in a row have accepted none of their drafts, the floor is 1 at
    most; with `floor_least` 0 rounds rest, without a draft, and one is tried after `floor_probe`
    of them. If draft f was the first below `late_below`, the next depth is at most f + 1 or the
    floor. And it says below which confidence that round's chain ends (`doubt`): `cut_below`, in
    every round (`cut_always`) or, from `floor_boundary` on, after one that was not all accepted.
    """

    fresh: bool = False

    operands = (Operand("state", "@", "update"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        (state,) = arrays
        at = {name: int(state[slot(name)]) for name in COUNTERS}
        n, cap, drafted, accepted = (
            at[s] for s in ("position", "depth_cap", "drafted", "accepted")
        )
        deep = n >= at["floor_boundary"]
        floor = at["floor_deep" if deep else "floor_short"]
        misses = 0 if self.fresh or accepted else at["misses"] + (drafted > 0)
        tired = misses >= at["floor_patience"]
        idle = at["idle"] + 1 if tired and not drafted and not self.fresh else 0
        if tired:
            floor = min(floor, 1)
        wanted = at["depth_initial"] if self.fresh else cap
        if at["adaptive"] and not self.fresh:
            wanted = min(max(accepted + 1, floor), max(at["doubtful"] + 1, min(floor, cap)))
            if tired and not at["floor_least"] and idle < at["floor_probe"]:
                wanted = 0
        doubts = at["cut_always"] or (deep and not self.fresh and accepted < drafted)
        state[slot("misses")], state[slot("idle")] = misses, idle
        state[slot("doubt")] = at["cut_below"] if doubts else 0
        state[slot("depth")] = max(0, min(wanted, cap, at["capacity"] - n - 1))
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        (state,) = buffers
        names = ("position", "depth_cap", "drafted", "accepted")
        n, cap, drafted, accepted = (k.let(self.get(k, state, s)) for s in names)
        one, none = k.int32(1), k.int32(0)
        deep = k.let(k.select(n >= self.get(k, state, "floor_boundary"), one, none))
        short, long = (self.get(k, state, s) for s in ("floor_short", "floor_deep"))
        floor = k.let(k.select(deep == 1, long, short))
        cut, always = (k.let(self.get(k, state, s)) for s in ("cut_below", "cut_always"))
        if self.fresh:
            self.put(k, state, "misses", 0)
            self.put(k, state, "idle", 0)
            self.put(k, state, "doubt", k.select(always == 1, cut, none))
            wanted = self.get(k, state, "depth_initial")
        else:
            missed = k.let(k.select(drafted > 0, one, none))
            misses = k.let(k.select(accepted > 0, none, self.get(k, state, "misses") + missed))
            tired = k.let(k.select(misses >= self.get(k, state, "floor_patience"), one, none))
            rested = k.both(tired == 1, missed == 0)
            idle = k.let(k.select(rested, self.get(k, state, "idle") + 1, none))
            floor = k.let(k.minimum(floor, k.select(tired == 1, one, floor)))
            sure = k.maximum(self.get(k, state, "doubtful") + 1, k.minimum(floor, cap))
            more = k.minimum(k.maximum(accepted + 1, floor), sure)
            rests = k.both(self.get(k, state, "floor_least") == 0,
                           idle < self.get(k, state, "floor_probe"))  # fmt: skip
            more = k.select(k.both(tired == 1, rests), none, more)
            wanted = k.let(k.select(self.get(k, state, "adaptive") == 1, more, cap))
            doubts = k.either(always == 1, k.both(deep == 1, accepted < drafted))
            self.put(k, state, "doubt", k.select(doubts, cut, none))
            self.put(k, state, "misses", misses)
            self.put(k, state, "idle", idle)
        room = self.get(k, state, "capacity") - n - 1
        self.put(k, state, "depth", k.clamp(k.clamp(wanted, 0, cap), 0, room))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import adapt_depth_launches

        return adapt_depth_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(fresh: bool, **slots: int) -> Sample:
            base = {"capacity": 100, "depth_cap": 5, "floor_short": 4, "floor_deep": 1,
                    "floor_boundary": 50, "floor_patience": 2, "floor_least": 1,
                    "floor_probe": 3, "adaptive": 1, "drafted": 5, "depth_initial": 3,
                    "doubtful": MAX_DEPTH, "cut_below": 9}  # fmt: skip
            return Sample((STATE,), (("fresh", fresh),), values=(random_state(**base | slots),))

        cases = [{"position": p, "accepted": m} for p in (7, 60, 96, 99, 100) for m in (0, 3, 5)]
        cases += [{"adaptive": 0}, {"depth_cap": 0}, {"depth_cap": 2, "accepted": 2}]
        cases += [{"misses": n, "drafted": d} for n in (0, 1, 2) for d in (0, 3)]
        cases += [{"misses": 7, "accepted": 2}, {"misses": 7, "floor_short": 0}]
        rest = {"misses": 7, "floor_least": 0}
        cases += [rest | {"idle": i, "drafted": d} for i in (0, 1, 2, 3) for d in (0, 1)]
        cases += [rest | {"misses": 1, "drafted": 0}, rest | {"adaptive": 0, "drafted": 0}]
        cases += [{"doubtful": f, "accepted": 4, "position": p} for f in (0, 2, 5) for p in (7, 60)]
        cases += [{"accepted": m, "cut_always": a, "position": p}
                  for m in (3, 5) for a in (0, 1) for p in (7, 60)]  # fmt: skip
        return [sample(fresh, **case) for case in cases for fresh in (False, True)]

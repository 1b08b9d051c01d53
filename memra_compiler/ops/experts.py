"""The products of a mixture of experts: each row meets the matrices of its own experts only.

The matrices of all E experts are one weight, stacked along its rows: expert e has rows e * N to
(e + 1) * N. A row's bits depend on its own inputs and experts, never on what other rows chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import ACTIVATIONS, activate, activate_reference
from memra_compiler.ops.base import (
    Array,
    Cost,
    Op,
    Operand,
    Sample,
    expect,
    op,
    type_bytes,
)
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Kernel
from memra_compiler.ops.linear import (
    MAX_ROWS,
    TILE_ROWS,
    check,
    linear_class,
    rows_scratch,
    tile_sums,
    widen,
)
from memra_compiler.ops.quantise import ROUNDINGS


def _check_ids(op: Op, x: TensorType, experts: TensorType) -> int:
    """Check the ids `[T, A]` of the experts of rows `x`; returns A."""
    fits = len(experts.shape) == 2 and experts.dtype == "i32" and experts.shape[0] == x.shape[0]
    expect(fits, op, f"takes the experts of each row as i32 [T, A], got {experts} beside {x}")
    return experts.max_shape[1]


def _rows_each(op: Op, rows: int, experts: int) -> int:
    """Weight rows of one expert, whole tiles."""
    whole = rows % (experts * TILE_ROWS) == 0
    expect(whole, op, f"{rows} weight rows are no {experts} experts of whole tiles of {TILE_ROWS}")
    return rows // experts


def _cost(
    rows: int,
    experts: int,
    active: int,
    values: Sequence[TensorType],
    weights: Sequence[TensorType],
) -> Cost:
    """All values, and the weights of as many experts as `rows` rows can touch."""
    moved, flops = sum(type_bytes(t, rows) for t in values), 0
    for w in weights:
        moved += w.nbytes // experts * min(rows * active, experts)
        flops += 2 * rows * active * (w.elements // experts)
    return Cost(moved, flops)


@op("experts_gated")
@dataclass(frozen=True)
class ExpertsGated(Op):
    """The first half of a gated feed-forward, in each of a row's experts: act(gate x) * (up x).

    Shapes: x [T, K] f32, a8 or bf16, ids [T, A] i32, and either one weight [E * 2F, K] (of an
    expert, F rows of gate, then F of up) or gate and up [E * F, K] -> [T, A * F] f32, in the order
    of ids.
    """

    experts: int = 1
    act: str = "gelu_tanh"

    operands = (Operand("x"), Operand("ids"), Operand("w", "$"))
    variadic = True
    settles = True

    def width(self, weights: Sequence[TensorType]) -> int:
        """F, the width of an expert."""
        return weights[0].max_shape[0] * len(weights) // (2 * self.experts)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, ids, *weights = types
        active = _check_ids(self, x, ids)
        expect(self.act in ACTIVATIONS, self, f"unknown activation {self.act}")
        expect(1 <= len(weights) <= 2, self, f"takes one or two weights, got {len(weights)}")
        outputs = {check(self, x, w) for w in weights}
        expect(len(outputs) == 1, self, f"gate and up differ in rows: {weights}")
        _rows_each(self, outputs.pop() * len(weights) // 2, self.experts)
        size = self.width(weights)
        expect(size % LANES == 0, self, f"width must be a multiple of {LANES}, got {size}")
        return (TensorType((x.shape[0], active * size)),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, ids, *weights = arrays
        stacked = [w.reshape(self.experts, -1, w.shape[1]) for w in weights]
        gate, up = stacked if len(stacked) == 2 else np.split(stacked[0], 2, axis=1)
        gated, raised = (
            np.einsum("tk,tafk->taf", x[:rows], w[ids[:rows]]).reshape(rows, -1) for w in (gate, up)
        )
        return (activate_reference(self.act, gated) * raised,)

    def numeric_class(self, *types: TensorType) -> str:
        x, _, gate, *up = types
        second = linear_class(x, up[0] if up else gate)
        return f"{self.act}({linear_class(x, gate)}) * ({second})"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        x, ids, *weights = types
        values = (x, ids, *self.infer(*types))
        return _cost(rows, self.experts, ids.max_shape[1], values, weights)

    def _held(self, ids: TensorType, weights: Sequence[TensorType]) -> int:
        """Floats that all gates take until their activation."""
        return MAX_ROWS * ids.max_shape[1] * self.width(weights)

    def scratch_floats(self, *types: TensorType) -> int:
        x, ids, *weights = types
        return self._held(ids, weights) + rows_scratch(x)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, ids, *weights, y, scratch = buffers
        types = [w.type for w in weights]
        size, active, inputs = self.width(types), ids.type.max_shape[1], x.type.max_shape[1]
        stride = types[0].max_shape[0] // self.experts
        held = k.part(scratch, 0, self._held(ids.type, types))
        rows = widen(k, x, scratch, held.type.elements)
        # The same tile of all experts, so that rows of one expert find it in the cache.
        with k.loop(size // TILE_ROWS) as n, k.loop(k.rows * active) as i:
            first = k.let(k.index(k.load(ids, i)) * stride + n * TILE_ROWS)
            x_at = k.let(k.floor_div(i, active) * inputs)
            for w, row, out in (
                (weights[0], first, held),
                (weights[-1], first + (stride - size), y),
            ):
                sums = tile_sums(k, rows, x_at, w, row)
                k.store(out, i * size + n * TILE_ROWS, k.sum4(sums), TILE_ROWS)
        with k.loop(k.rows * (active * size // LANES)) as i:
            value = activate(k, self.act, k.let(k.load(held, i * LANES, LANES)))
            k.store(y, i * LANES, value * k.load(y, i * LANES, LANES), LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_experts import experts_gated_launches

        return experts_gated_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        ids = (("ids", _random_ids(6, 3, 8)),)
        x, chosen = TensorType((6, 64)), TensorType((6, 3), "i32")
        long, wide = TensorType((6, 256)), (("experts", 8), ("act", "silu"))
        both, one = TensorType((8 * 64, 64), "q8_0"), TensorType((8 * 32, 64), "q4_0")
        return [
            Sample((x, chosen, both), (("experts", 8),), rows=6, values=ids),
            Sample((x, chosen, one, replace(one, dtype="bf16")), wide, rows=6, values=ids),
            Sample((long, chosen, TensorType((8 * 64, 256), "q4_k")), wide, rows=6, values=ids),
            *(
                Sample((replace(x, dtype=kind), chosen, both), wide, rows=6, values=ids)
                for kind in ROUNDINGS
            ),
        ]


@op("experts_down")
@dataclass(frozen=True)
class ExpertsDown(Op):
    """The second half, and the sum over a row's experts of their shares of it.

    y[t] = sum over a of shares[t, a] * (down of expert ids[t, a]) h[t, a], in the order of a.

    Shapes: h [T, A * F] f32, a8 or bf16, ids [T, A] i32, shares [T, A] f32, w [E * N, F] ->
    [T, N] f32.
    """

    experts: int = 1

    operands = (Operand("h"), Operand("ids"), Operand("shares"), Operand("w", "$"))
    reads_early = ("ids",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        h, ids, shares, w = types
        active = _check_ids(self, h, ids)
        expect(shares == TensorType(ids.shape), self, f"shares {shares} are not those of {ids}")
        size = w.max_shape[-1]
        whole = h.shape[1:] == (active * size,)
        expect(whole, self, f"weight {w} takes {active} x {size} inputs, got {h}")
        outputs = check(self, replace(h, shape=(h.shape[0], size)), w)
        return (TensorType((h.shape[0], _rows_each(self, outputs, self.experts))),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        h, ids, shares, w = arrays
        chosen = w.reshape(self.experts, -1, w.shape[1])[ids[:rows]]
        parts = h[:rows].reshape(rows, -1, w.shape[1])
        return (np.einsum("ta,taf,tanf->tn", shares[:rows], parts, chosen),)

    def numeric_class(self, *types: TensorType) -> str:
        h, ids, _, w = types
        return f"{linear_class(h, w)}; fma over {ids.max_shape[1]} experts"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        h, ids, shares, w = types
        values = (h, ids, shares, *self.infer(*types))
        return _cost(rows, self.experts, ids.max_shape[1], values, [w])

    def scratch_floats(self, *types: TensorType) -> int:
        return rows_scratch(types[0])

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        h, ids, shares, w, y, *scratch = buffers
        active, (outputs, size) = ids.type.max_shape[1], w.type.max_shape
        each = outputs // self.experts
        rows = widen(k, h, scratch[0], 0) if scratch else h
        with k.loop(each // TILE_ROWS) as n, k.loop(k.rows) as t:
            total = k.local(TILE_ROWS)
            k.store(total, 0, k.splat(0.0, lanes=TILE_ROWS), TILE_ROWS)
            with k.loop(active) as a:
                i = k.let(t * active + a)
                row = k.let(k.index(k.load(ids, i)) * each + n * TILE_ROWS)
                part = k.sum4(tile_sums(k, rows, i * size, w, row))
                share = k.splat(k.load(shares, i), lanes=TILE_ROWS)
                held = k.load(total, 0, TILE_ROWS)
                k.store(total, 0, k.fma(share, part, held, TILE_ROWS), TILE_ROWS)
            k.store(y, t * each + n * TILE_ROWS, k.load(total, 0, TILE_ROWS), TILE_ROWS)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_experts import experts_down_launches

        return experts_down_launches(self, arch, *types)

    def scratch_bytes_cuda(self, arch: CudaArch, *types: TensorType) -> int:
        from memra_compiler.ops.cuda_experts import experts_down_scratch

        _, ids, _, _, out = types
        return experts_down_scratch(ids, out)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        ids, attrs = (("ids", _random_ids(6, 3, 8)),), (("experts", 8),)
        h, chosen, shares = TensorType((6, 96)), TensorType((6, 3), "i32"), TensorType((6, 3))
        long, w = TensorType((6, 3 * 256)), TensorType((8 * 16, 32), "q8_0")
        types = (
            (h, chosen, shares, w),
            (h, chosen, shares, replace(w, dtype="f32")),
            (long, chosen, shares, TensorType((8 * 16, 256), "q6_k")),
            *((replace(h, dtype=kind), chosen, shares, w) for kind in ROUNDINGS),
        )
        return [Sample(one, attrs, rows=6, values=ids) for one in types]


#: Both ops on the weights of experts.
EXPERTS = (ExpertsGated, ExpertsDown)


def _random_ids(rows: int, active: int, experts: int) -> Callable[[np.random.Generator], Array]:
    """Different experts for each row, and some that rows share."""

    def make(rng: np.random.Generator) -> Array:
        everyone = np.tile(np.arange(experts), (rows, 1))
        return rng.permuted(everyone, axis=1)[:, :active].astype(np.int32)

    return make

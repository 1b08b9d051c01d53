"""A head that gives logits to some of the vocabulary: the tokens of the clusters that score best.

Source: transformers `models/gemma4_assistant` (`Gemma4AssistantMaskedEmbedder`). There every other
token gets a logit below all of these, so the greedy choice is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Cost, Op, Operand, Sample, expect, fixed, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.formats import WEIGHT_FORMATS, decode, step
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import te, tirx

#: Element types of a stored list of token ids.
ID_FORMATS = ("i32", "i64")
#: No score counts for less: NaN and -infinity are ranked as this.
LEAST = -3.4e38


@op("top_clusters")
@dataclass(frozen=True)
class TopClusters(Op):
    """The `active` best scores of each row, best first; the lowest number wins a tie.

    Shapes: scores [T, C] f32 -> [T, active] i32.
    """

    active: int = 1

    operands = (Operand("scores"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        (scores,) = types
        count = fixed(self, scores, 1)
        expect(scores.dtype == "f32", self, f"scores must be f32, got {scores}")
        expect(count % LANES == 0, self, f"clusters must be a multiple of {LANES}: {scores}")
        expect(1 <= self.active <= count, self, f"{self.active} of {count} cannot be the best")
        return (TensorType((scores.shape[0], self.active), "i32"),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        scores = np.fmax(arrays[0][:rows], LEAST)
        return (np.argsort(-scores, axis=1, kind="stable")[:, : self.active].astype(np.int32),)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 compare, lowest number wins"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        scores, out = buffers
        count = scores.type.max_shape[1]
        one, none = k.splat(1, "int32"), k.splat(0, "int32")

        def sound(at: Expr, lanes: int) -> Expr:
            return k.let(k.maximum(k.load(scores, at, lanes), k.splat(LEAST, lanes=lanes)))

        with k.loop(k.rows) as t, k.loop(count // LANES) as group:
            mine = sound(t * count + group * LANES, LANES)
            number = k.let(k.iota() + k.splat(k.cast(group, "int32") * LANES))
            ranks = k.local(LANES, "i32")
            k.store(ranks, 0, none, LANES)
            with k.loop(count) as other:
                theirs = k.let(k.splat(sound(t * count + other, 1)))
                first = k.splat(k.cast(other, "int32")) < number
                tied = k.select(first, k.select(k.equal(theirs, mine), one, none), none)
                ahead = k.select(theirs > mine, one, tied)
                k.store(ranks, 0, k.load(ranks, 0, LANES) + ahead, LANES)
            with k.loop(LANES) as lane:
                rank = k.let(k.load(ranks, lane))
                with k.when(rank < self.active):
                    k.store(out, t * self.active + rank, k.cast(group * LANES + lane, "int32"))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_clusters import top_clusters_launches

        return top_clusters_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def ties(rng: np.random.Generator) -> Array:
            scores = rng.integers(0, 4, (3, 64)).astype(np.float32)
            scores[1, 5:9] = np.nan, -np.inf, 3, np.inf
            return scores

        return [
            Sample((TensorType((3, 64)),), (("active", 5),), values=(("scores", ties),)),
            Sample((TensorType((1, 16)),), (("active", 16),), rows=1),
        ]


@op("cluster_logits")
@dataclass(frozen=True)
class ClusterLogits(Op):
    """Logits of the tokens of some clusters, cluster by cluster in the order of `clusters`.

    `ordering` lists the `size` tokens of cluster 0, then those of cluster 1, and so on. Ids are
    clamped into the table.

    Shapes: x [T, K] f32, clusters [T, A] i32, ordering [V] i32 or i64, table [V, K] ->
    [T, A * size].
    """

    size: int = 1

    operands = (
        Operand("x"), Operand("clusters"), Operand("ordering", "$"), Operand("table", "$"),
    )  # fmt: skip

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, clusters, ordering, table = types
        vocab, inputs = fixed(self, table, 0), fixed(self, table, 1)
        check_ordering(self, self.size, clusters, ordering)
        expect(ordering.shape == (vocab,), self, f"ordering {ordering} does not fit {table}")
        expect(table.dtype in WEIGHT_FORMATS, self, f"cannot read a table stored as {table.dtype}")
        expect(inputs % 32 == 0, self, f"width must be a multiple of 32, got {table}")
        expect(x.dtype == "f32" and x.shape[1:] == (inputs,), self, f"{x} does not meet {table}")
        return (TensorType((x.shape[0], fixed(self, clusters, 1) * self.size)),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, clusters, ordering, table = arrays
        tokens = ordering.astype(np.int64).reshape(-1, self.size)[clusters[:rows]]
        tokens = np.clip(tokens.reshape(rows, -1), 0, len(table) - 1)
        return (np.einsum("tk,tjk->tj", x[:rows], table[tokens]),)

    def numeric_class(self, *types: TensorType) -> str:
        steps = types[3].max_shape[1] // LANES
        return f"f32 x {types[3].dtype}->f32, fma over {steps} steps of 16 lanes, tree of 16"

    def cost(self, rows: int, *types: TensorType) -> Cost:
        _, clusters, ordering, table = types
        read = rows * clusters.max_shape[1] * self.size
        ids = ordering.nbytes // ordering.elements
        inputs = table.max_shape[1]
        return Cost(read * (table.row_bytes + ids + 4) + 4 * rows * inputs, 2 * read * inputs)

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, clusters, ordering, table, out = buffers
        vocab, inputs = table.type.max_shape
        active, block = clusters.type.max_shape[1], step(table.format)
        with k.loop(k.rows) as t, k.loop(active) as a:
            cluster = k.let(k.index(k.load(clusters, t * active + a)))
            with k.loop(self.size) as s:
                stored = k.cast(k.load(ordering, cluster * self.size + s), "int32")
                token = k.let(k.index(k.clamp(stored, 0, vocab - 1)))
                total = k.register(k.splat(0.0))
                with k.loop(inputs // block) as b:
                    for c in range(block // LANES):
                        w = decode(k, table, token, inputs, b * block, c)
                        xi = k.load(x, t * inputs + b * block + c * LANES, LANES)
                        total.set(k.fma(w, xi, total.get()))
                k.store(out, (t * active + a) * self.size + s, k.sum(total.get()))

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_clusters import cluster_logits_launches

        return cluster_logits_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, clusters = TensorType((3, 256)), TensorType((3, 4), "i32")
        return [
            Sample(
                (x, clusters, TensorType((96,), ids), TensorType((96, 256), form)),
                (("size", 6),),
                values=(("clusters", _clusters(16)), ("ordering", _ordering(96))),
            )
            for ids, form in zip(("i64", "i32") * 4, WEIGHT_FORMATS, strict=True)
        ]


@op("cluster_token")
@dataclass(frozen=True)
class ClusterToken(Op):
    """The token id of a place among the logits of `cluster_logits`; a negative place is kept.

    Shapes: place [T] i32, clusters [T, A] i32, ordering [V] i32 or i64 -> [T] i32.
    """

    size: int = 1

    operands = (Operand("place"), Operand("clusters"), Operand("ordering", "$"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        place, clusters, ordering = types
        expect(place.dtype == "i32" and len(place.shape) == 1, self, f"place must be i32: {place}")
        check_ordering(self, self.size, clusters, ordering)
        return (place,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        place, clusters, ordering = arrays
        at = np.maximum(place[:rows], 0)
        cluster = clusters[np.arange(rows), at // self.size]
        tokens = ordering.astype(np.int32)[cluster * self.size + at % self.size]
        return (np.where(place[:rows] < 0, place[:rows], tokens).astype(np.int32),)

    def numeric_class(self, *types: TensorType) -> str:
        return "integer"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        place, clusters, ordering, out = buffers
        active = clusters.type.max_shape[1]
        with k.loop(k.rows) as t:
            given = k.let(k.load(place, t))
            at = k.let(k.index(k.clamp(given, 0, active * self.size - 1)))
            quotient = k.let(k.floor_div(at, self.size))
            cluster = k.index(k.load(clusters, t * active + quotient))
            entry = cluster * self.size + at - quotient * self.size
            token = k.let(k.cast(k.load(ordering, entry), "int32"))
            k.store(out, t, k.select(given < 0, given, token))

    def compute(self, *operands: TeOperand) -> Any:
        place, clusters, ordering = (operand.tensor() for operand in operands)

        def token(row: Any) -> Any:
            at = tirx.max(place[row], tirx.const(0, "int32"))
            entry = clusters[row, at // self.size] * self.size + at % self.size
            return tirx.Select(place[row] < 0, place[row], ordering[entry])

        return te.compute(place.shape, token, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def places(rng: np.random.Generator) -> Array:
            return np.array([0, 23, -1], np.int32)

        types = (TensorType((3,), "i32"), TensorType((3, 4), "i32"))
        values = (("place", places), ("clusters", _clusters(16)), ("ordering", _ordering(96)))
        return [Sample((*types, TensorType((96,), ids)), (("size", 6),), values=values)
                for ids in ID_FORMATS]  # fmt: skip


def check_ordering(op: Op, size: int, clusters: TensorType, ordering: TensorType) -> None:
    """Check that `ordering [V]` is whole clusters of `size`, and `clusters` rows of numbers."""
    expect(ordering.dtype in ID_FORMATS, op, f"ids must be i32 or i64, got {ordering}")
    expect(size >= 1 and ordering.elements % size == 0, op, f"{ordering} is not clusters of {size}")
    expect(clusters.dtype == "i32" and len(clusters.shape) == 2, op, f"clusters are {clusters}")


def _clusters(count: int) -> Any:
    return lambda rng: rng.permuted(np.tile(np.arange(count), (3, 1)), axis=1)[:, :4]


def _ordering(vocab: int) -> Any:
    return lambda rng: rng.permutation(vocab)

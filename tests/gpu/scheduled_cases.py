"""Ops that TVM schedules, at the sizes that the GPU tests run: one list for tests and bundle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_cases import Array, normal, rows_of, split_planes, weight

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import Add, Concat, Scale, SoftCap
from memra_compiler.ops.base import Op, Operand
from memra_compiler.ops.linear import GatedLinear, Linear
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.per_layer import PerLayerGate, PerLayerMix
from memra_compiler.ops.rope import Rope, RopeAngles
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import exp, te


@dataclass(frozen=True)
class ScheduledCase:
    """An op, its types as they lie, and the rule that must take it."""

    op: Op
    types: tuple[TensorType, ...]
    rule: str
    tolerance: float | None = None

    @property
    def planes(self) -> tuple[int, ...]:
        return tuple(i for i, type in enumerate(self.types) if type.planes > 1)

    @property
    def splits(self) -> int:
        return max(type.planes for type in self.types)

    @property
    def by_row(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.types) - 1) if self.op.operand(i).sigil == "%")

    def operands(self, rng: np.random.Generator) -> list[Array]:
        """Values of every operand, as stored."""
        return [self._operand(i, type, rng) for i, type in enumerate(self.types[:-1])]

    def _operand(self, index: int, type: TensorType, rng: np.random.Generator) -> Array:
        shape = type.max_shape
        if isinstance(self.op, RopeAngles):
            if type.dtype == "i32":
                return np.array([0, 1, 7, 1023, 16383, 32768, 131071, 1_000_000], np.int32)
            return np.where(np.arange(shape[0]) < shape[0] // 4, 1, 1e30).astype(np.float32)
        if self.op.operand(index).sigil == "$":
            return weight(rng, shape[0], type.dtype)
        if self.op.operand(index).name == "angles":
            angle = rng.uniform(0, 6.28, (shape[0], shape[2]))
            return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        return split_planes(normal(rng, *shape) * 3, type.planes, rng)


@dataclass(frozen=True)
class Softmax(Op):
    """exp(x - max) / sum over a row: no rule knows it, so the fallback schedules it."""

    name = "softmax"
    operands = (Operand("x"),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        e = np.exp(arrays[0][:rows] - arrays[0][:rows].max(axis=1, keepdims=True))
        return (e / e.sum(axis=1, keepdims=True),)

    def compute(self, *operands: TeOperand) -> Any:
        x = operands[0].tensor()
        j, k = (te.reduce_axis((0, x.shape[1]), name) for name in "jk")
        top = te.compute(x.shape[:1], lambda row: te.max(x[row, j], j), "top")
        total = te.compute(x.shape[:1], lambda row: te.sum(exp(x[row, k] - top[row]), k), "total")
        return te.compute(x.shape, lambda row, col: exp(x[row, col] - top[row]) / total[row], "out")


def split(type: TensorType, splits: int) -> TensorType:
    return dataclasses.replace(type, layout=f"planes{splits}") if splits > 1 else type


#: Widths that fill warps, and some that do not: bound, width, splits, weight type.
SIZES = [(8, 5376, 1, "f32"), (8, 5376, 4, "bf16"), (16, 3840, 2, "f32"), (6, 64, 3, "f16"),
         (3, 320, 1, "f32"), (3, 1040, 2, "bf16"), (3, 2880, 1, "f16"), (1, 16, 1, "f32"),
         (3, 4112, 1, "f32")]  # fmt: skip
HEADS = [(8, 32, 256, 4), (8, 32, 512, 2), (16, 16, 512, 1), (6, 4, 64, 1), (3, 2, 32, 3),
         (3, 6, 96, 1), (8, 8, 128, 2), (3, 3, 80, 1), (1, 1, 32, 1)]  # fmt: skip


def cases() -> dict[str, ScheduledCase]:
    """Every case by name."""
    found: dict[str, ScheduledCase] = {}
    for bound, size, splits, dtype in SIZES:
        x, w, one = rows_of(bound, size), TensorType((size,), dtype), TensorType((1,), dtype)
        planes, name = split(x, splits), f"{bound}x{size}-{splits}-{dtype}"
        norm, each = "row_reduction", "elementwise"
        found[f"norm-{name}"] = ScheduledCase(RMSNorm(), (planes, w, x), norm)
        found[f"unit-norm-{name}"] = ScheduledCase(RMSNorm(), (planes, x), norm)
        found[f"add-{name}"] = ScheduledCase(Add(), (x, planes, x), each)
        found[f"scale-{name}"] = ScheduledCase(Scale(), (planes, one, x), each)
        found[f"softcap-{name}"] = ScheduledCase(SoftCap(2.5), (planes, x), each)
    for bound, heads, d, splits in HEADS:
        q, turns, name = (
            rows_of(bound, heads * d),
            rows_of(bound, 2, d // 2),
            f"{bound}x{heads}x{d}",
        )
        types = (split(q, splits), TensorType((d,)), q)
        found[f"heads-{name}"] = ScheduledCase(RMSNorm(size=d), types, "row_reduction")
        found[f"rope-{name}"] = ScheduledCase(Rope(), (split(q, splits), turns, q), "elementwise")
    for bound, a, b in ((1, 5376, 5376), (6, 64, 128), (3, 64, 192), (3, 16, 48)):
        types = rows_of(bound, a), rows_of(bound, b), rows_of(bound, a + b)
        found[f"concat-{bound}x{a}+{b}"] = ScheduledCase(Concat(), types, "elementwise")
    for bound, slices, part, splits in ((6, 42, 256, 2), (3, 9, 32, 1), (64, 3, 64, 4)):
        wide, gate, name = rows_of(bound, slices * part), rows_of(bound, part), f"{slices}x{part}"
        types = (split(wide, splits), wide, TensorType((part,)), wide)
        found[f"per-layer-mix-{name}"] = ScheduledCase(PerLayerMix(), types, "row_reduction")
        op, types = PerLayerGate(slices - 1), (split(gate, splits), wide, gate)
        found[f"per-layer-gate-{name}"] = ScheduledCase(op, types, "elementwise")
    for d, rotated, base in ((512, 256, 1e6), (256, 128, 1e4), (96, 48, 1e4), (64, 8, 1e4)):
        op, at, out = RopeAngles(d, base, rotated), rows_of(8, dtype="i32"), rows_of(8, 2, d // 2)
        factors = TensorType((d // 2,))
        found[f"angles-{d}"] = ScheduledCase(op, (at, out), "elementwise", 2e-7)
        found[f"factored-{d}"] = ScheduledCase(op, (at, factors, out), "elementwise", 2e-7)
    for bound, size in ((6, 64), (3, 37), (1, 1)):
        x = rows_of(bound, size)
        found[f"fallback-{bound}x{size}"] = ScheduledCase(Softmax(), (x, x), "fallback")
    return found


def products() -> dict[str, tuple[Op, tuple[TensorType, ...]]]:
    """Prompts of float32 with weights of every format, alone and gated."""
    found: dict[str, tuple[Op, tuple[TensorType, ...]]] = {}
    for bound, inputs, outputs, dtype in (
        (64, 5376, 2048, "q4_0"), (64, 1024, 260, "q8_0"), (33, 256, 36, "q4_k"),
        (64, 512, 64, "q5_k"), (64, 512, 64, "q6_k"), (33, 256, 64, "q6_k"), (70, 96, 100, "bf16"),
        (64, 352, 12, "f16"), (17, 32, 4, "f32"),
    ):  # fmt: skip
        x, out = rows_of(bound, inputs), rows_of(bound, outputs)
        w = TensorType((outputs, inputs), dtype, "plain")
        found[f"{dtype}-{bound}"] = Linear(), (x, w, out)
        if outputs % 16 == 0:
            found[f"gated-{dtype}-{bound}"] = GatedLinear("gelu_tanh"), (x, w, w, out)
    return found


CASES, PRODUCTS = cases(), products()
CAP = (SoftCap(30.0), (rows_of(1, 64), rows_of(1, 64)))


def everything() -> list[tuple[Op, tuple[TensorType, ...]]]:
    """All ops and types that tests run."""
    return [*((c.op, c.types) for c in CASES.values()), *PRODUCTS.values(), CAP]

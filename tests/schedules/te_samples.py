"""Functions for tests of rules: ops that live only here, and where their kernels end up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.base import Array, Op, Operand
from memra_compiler.ops.scheduled import TeOperand, te_functions
from memra_compiler.ops.te_math import exp, f32, reciprocal_sqrt, te, tirx


def rows(bound: int, *shape: int, dtype: str = "f32", planes: int = 0) -> TensorType:
    """Rows of a value, perhaps in partial planes."""
    layout = f"planes{planes}" if planes else "row"
    return TensorType((Sym("T", bound), *shape), dtype, layout)


def function(op: Op, *types: TensorType) -> Any:
    """The only output of an op as a TIR function."""
    (made,) = te_functions(op, *types)
    return made.function


@dataclass(frozen=True)
class Softmax(Op):
    """exp(x - max) / sum of a row: two reductions, which no rule but the last knows."""

    name = "softmax"
    operands = (Operand("x"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return (types[0],)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        e = np.exp(arrays[0][:rows] - arrays[0][:rows].max(axis=1, keepdims=True))
        return (np.asarray(e / e.sum(axis=1, keepdims=True)),)

    def compute(self, *operands: TeOperand) -> Any:
        x = operands[0].tensor()
        j, k = (te.reduce_axis((0, x.shape[1]), name) for name in "jk")
        top = te.compute(x.shape[:1], lambda row: te.max(x[row, j], j), "top")
        total = te.compute(x.shape[:1], lambda row: te.sum(exp(x[row, k] - top[row]), k), "total")
        return te.compute(x.shape, lambda row, col: exp(x[row, col] - top[row]) / total[row], "out")


@dataclass(frozen=True)
class SumAndDifference(Op):
    """x + y and x - y: two outputs, so two functions."""

    name = "sum_and_difference"
    operands = (Operand("x"), Operand("y"))
    adds_planes = ("x",)

    def outputs_of(self, types: int) -> int:
        return 2

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return types[0].in_rows, types[0].in_rows

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, y = (a[:rows] for a in arrays)
        return x + y, x - y

    def compute(self, *operands: TeOperand) -> Any:
        x, y = (operand.tensor() for operand in operands)
        return (
            te.compute(x.shape, lambda row, col: x[row, col] + y[row, col], "total"),
            te.compute(x.shape, lambda row, col: x[row, col] - y[row, col], "difference"),
        )


@dataclass(frozen=True)
class Formula(Op):
    """An op of one or two values of equal shape: whatever an expression can say."""

    kind: str = ""

    name = "formula"
    operands = (Operand("x"), Operand("y"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return (types[0],)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, y = (a[:rows] for a in arrays)
        return (np.asarray(FORMULAS[self.kind][0](x, y)),)

    def compute(self, *operands: TeOperand) -> Any:
        x, y = (operand.tensor() for operand in operands)
        return FORMULAS[self.kind][1](x, y)


def _dot(x: Any, y: Any) -> Any:
    k = te.reduce_axis((0, x.shape[1]), "k")
    dot = te.compute(x.shape[:1], lambda row: te.sum(x[row, k] * y[row, k], k), "dot")
    return te.compute(x.shape, lambda row, col: x[row, col] * dot[row], "out")


def _layer_norm(x: Any, y: Any) -> Any:
    j, k = (te.reduce_axis((0, x.shape[1]), name) for name in "jk")
    size = float(int(x.shape[1]))
    mean = te.compute(x.shape[:1], lambda row: te.sum(x[row, j], j), "mean")

    def off(row: Any, col: Any) -> Any:
        return x[row, col] - mean[row] / f32(size)

    squares = te.compute(x.shape[:1], lambda row: te.sum(off(row, k) * off(row, k), k), "squares")

    def normed(row: Any, col: Any) -> Any:
        return off(row, col) * reciprocal_sqrt(squares[row] / f32(size)) + y[row, col]

    return te.compute(x.shape, normed, "out")


def _prefix(x: Any, y: Any) -> Any:
    k = te.reduce_axis((0, x.shape[1]), "k")
    zero = f32(0.0)

    def total(row: Any, col: Any) -> Any:
        return te.sum(tirx.if_then_else(k < col + 1, x[row, k], zero), k)

    sums = te.compute(x.shape, total, "sums")
    return te.compute(x.shape, lambda row, col: sums[row, col] + y[row, col], "out")


def _broadcast_sum(x: Any, y: Any) -> Any:
    k = te.reduce_axis((0, x.shape[1]), "k")
    total = te.compute(x.shape[:1], lambda row: te.sum(x[row, k] + y[row, k], k), "total")
    return te.compute(x.shape, lambda row, col: total[row], "out")


#: What each kind means, in NumPy and as an expression.
FORMULAS: dict[str, tuple[Any, Any]] = {
    "dot": (lambda x, y: x * (x * y).sum(axis=1, keepdims=True), _dot),
    "layer_norm": (
        lambda x, y: (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) + y,
        _layer_norm,
    ),
    "prefix": (lambda x, y: x.cumsum(axis=1) + y, _prefix),
    "reversed": (
        lambda x, y: x[:, ::-1] * y,
        lambda x, y: te.compute(
            x.shape, lambda row, col: x[row, x.shape[1] - 1 - col] * y[row, col], "out"
        ),
    ),
    "rolled": (
        lambda x, y: np.roll(x, -1, axis=1) * y,
        lambda x, y: te.compute(
            x.shape, lambda row, col: x[row, (col + 1) % x.shape[1]] * y[row, col], "out"
        ),
    ),
    "sum": (
        lambda x, y: np.broadcast_to((x + y).sum(axis=1, keepdims=True), x.shape),
        _broadcast_sum,
    ),
}

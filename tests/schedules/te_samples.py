"""Functions for tests of rules: ops that live only here, and where their kernels end up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.base import Array, Op, Operand
from memra_compiler.ops.scheduled import TeOperand, te_functions
from memra_compiler.ops.te_math import exp, te


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

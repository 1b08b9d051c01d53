"""Root-mean-square norms, alone and fused with the residual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, op, width
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import f32, fma, reciprocal_sqrt, te


def rms_reference(x: Array, eps: float, weight: Array | None = None) -> Array:
    """x / sqrt(mean(x^2) + eps), then times `weight`, over the last axis, in float64."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return np.asarray(y if weight is None else y * weight)


def emit_rms(k: Kernel, x: Buffer, at: Expr, size: int, eps: float) -> Expr:
    """1 / rms of the `size` elements from `at`, as a scalar."""
    total = k.local(LANES)
    k.store(total, 0, k.splat(0.0), LANES)
    with k.loop(size // LANES) as i:
        v = k.let(k.load(x, at + i * LANES, LANES))
        k.store(total, 0, k.fma(v, v, k.load(total, 0, LANES)), LANES)
    square = k.sum(k.load(total, 0, LANES))
    mean = k.fma(square, k.const(1.0 / size), k.const(eps), lanes=1)
    return k.let(k.rsqrt(mean))


def check_weight(op: Op, size: int, weight: TensorType) -> None:
    """Check that a norm weight has one entry a column."""
    expect(weight.shape == (size,), op, f"weight {weight} does not fit {size} columns")


def check_heads(op: Op, x: TensorType, size: int) -> int:
    """Check that rows of x are whole heads of `size` elements; returns how many."""
    expect(len(x.shape) == 2 and x.dtype == "f32", op, f"takes f32 rows [T, D], got {x}")
    expect(size % LANES == 0, op, f"the width must be a multiple of {LANES}, got {size}")
    expect(width(op, x) % size == 0, op, f"rows {x} are not whole heads of {size}")
    return width(op, x) // size


def rms_class(size: int) -> str:
    """Numeric class of a root mean square over `size` elements."""
    return f"f32 sum of squares over {size}, {LANES} lanes, tree of {LANES}"


@op("rmsnorm")
@dataclass(frozen=True)
class RMSNorm(Op):
    """Divide by the root mean square, then scale by column; `size` norms each head by itself.

    Rows are also multiplied by `factor`, in one with the inverse of their root mean square.

    Shapes: x [T, D], weight [D] or [size] (optional) -> [T, D]. `size` 0 means the whole row.
    Source: Zhang & Sennrich 2019, eq. 4; the weight multiplies directly (no 1 + w).
    """

    eps: float = 1e-6
    size: int = 0
    factor: float = 1.0

    operands = (Operand("x"), Operand("weight", "$"))
    adds_planes = ("x",)
    variadic = True

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        size = self.size or width(self, types[0])
        check_heads(self, types[0], size)
        for weight in types[1:]:
            check_weight(self, size, weight)
        return (types[0],)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, *weight = arrays
        heads = x[:rows].reshape(rows, -1, self.size or x.shape[1])
        return (self.factor * rms_reference(heads, self.eps, *weight).reshape(rows, -1),)

    def numeric_class(self, *types: TensorType) -> str:
        times = f", times {self.factor}" if self.factor != 1 else ""
        return rms_class(self.size or width(self, types[0])) + times

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, *weight, y = buffers
        size = self.size or width(self, x.type)
        with k.loop(k.rows * (width(self, x.type) // size)) as row:
            inverse = emit_rms(k, x, row * size, size, self.eps)
            if self.factor != 1:
                inverse = k.let(inverse * k.const(self.factor))
            inverse = k.splat(inverse)
            with k.loop(size // LANES) as i:
                value = k.load(x, row * size + i * LANES, LANES) * inverse
                for w in weight:
                    value = value * k.floats(w, i * LANES)
                k.store(y, row * size + i * LANES, value, LANES)

    def compute(self, *operands: TeOperand) -> Any:
        columns = math.prod(operands[0].type.max_shape[1:])
        size = self.size or columns
        x, *weight = operands[0].tensor(columns // size, size), *(w.tensor() for w in operands[1:])
        k = te.reduce_axis((0, size), "k")

        def square(row: Any, head: Any) -> Any:
            return te.sum(x[row, head, k] * x[row, head, k], k)

        squares = te.compute(x.shape[:2], square, "squares")

        def inverse(row: Any, head: Any) -> Any:
            value = reciprocal_sqrt(fma(squares[row, head], f32(1.0 / size), f32(self.eps)))
            return value if self.factor == 1 else value * f32(self.factor)

        inverses = te.compute(x.shape[:2], inverse, "inverse")

        def normed(row: Any, head: Any, col: Any) -> Any:
            value = x[row, head, col] * inverses[row, head]
            return value * weight[0][col] if weight else value

        return te.compute(x.shape, normed, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [
            Sample((TensorType((3, 64)), TensorType((64,)))),
            Sample((TensorType((1, 272)), TensorType((272,), "bf16")), rows=1),
            Sample((TensorType((5, 128)),), (("size", 32),), rows=5),
            Sample((TensorType((2, 128)), TensorType((64,))), (("size", 64),), rows=2),
            Sample((TensorType((3, 64)), TensorType((64,))), (("factor", 0.125),)),
        ]


@op("rmsnorm_add")
@dataclass(frozen=True)
class RMSNormAdd(Op):
    """The end of a sandwich: x + rmsnorm(y) * weight, times the layer scalar if there is one.

    Shapes: x, y [T, D], weight [D], scale [1] (optional) -> [T, D].
    """

    eps: float = 1e-6

    operands = (Operand("x"), Operand("y"), Operand("weight", "$"))
    adds_planes = ("y",)
    variadic = True

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, y, weight, *scale = types
        expect(x == y, self, f"cannot add {x} and {y}")
        check_heads(self, x, width(self, x))
        check_weight(self, width(self, x), weight)
        expect(all(s.shape == (1,) for s in scale), self, f"the scale must be [1], got {scale}")
        return (x,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, y, weight, *scale = arrays
        out = x[:rows] + rms_reference(y[:rows], self.eps, weight)
        return (out * scale[0][0] if scale else out,)

    def numeric_class(self, *types: TensorType) -> str:
        scaled = ", then times a scalar" if len(types) > 3 else ""
        return f"{rms_class(width(self, types[0]))}; fma with the residual{scaled}"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, y, w, *scale, out = buffers
        size = x.type.max_shape[-1]
        with k.loop(k.rows) as t:
            inverse = k.splat(emit_rms(k, y, t * size, size, self.eps))
            with k.loop(size // LANES) as i:
                at = t * size + i * LANES
                normed = k.load(y, at, LANES) * inverse
                value = k.fma(normed, k.floats(w, i * LANES), k.load(x, at, LANES))
                for s in scale:
                    value = value * k.splat(k.floats(s, 0, 1))
                k.store(out, at, value, LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import rmsnorm_add_launches

        return rmsnorm_add_launches(self, arch, *types, splits=types[1].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, w, s = TensorType((3, 64)), TensorType((64,)), TensorType((1,))
        return [Sample((x, x, w)), Sample((x, x, w, s)), Sample((x, x, w, s), rows=1)]

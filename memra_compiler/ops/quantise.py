"""Activations in int8: rows of blocks of 32 values with one scale.

Quantised weights are multiplied with quantised activations, as llama.cpp does: the products are
exact integers, and a matrix unit takes four times as many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memra_compiler.ir.types import ACTIVATION_BLOCKS, TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, op, width
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.norm import (
    RMSNormAdd,
    check_heads,
    check_weight,
    emit_rms,
    rms_class,
    rms_reference,
)

BLOCK, BLOCK_BYTES = ACTIVATION_BLOCKS["a8"]
A8_CLASS = "a8: scale = max/127 per 32, nearest even"
#: Of float32; the bits of a NaN are larger.
INFINITY_BITS = 0x7F800000


def quantise_reference(x: Array) -> Array:
    """The values `a8` rows stand for: q * d, d = max|x| / 127, q = rint(x * (127 / max|x|)).

    A block with a NaN or an infinity is NaN throughout: q = 0, d = NaN.
    """
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    finite = np.isfinite(top)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    q = np.rint(np.where(finite, blocks, 0) * inverse).astype(np.float64)
    scale = np.where(finite, top / np.float32(127), np.nan).astype(np.float64)
    out: Array = (q * scale).reshape(x.shape)
    return out


def unpack(data: Array, type: TensorType) -> Array:
    """Stored `a8` rows as float64."""
    blocks = data.reshape(-1, BLOCK_BYTES)
    scale = blocks[:, :4].copy().view(np.float32).astype(np.float64)
    out: Array = (blocks[:, 4:].view(np.int8) * scale).reshape(type.max_shape)
    return out


def emit_block(k: Kernel, out: Buffer, at: Expr, low: Expr, high: Expr) -> None:
    """Quantise 32 values (two vectors) into the block at byte `at`.

    The bits of |x| order floats as their values do, and a NaN comes last.
    """
    bits = [k.let(k.reinterpret(v, "int32", LANES)) for v in (low, high)]
    sizes = (b & k.splat(0x7FFFFFFF, "int32") for b in bits)
    largest = k.fold(k.maximum(*sizes), k.maximum)
    finite = k.let(largest < k.const(INFINITY_BITS, "int32"))
    top = k.let(k.reinterpret(largest, "float32"))
    inverse = k.splat(k.let(k.select(top > 0.0, k.const(127.0) / top, k.const(0.0))))
    d = k.select(finite, top / k.const(127.0), k.const(float("nan")))
    k.store(out, at, k.reinterpret(d, "uint8", 4), 4)
    mask = k.splat(k.let(k.select(finite, k.int32(-1), k.int32(0))))
    for i, b in enumerate(bits):
        v = k.reinterpret(b & mask, "float32", LANES)
        q = k.cast(k.rint(v * inverse), "int8", LANES)
        k.store(out, at + 4 + i * LANES, k.reinterpret(q, "uint8", LANES), LANES)


def emit_quantise(k: Kernel, x: Buffer, out: Buffer) -> None:
    """Quantise all rows of x."""
    with k.loop(k.rows * (out.type.max_shape[1] // BLOCK)) as b:
        low, high = (k.load(x, b * BLOCK + i * LANES, LANES) for i in range(2))
        emit_block(k, out, b * BLOCK_BYTES, low, high)


def emit_values(k: Kernel, x: Buffer, at: Expr, half: int) -> Expr:
    """Sixteen float32 values of the block at byte `at`."""
    q = k.reinterpret(k.load(x, at + 4 + half * LANES, LANES), "int8", LANES)
    return k.cast(q, "float32", LANES) * k.splat(k.reinterpret(k.load(x, at, 4), "float32"))


def check_width(op: Op, x: TensorType) -> TensorType:
    """The quantised type of rows x."""
    expect(len(x.shape) == 2 and x.dtype == "f32", op, f"takes f32 rows [T, D], got {x}")
    expect(width(op, x) % BLOCK == 0, op, f"rows must be whole blocks of {BLOCK}, got {x}")
    return TensorType(x.shape, "a8")


@op("quantise")
@dataclass(frozen=True)
class Quantise(Op):
    """Rows of float32 as int8 blocks.

    Shapes: x [T, D] f32 -> [T, D] a8. D % 32 == 0.
    Source: Q8_0/Q8_1 activations of llama.cpp, with a float32 scale.
    """

    operands = (Operand("x"),)
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return (check_width(self, types[0]),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        return (quantise_reference(arrays[0][:rows]),)

    def numeric_class(self, *types: TensorType) -> str:
        return A8_CLASS

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        emit_quantise(k, *buffers)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import quantise_launches

        return quantise_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample((TensorType((3, 96)),)), Sample((TensorType((1, 32)),), rows=1)]


@op("rmsnorm_quantise")
@dataclass(frozen=True)
class RMSNormQuantise(Op):
    """A norm whose rows go straight into matrices: rmsnorm, then int8 blocks.

    Shapes: x [T, D], weight [D] -> [T, D] a8.
    """

    eps: float = 1e-6

    operands = (Operand("x"), Operand("weight", "$"))
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, weight = types
        check_heads(self, x, width(self, x))
        check_weight(self, width(self, x), weight)
        return (check_width(self, x),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, weight = arrays
        return (quantise_reference(rms_reference(x[:rows], self.eps, weight)),)

    def numeric_class(self, *types: TensorType) -> str:
        return f"{rms_class(width(self, types[0]))}; {A8_CLASS}"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, w, out = buffers
        size = width(self, x.type)
        with k.loop(k.rows) as t:
            inverse = k.splat(emit_rms(k, x, t * size, size, self.eps))
            with k.loop(size // BLOCK) as b:
                halves = []
                for at in (b * BLOCK, b * BLOCK + LANES):
                    value = k.load(x, t * size + at, LANES) * inverse
                    halves.append(value * k.floats(w, at))
                emit_block(k, out, (t * (size // BLOCK) + b) * BLOCK_BYTES, *halves)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import rmsnorm_launches

        return rmsnorm_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        w = TensorType((64,))
        return [Sample((TensorType((3, 64)), w)), Sample((TensorType((1, 64)), w), rows=1)]


@op("rmsnorm_add_quantise")
@dataclass(frozen=True)
class RMSNormAddQuantise(Op):
    """From one half of a layer to the next: the residual, and its norm as int8 blocks.

    u = x + rmsnorm(y) * post [* scale]; outputs u and quantise(rmsnorm(u) * weight).

    Shapes: x, y [T, D], post [D], weight [D], scale [1] (optional) -> [T, D] f32, [T, D] a8.
    """

    eps: float = 1e-6

    operands = (
        Operand("x"),
        Operand("y"),
        Operand("post", "$"),
        Operand("weight", "$"),
    )
    adds_planes = ("y",)
    variadic = True

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, y, post, weight, *scale = types
        (u,) = RMSNormAdd(self.eps).infer(x, y, post, *scale)
        check_weight(self, width(self, x), weight)
        return u, check_width(self, u)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, y, post, weight, *scale = arrays
        (u,) = RMSNormAdd(self.eps).reference(rows, x, y, post, *scale)
        return u, quantise_reference(rms_reference(u, self.eps, weight))

    def numeric_class(self, *types: TensorType) -> str:
        x, y, post, weight, *scale = types
        residual = RMSNormAdd(self.eps).numeric_class(x, y, post, *scale)
        return f"{residual}; {RMSNormQuantise(self.eps).numeric_class(x, weight)}"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, y, post, weight, *scale, u, out = buffers
        RMSNormAdd(self.eps).lower_cpu(k, x, y, post, *scale, u)
        RMSNormQuantise(self.eps).lower_cpu(k, u, weight, out)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import rmsnorm_add_launches

        return rmsnorm_add_launches(self, arch, *types, splits=types[1].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, w, s = TensorType((3, 64)), TensorType((64,)), TensorType((1,))
        return [Sample((x, x, w, w)), Sample((x, x, w, w, s)), Sample((x, x, w, w, s), rows=1)]

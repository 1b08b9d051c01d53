"""Rows as matrices take them: rounded to a format that a matrix unit multiplies.

`a8`: blocks of 32 int8 with one scale. Quantised weights are multiplied with quantised activations,
as llama.cpp does: the products are exact integers, and a matrix unit takes four times as many.

`bf16`: eight bits of each value by itself. Stored weights are exact against it: the integers of a
quantised block and every f16 or bf16 keep all their bits, and a block's scale multiplies its sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
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
#: Formats that rows are rounded to, and what that says in a numeric class.
ROUNDINGS = {
    "a8": "a8: scale = max/127 per 32, nearest even",
    "bf16": "bf16: nearest even",
}
#: Of float32; the bits of a NaN are larger.
INFINITY_BITS = 0x7F800000


def quantised_blocks(x: Array, scale: type[np.floating[Any]] = np.float32) -> tuple[Array, Array]:
    """Blocks of 32 of rows [..., D]: q [..., D / 32, 32] and d [..., D / 32, 1] of type `scale`.

    d = max|x| / 127, q = rint(x * (127 / max|x|)). Where d is 0, so is q. A block with a NaN or an
    infinity is NaN throughout: q = 0, d = NaN.
    """
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    finite = np.isfinite(top)
    with np.errstate(over="ignore", invalid="ignore"):
        d = np.where(finite, top / np.float32(127), np.nan).astype(scale)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=d > 0)
    return np.rint(np.where(finite, blocks, 0) * inverse), d


def quantise_reference(x: Array) -> Array:
    """The values `a8` rows stand for, q * d."""
    q, d = quantised_blocks(x)
    out: Array = (q.astype(np.float64) * d.astype(np.float64)).reshape(x.shape)
    return out


def round_reference(x: Array, to: str) -> Array:
    """The values that rows in format `to` stand for; a NaN stays a NaN."""
    if to == "a8":
        return quantise_reference(x)
    nearest: Array = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    return nearest


def unpack(data: Array, type: TensorType) -> Array:
    """Stored `a8` rows as float64."""
    blocks = data.reshape(-1, BLOCK_BYTES)
    scale = blocks[:, :4].copy().view(np.float32).astype(np.float64)
    out: Array = (blocks[:, 4:].view(np.int8) * scale).reshape(type.max_shape)
    return out


def emit_quantised(
    k: Kernel, low: Expr, high: Expr, scale: str = "float32"
) -> tuple[Expr, tuple[Expr, Expr]]:
    """The d of 32 values (two vectors), of type `scale`, and their q as bytes.

    The bits of |x| order floats as their values do, and a NaN comes last.
    """
    bits = [k.let(k.reinterpret(v, "int32", LANES)) for v in (low, high)]
    sizes = (b & k.splat(0x7FFFFFFF, "int32") for b in bits)
    largest = k.fold(k.maximum(*sizes), k.maximum)
    finite = k.let(largest < k.const(INFINITY_BITS, "int32"))
    top = k.let(k.reinterpret(largest, "float32"))
    d = k.select(finite, top / k.const(127.0), k.const(float("nan")))
    kept = top
    if scale != "float32":
        d = k.let(k.cast(d, scale))
        kept = k.cast(d, "float32")  # 0 where it is too small
    inverse = k.splat(k.let(k.select(kept > 0.0, k.const(127.0) / top, k.const(0.0))))
    mask = k.splat(k.let(k.select(finite, k.int32(-1), k.int32(0))))
    values = (k.reinterpret(b & mask, "float32", LANES) for b in bits)
    first, last = (k.cast(k.rint(v * inverse), "int8", LANES) for v in values)
    return d, (k.reinterpret(first, "uint8", LANES), k.reinterpret(last, "uint8", LANES))


def emit_block(k: Kernel, out: Buffer, at: Expr, low: Expr, high: Expr) -> None:
    """Quantise 32 values (two vectors) into the `a8` block at byte `at`."""
    d, q = emit_quantised(k, low, high)
    k.store(out, at, k.reinterpret(d, "uint8", 4), 4)
    for i, part in enumerate(q):
        k.store(out, at + 4 + i * LANES, part, LANES)


def emit_rounded(k: Kernel, out: Buffer, block: Expr, low: Expr, high: Expr) -> None:
    """Round 32 values (two vectors) to the format of `out`, as its block of that number."""
    if out.format == "a8":
        emit_block(k, out, block * BLOCK_BYTES, low, high)
        return
    for i, value in enumerate((low, high)):
        k.put_floats(out, block * BLOCK + i * LANES, value)


def emit_quantise(k: Kernel, x: Buffer, out: Buffer) -> None:
    """Round all rows of x to the format of `out`."""
    with k.loop(k.rows * (out.type.max_shape[1] // BLOCK)) as b:
        low, high = (k.load(x, b * BLOCK + i * LANES, LANES) for i in range(2))
        emit_rounded(k, out, b, low, high)


def emit_values(k: Kernel, x: Buffer, block: Expr, half: int) -> Expr:
    """Sixteen values of a block of 32, as float32."""
    if x.format != "a8":
        return k.floats(x, block * BLOCK + half * LANES)
    at = block * BLOCK_BYTES
    q = k.reinterpret(k.load(x, at + 4 + half * LANES, LANES), "int8", LANES)
    return k.cast(q, "float32", LANES) * k.splat(k.reinterpret(k.load(x, at, 4), "float32"))


def rounded_type(op: Op, x: TensorType, to: str) -> TensorType:
    """The type of rows x in the format `to`."""
    expect(to in ROUNDINGS, op, f"rows are rounded to {' or '.join(ROUNDINGS)}, not {to}")
    expect(len(x.shape) == 2 and x.dtype == "f32", op, f"takes f32 rows [T, D], got {x}")
    expect(width(op, x) % BLOCK == 0, op, f"rows must be whole blocks of {BLOCK}, got {x}")
    return TensorType(x.shape, to)


@op("quantise")
@dataclass(frozen=True)
class Quantise(Op):
    """Rows of float32 in the format that matrices take.

    Shapes: x [T, D] f32 -> [T, D] a8 or bf16. D % 32 == 0.
    Source: of a8, Q8_0/Q8_1 activations of llama.cpp, with a float32 scale.
    """

    to: str = "a8"

    operands = (Operand("x"),)
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return (rounded_type(self, types[0], self.to),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        return (round_reference(arrays[0][:rows], self.to),)

    def numeric_class(self, *types: TensorType) -> str:
        return ROUNDINGS[self.to]

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        emit_quantise(k, *buffers)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import quantise_launches

        return quantise_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes = ((3, 96), (1, 32))
        return [
            Sample((TensorType(shape),), (("to", to),), rows=shape[0])
            for to in ROUNDINGS
            for shape in shapes
        ]


@op("rmsnorm_quantise")
@dataclass(frozen=True)
class RMSNormQuantise(Op):
    """A norm whose rows go straight into matrices: rmsnorm, then rounded.

    Shapes: x [T, D], weight [D] -> [T, D] a8 or bf16.
    """

    eps: float = 1e-6
    to: str = "a8"

    operands = (Operand("x"), Operand("weight", "$"))
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, weight = types
        check_heads(self, x, width(self, x))
        check_weight(self, width(self, x), weight)
        return (rounded_type(self, x, self.to),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, weight = arrays
        return (round_reference(rms_reference(x[:rows], self.eps, weight), self.to),)

    def numeric_class(self, *types: TensorType) -> str:
        return f"{rms_class(width(self, types[0]))}; {ROUNDINGS[self.to]}"

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
                emit_rounded(k, out, t * (size // BLOCK) + b, *halves)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import rmsnorm_launches

        return rmsnorm_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, one, w = TensorType((3, 64)), TensorType((1, 64)), TensorType((64,))
        bf16 = (("to", "bf16"),)
        return [Sample((x, w)), Sample((one, w), rows=1), Sample((x, w), bf16)]


@op("rmsnorm_add_quantise")
@dataclass(frozen=True)
class RMSNormAddQuantise(Op):
    """From one half of a layer to the next: the residual, and its norm rounded for matrices.

    u = x + rmsnorm(y) * post [* scale]; outputs u and quantise(rmsnorm(u) * weight).

    Shapes: x, y [T, D], post [D], weight [D], scale [1] (optional) -> [T, D] f32, [T, D] a8 or
    bf16.
    """

    eps: float = 1e-6
    to: str = "a8"

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
        return u, rounded_type(self, u, self.to)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, y, post, weight, *scale = arrays
        (u,) = RMSNormAdd(self.eps).reference(rows, x, y, post, *scale)
        return u, round_reference(rms_reference(u, self.eps, weight), self.to)

    def numeric_class(self, *types: TensorType) -> str:
        x, y, post, weight, *scale = types
        residual = RMSNormAdd(self.eps).numeric_class(x, y, post, *scale)
        return f"{residual}; {RMSNormQuantise(self.eps, self.to).numeric_class(x, weight)}"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, y, post, weight, *scale, u, out = buffers
        RMSNormAdd(self.eps).lower_cpu(k, x, y, post, *scale, u)
        RMSNormQuantise(self.eps, self.to).lower_cpu(k, u, weight, out)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import rmsnorm_add_launches

        return rmsnorm_add_launches(self, arch, *types, splits=types[1].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, w, s = TensorType((3, 64)), TensorType((64,)), TensorType((1,))
        scaled = (x, x, w, w, s)
        bf16 = (("to", "bf16"),)
        return [
            Sample((x, x, w, w)),
            Sample(scaled),
            Sample(scaled, rows=1),
            Sample(scaled, bf16),
        ]

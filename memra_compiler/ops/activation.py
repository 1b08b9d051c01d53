"""Gate activations and other element-wise ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, op, width
from memra_compiler.ops.cuda import AnyLaunch, CudaArch, Launch
from memra_compiler.ops.emit import LANES, Buffer, Expr, Kernel
from memra_compiler.ops.scheduled import TeOperand
from memra_compiler.ops.te_math import f32, tanh, te, tirx

ACTIVATIONS = ("gelu_tanh", "silu")


def activate_reference(act: str, x: Array) -> Array:
    """The activation `act` in float64."""
    if act == "silu":
        with np.errstate(over="ignore"):  # e^-x may be infinite: the quotient is 0 then
            return np.asarray(x / (1 + np.exp(-x)))
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def activate(k: Kernel, act: str, x: Expr) -> Expr:
    """The activation `act` of a float32 vector."""
    if act == "silu":
        return x / (k.splat(1.0) + k.exp(k.splat(0.0) - x))
    cube = k.let(x * x * x)
    inner = k.fma(cube, k.splat(0.044715), x) * k.splat(math.sqrt(2 / math.pi))
    return k.splat(0.5) * x * (k.splat(1.0) + k.tanh(k.let(inner)))


def _whole_vectors(op: Op, x: TensorType) -> None:
    expect(x.dtype == "f32", op, f"takes f32, got {x}")
    expect(width(op, x) % LANES == 0, op, f"row width must be a multiple of {LANES}, got {x}")


@op("gate_mul")
@dataclass(frozen=True)
class GateMul(Op):
    """act(gate) * up, element by element.

    Shapes: gate, up [T, F] -> [T, F].
    """

    act: str = "gelu_tanh"

    operands = (Operand("gate"), Operand("up"))
    adds_planes = ("gate", "up")

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        gate, up = types
        expect(self.act in ACTIVATIONS, self, f"unknown activation {self.act}")
        expect(gate == up, self, f"gate {gate} and up {up} differ")
        _whole_vectors(self, gate)
        return (gate,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        gate, up = arrays
        return (activate_reference(self.act, gate[:rows]) * up[:rows],)

    def numeric_class(self, *types: TensorType) -> str:
        return f"f32 {self.act}, exp by polynomial"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        gate, up, y = buffers
        with k.loop(k.rows * (width(self, gate.type) // LANES)) as i:
            value = activate(k, self.act, k.let(k.load(gate, i * LANES, LANES)))
            k.store(y, i * LANES, value * k.load(up, i * LANES, LANES), LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import gate_mul_launches

        return gate_mul_launches(self, arch, *types, splits=types[0].planes)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, one = TensorType((3, 64)), TensorType((1, 16))
        samples = [Sample((x, x), (("act", act),)) for act in ACTIVATIONS]
        return [*samples, Sample((one, one), rows=1)]


@op("add")
@dataclass(frozen=True)
class Add(Op):
    """x + y, element by element.

    Shapes: x, y [T, D] -> [T, D].
    """

    operands = (Operand("x"), Operand("y"))
    adds_planes = ("y",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, y = types
        expect(x == y, self, f"cannot add {x} and {y}")
        _whole_vectors(self, x)
        return (x,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0][:rows] + arrays[1][:rows],)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 add"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, y, out = buffers
        with k.loop(k.rows * (width(self, x.type) // LANES)) as i:
            total = k.load(x, i * LANES, LANES) + k.load(y, i * LANES, LANES)
            k.store(out, i * LANES, total, LANES)

    def compute(self, *operands: TeOperand) -> Any:
        x, y = (operand.tensor() for operand in operands)
        return te.compute(x.shape, lambda row, col: x[row, col] + y[row, col], "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample((TensorType((3, 48)), TensorType((3, 48))))]


@op("scale")
@dataclass(frozen=True)
class Scale(Op):
    """Multiply by a stored scalar.

    Shapes: x [T, D], s [1] -> [T, D].
    """

    operands = (Operand("x"), Operand("s", "$"))
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, s = types
        expect(s.shape == (1,), self, f"the scale must be one number, got {s}")
        _whole_vectors(self, x)
        return (x,)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0][:rows] * arrays[1][0],)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 multiply"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, s, out = buffers
        with k.loop(k.rows * (width(self, x.type) // LANES)) as i:
            value = k.load(x, i * LANES, LANES) * k.splat(k.floats(s, 0, 1))
            k.store(out, i * LANES, value, LANES)

    def compute(self, *operands: TeOperand) -> Any:
        x, s = (operand.tensor() for operand in operands)
        return te.compute(x.shape, lambda row, col: x[row, col] * s[0], "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample((TensorType((3, 48)), TensorType((1,))))]


@op("softcap")
@dataclass(frozen=True)
class SoftCap(Op):
    """cap * tanh(x / cap): logits squeezed into (-cap, cap).

    Shapes: x [T, V] -> [T, V].
    Source: Gemma 2 report, section 2.
    """

    cap: float = 30.0

    operands = (Operand("x"),)
    adds_planes = ("x",)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        expect(self.cap > 0, self, f"cap must be positive, got {self.cap}")
        _whole_vectors(self, types[0])
        return (types[0],)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        return (self.cap * np.tanh(arrays[0][:rows] / self.cap),)

    def numeric_class(self, *types: TensorType) -> str:
        return "f32 tanh by polynomial exp"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, out = buffers
        with k.loop(k.rows * (width(self, x.type) // LANES)) as i:
            squeezed = k.tanh(k.let(k.load(x, i * LANES, LANES) / k.splat(self.cap)))
            k.store(out, i * LANES, squeezed * k.splat(self.cap), LANES)

    def compute(self, *operands: TeOperand) -> Any:
        (x,) = (operand.tensor() for operand in operands)
        cap = f32(self.cap)
        return te.compute(x.shape, lambda row, col: tanh(x[row, col] / cap) * cap, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample((TensorType((3, 64)),), (("cap", cap),)) for cap in (30.0, 1.5)]


@op("concat")
@dataclass(frozen=True)
class Concat(Op):
    """Join two rows end to end.

    Shapes: x [T, A], y [T, B] -> [T, A + B].
    """

    operands = (Operand("x"), Operand("y"))

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        x, y = types
        expect(x.shape[0] == y.shape[0], self, f"{x} and {y} differ in rows")
        for part in types:
            _whole_vectors(self, part)
        return (TensorType((x.shape[0], width(self, x) + width(self, y))),)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        x, y = (a[:rows].reshape(rows, -1) for a in arrays)
        return (np.concatenate([x, y], axis=1),)

    def numeric_class(self, *types: TensorType) -> str:
        return "copy"

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        x, y, out = buffers
        a, b = width(self, x.type), width(self, y.type)
        with k.loop(k.rows) as t:
            for part, size, start in ((x, a, 0), (y, b, a)):
                with k.loop(size // LANES) as i:
                    value = k.load(part, t * size + i * LANES, LANES)
                    k.store(out, t * (a + b) + start + i * LANES, value, LANES)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[AnyLaunch, ...]:
        if types[-1].dtype == "f32":
            return super().lower_cuda(arch, *types)
        from memra_compiler.ops.cuda_kernels import concat_launches

        return concat_launches(self, arch, *types)

    def compute(self, *operands: TeOperand) -> Any:
        x, y = (operand.tensor() for operand in operands)
        first, second = (math.prod(operand.type.max_shape[1:]) for operand in operands)

        def joined(row: Any, col: Any) -> Any:
            return tirx.if_then_else(col < first, x[row, col], y[row, col - first])

        return te.compute((x.shape[0], first + second), joined, "out")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample((TensorType((3, 32)), TensorType((3, 64))))]

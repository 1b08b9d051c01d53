"""What `Op.compute` is written in: TVM's tensor expressions, and float mathematics in them.

Functions have the bits of their namesakes in `templates/lib/math.cuh`.

A fused multiply-add is spelled here: the compilers are told to fuse nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memra_compiler.ops.emit import Lazy

te, tirx = (Lazy(f"tvm.{name}") for name in ("te", "tirx"))

Expr = Any


def f32(value: float) -> Expr:
    """A float32 constant."""
    return tirx.const(value, "float32")


def f64(value: float) -> Expr:
    """A float64 constant; one that TVM's code generators print in full, with 15 decimals.

    Raises: ValueError for any other.
    """
    if float(f"{value:.15f}") != value:
        raise ValueError(f"{value!r} has over 15 decimals: compute it from numbers with fewer")
    return tirx.const(value, "float64")


def let(name: str, value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """`body` of a value that is computed once and has a name."""
    value = value.asobject() if hasattr(value, "asobject") else value  # an element of a tensor
    variable = tirx.Var(name, value.ty)
    return tirx.Let(variable, value, body(variable))


def call(function: str, *args: Expr, dtype: str = "float32") -> Expr:
    """Call a function that C and CUDA both know."""
    return tirx.call_pure_extern(dtype, function, *args)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c, rounded once."""
    return call("fmaf", a, b, c)


def reciprocal_sqrt(x: Expr) -> Expr:
    """1 / sqrt(x), both correctly rounded."""
    return f32(1.0) / call("sqrtf", x)


def exp(x: Expr) -> Expr:
    """e**x within 2 ulp; x is held to [-87.3, 88.3], and a NaN stays one.

    Source: Cephes expf (Moshier), Cody-Waite reduction by ln 2 in two parts.
    """

    def low(v: Expr) -> Expr:
        return tirx.Select(v < f32(-87.3), f32(-87.3), v)

    def high(v: Expr) -> Expr:
        return tirx.Select(v > f32(88.3), f32(88.3), v)

    def reduced(v: Expr) -> Expr:
        return let("n", call("rintf", v * f32(1.44269504088896341)), lambda n: let(
            "r", fma(n, f32(2.12194440e-4), fma(n, f32(-0.693359375), v)),
            lambda r: _polynomial(r) * _power_of_two(n),
        ))  # fmt: skip

    return let("a", x, lambda a: let("b", low(a), lambda b: let("c", high(b), reduced)))


def _polynomial(r: Expr) -> Expr:
    poly = f32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        poly = fma(poly, r, f32(c))
    return fma(poly, r * r, r + f32(1.0))


def _power_of_two(n: Expr) -> Expr:
    """2**n of a whole number, by its bits."""
    bits = (n.astype("int32") + tirx.const(127, "int32")) << tirx.const(23, "int32")
    return tirx.reinterpret("float32", bits)


def tanh(x: Expr) -> Expr:
    """1 - 2 / (e**2x + 1)."""
    return f32(1.0) - f32(2.0) / (exp(x + x) + f32(1.0))


def activate(act: str, x: Expr) -> Expr:
    """A gate's activation: `gelu_tanh` or `silu`."""
    if act == "silu":
        return let("g", x, lambda g: g / (f32(1.0) + exp(f32(0.0) - g)))

    def gelu(g: Expr) -> Expr:
        inner = fma(g * g * g, f32(0.044715), g) * f32(0.7978845608028654)
        return f32(0.5) * g * (f32(1.0) + tanh(inner))

    return let("g", x, gelu)

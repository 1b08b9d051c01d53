"""Writes CPU kernels: a thin, typed layer over TVM's IR builder.

A kernel is a plain C function `void name(int32 rows, void* operand...)`. Buffers are flat and
indices are 64-bit, so a table of any size can be addressed. Everything that decides bits is spelled
out: multiply-adds are `llvm.fma`, sums have a written order, exp is our own polynomial, so that no
compiler flag and no math library can change a row.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memra_compiler.ir.types import TensorType


class Lazy:
    """A module that is imported on first use: reading an op must not start TVM (a second)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


ir, tirx, T = (Lazy(f"tvm.{name}") for name in ("ir", "tirx", "tirx.script.builder"))

#: Vector lanes of float32 work. Part of every numeric class: it fixes the order of sums.
LANES = 16

Expr = Any

_TVM_DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "uint16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "head_row": "int32",
}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """A flat operand of a kernel. Quantised weights and cache rows are bytes."""

    type: TensorType
    data: Any

    @property
    def format(self) -> str:
        return self.type.dtype


def index(value: Expr) -> Expr:
    """`value` as a 64-bit index."""
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


class Kernel:
    """The kernel being written. Use as `with` target of `build_kernel`."""

    def __init__(self, rows: Expr) -> None:
        #: Number of rows, T.
        self.rows = index(rows)

    # -- control flow ---------------------------------------------------------------------------

    @contextmanager
    def loop(self, stop: Expr | int, start: Expr | int = 0) -> Iterator[Expr]:
        """`for i in range(start, stop)`."""
        with T.serial(index(start), index(stop)) as i:
            yield i

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        with T.If(condition), T.Then():
            yield

    def let(self, value: Expr) -> Expr:
        """Compute `value` once and name it."""
        return T.Bind(value)

    # -- memory ---------------------------------------------------------------------------------

    def load(self, buffer: Buffer | Any, at: Expr, lanes: int = 1) -> Expr:
        """Elements `[at, at + lanes)` as they are stored."""
        data = buffer.data if isinstance(buffer, Buffer) else buffer
        at = index(at)
        if lanes > 1:
            at = tirx.Ramp(at, tirx.const(1, "int64"), lanes)
        return tirx.BufferLoad(data, [at])

    def store(self, buffer: Buffer | Any, at: Expr, value: Expr, lanes: int = 1) -> None:
        data = buffer.data if isinstance(buffer, Buffer) else buffer
        at = index(at)
        if lanes > 1:
            at = tirx.Ramp(at, tirx.const(1, "int64"), lanes)
        T.buffer_store(data, value, [at])

    def prefetch(self, buffer: Buffer, at: Expr) -> None:
        """Ask for the cache line of element `at`, which may lie past the end."""
        line = tirx.BufferLoad(buffer.data, [index(at)])
        hints = (tirx.const(hint, "int32") for hint in (0, 3, 1))  # to read, in all caches, data
        address = tirx.call_intrin("handle", "tirx.address_of", line)
        T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *hints))

    def register(self, value: Expr) -> Register:
        """A float32 vector that can be set again, beginning as `value`."""
        register = Register(T.alloc_buffer((1,), _vector("float32", LANES), scope="local"))
        register.set(value)
        return register

    def local(self, size: int, dtype: str = "f32") -> Any:
        """A small array on the stack (registers where the indices are known)."""
        return T.alloc_buffer((size,), _TVM_DTYPES[dtype], scope="local")

    def part(self, buffer: Buffer, start: int, size: int) -> Buffer:
        """Elements `[start, start + size)` of a float32 buffer, as a buffer of their own."""
        data = T.decl_buffer((size,), "float32", data=buffer.data.data, elem_offset=start)
        return Buffer(TensorType((size,)), data)

    def floats(self, buffer: Buffer | Any, at: Expr, lanes: int = LANES) -> Expr:
        """Elements of a float buffer, widened to float32."""
        value = self.load(buffer, at, lanes)
        kind = buffer.format if isinstance(buffer, Buffer) else "f32"
        if kind == "f32":
            return value
        if kind == "f16":
            return self.cast(value, "float32", lanes)
        if kind == "bf16":
            bits = self.cast(value, "uint32", lanes) << self.splat(16, "uint32", lanes)
            return tirx.reinterpret(_vector("float32", lanes), bits)
        raise ValueError(f"{kind} is not a float type")

    def put_floats(self, buffer: Buffer | Any, at: Expr, value: Expr, lanes: int = LANES) -> None:
        """Store float32 values, rounded to nearest even in the buffer's own type."""
        kind = buffer.format if isinstance(buffer, Buffer) else "f32"
        if kind == "f16":
            value = self.cast(value, "float16", lanes)
        elif kind == "bf16":

            def number(n: int) -> Expr:
                return self.splat(n, "uint32", lanes)

            bits = self.let(tirx.reinterpret(_vector("uint32", lanes), value))
            high = self.let(bits >> number(16))
            nearest = (bits + number(0x7FFF) + (high & number(1))) >> number(16)
            # a NaN stays one: rounded as a number, it could become -0
            nan = (bits & number(0x7FFFFFFF)) > number(0x7F800000)
            bits = self.select(nan, high | number(0x40), nearest)
            value = self.cast(bits, "uint16", lanes)
        elif kind != "f32":
            raise ValueError(f"{kind} is not a float type")
        self.store(buffer, at, value, lanes)

    # -- arithmetic -----------------------------------------------------------------------------

    def const(self, value: float, dtype: str = "float32") -> Expr:
        return tirx.const(value, dtype)

    def splat(self, value: Expr | float, dtype: str = "float32", lanes: int = LANES) -> Expr:
        """`value` in every lane."""
        if isinstance(value, int | float):
            value = tirx.const(value, dtype)
        return value if lanes == 1 else tirx.Broadcast(value, lanes)

    def cast(self, value: Expr, dtype: str, lanes: int = 1) -> Expr:
        return tirx.Cast(_vector(dtype, lanes), value)

    def reinterpret(self, value: Expr, dtype: str, lanes: int = 1) -> Expr:
        return tirx.reinterpret(_vector(dtype, lanes), value)

    def select(self, condition: Expr, yes: Expr, no: Expr) -> Expr:
        return tirx.Select(condition, yes, no)

    def fma(self, a: Expr, b: Expr, c: Expr, lanes: int = LANES) -> Expr:
        """`a * b + c`, rounded once."""
        return tirx.call_llvm_pure_intrin(_vector("float32", lanes), "llvm.fma", a, b, c)

    def rint(self, value: Expr) -> Expr:
        """The nearest integers of a float32 vector, half to even."""
        return tirx.call_llvm_pure_intrin(_vector("float32", LANES), "llvm.rint", value)

    def equal(self, a: Expr, b: Expr) -> Expr:
        """Lane by lane a == b, as a node (Python's == on vectors asks for a truth value)."""
        return tirx.EQ(a, b)

    def maximum(self, a: Expr, b: Expr) -> Expr:
        return tirx.Max(a, b)  # not Select: TVM's analyser copies both sides of each level

    def minimum(self, a: Expr, b: Expr) -> Expr:
        return tirx.Min(a, b)

    def iota(self) -> Expr:
        """0, 1, ... 15 as int32."""
        return tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), LANES)

    def int32(self, value: Expr | int) -> Expr:
        return _int32(value)

    def index(self, value: Expr | int) -> Expr:
        """A value as a 64-bit index."""
        return index(value)

    def both(self, a: Expr, b: Expr) -> Expr:
        return tirx.all(a, b)

    def either(self, a: Expr, b: Expr) -> Expr:
        return tirx.any(a, b)

    def clamp(self, value: Expr, low: Expr | int, high: Expr | int) -> Expr:
        """A scalar int32 held within `[low, high]`."""
        return tirx.max(tirx.min(value, _int32(high)), _int32(low))

    def at_least(self, value: Expr, low: int) -> Expr:
        """An index held at or above `low`."""
        return tirx.max(value, tirx.const(low, "int64"))

    def floor_div(self, value: Expr, by: int) -> Expr:
        """An index divided by a positive constant, rounded down."""
        return tirx.floordiv(value, tirx.const(by, "int64"))

    def rsqrt(self, value: Expr) -> Expr:
        """`1 / sqrt(value)` of a float32 scalar, both correctly rounded."""
        return tirx.const(1.0, "float32") / tirx.call_llvm_pure_intrin(
            "float32", "llvm.sqrt", value
        )

    def shuffle(self, vectors: Sequence[Expr], lanes: Sequence[int]) -> Expr:
        """The chosen lanes of some vectors laid side by side."""
        return tirx.Shuffle(list(vectors), list(lanes))

    def lane(self, vector: Expr, at: int) -> Expr:
        return tirx.Shuffle([vector], [at])

    def fold(self, vector: Expr, combine: Any, lanes: int = LANES) -> Expr:
        """Reduce a vector in a fixed tree: halves, quarters, ... down to one lane."""
        while lanes > 1:
            vector = self.let(vector)
            lanes //= 2
            low = tirx.Shuffle([vector], list(range(lanes)))
            high = tirx.Shuffle([vector], list(range(lanes, 2 * lanes)))
            vector = combine(low, high)
        return self.let(vector)

    def sum(self, vector: Expr) -> Expr:
        return self.fold(vector, lambda a, b: a + b)

    def sum4(self, vectors: Sequence[Expr]) -> Expr:
        """The sums of four vectors as a float32x4, each with the bits that `sum` gives.

        Lanes i and i ^ 8 are added, then i and i ^ 4 of those, 2 and 1: the tree of `sum`. The
        first two steps merge two vectors into one, so that four share each shuffle and add.
        """
        for apart in (8, 4):
            here = [i if not i & apart else i + LANES for i in range(LANES)]
            there = [(i ^ apart) if not i & apart else (i ^ apart) + LANES for i in range(LANES)]
            pairs = [[self.let(v) for v in vectors[i : i + 2]] for i in range(0, len(vectors), 2)]
            vectors = [self.shuffle(pair, here) + self.shuffle(pair, there) for pair in pairs]
        (total,) = vectors
        for apart in (2, 1):
            total = self.let(total)
            total = total + self.shuffle([total], [i ^ apart for i in range(LANES)])
        return self.shuffle([self.let(total)], [0, 8, 4, 12])

    def exp(self, x: Expr) -> Expr:
        """e**x of a float32 vector, within 2 ulp; 0 below -87.3.

        Source: Cephes expf (Moshier), Cody-Waite reduction by ln 2 in two parts.
        """
        x = self.let(self.maximum(x, self.splat(-87.3)))
        x = self.let(tirx.Select(x < self.splat(88.3), x, self.splat(88.3)))
        n = self.let(
            tirx.call_llvm_pure_intrin(
                _vector("float32", LANES), "llvm.rint", x * self.splat(1.0 / math.log(2.0))
            )
        )
        r = self.let(self.fma(n, self.splat(-0.693359375), x))
        r = self.let(self.fma(n, self.splat(2.12194440e-4), r))
        poly: Expr = self.splat(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            poly = self.fma(poly, r, self.splat(c))
        poly = self.fma(poly, r * r, r + self.splat(1.0))
        bits = (self.cast(n, "int32", LANES) + self.splat(127, "int32")) << self.splat(23, "int32")
        return self.let(poly * tirx.reinterpret(_vector("float32", LANES), bits))

    def tanh(self, x: Expr) -> Expr:
        """tanh of a float32 vector: 1 - 2 / (exp(2x) + 1)."""
        e = self.exp(self.minimum(x + x, self.splat(40.0)))  # beyond, the quotient is 0 or denormal
        return self.let(self.splat(1.0) - self.splat(2.0) / (e + self.splat(1.0)))

    def extern(self, dtype: str, function: str, *args: Expr) -> Expr:
        """Call a C library function."""
        return tirx.call_pure_extern(dtype, function, *args)


@dataclass(frozen=True)
class Register:
    """A float32 vector kept across a loop."""

    data: Any

    def get(self) -> Expr:
        return tirx.BufferLoad(self.data, [index(0)])

    def set(self, value: Expr) -> None:
        T.buffer_store(self.data, value, [index(0)])


def _int32(value: Expr | int) -> Expr:
    return tirx.const(value, "int32") if isinstance(value, int) else value


def _vector(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _element(type: TensorType) -> str:
    """TVM's element type of a flat operand."""
    return _TVM_DTYPES.get(type.dtype, "uint8")


def build_kernel(symbol: str, types: Sequence[TensorType], scratch_floats: int, emit: Any) -> Any:
    """Write the kernel `symbol`; `emit(kernel, *buffers)` fills in its body.

    `types` are those of the operands and outputs. If `scratch_floats` is not 0, one more float32
    buffer of that size follows.
    """
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as builder, T.prim_func(is_private=True):
        T.func_name(symbol)
        rows = T.arg("rows", T.int32())
        everything = [*types]
        if scratch_floats:
            everything.append(TensorType((scratch_floats,)))
        pointers = [T.arg(f"p{i}", T.handle(_element(t))) for i, t in enumerate(everything)]
        buffers = []
        for pointer, type in zip(pointers, everything, strict=True):
            size = type.elements if type.dtype in _TVM_DTYPES else type.nbytes
            data = T.decl_buffer((size,), _element(type), data=pointer)
            buffers.append(Buffer(type, data))
        emit(Kernel(rows), *buffers)
    function = builder.get()
    return function.with_attr({"global_symbol": symbol, "tirx.noalias": True})


def pointer_type(dtype: str) -> Any:
    """TVM's type of a pointer to `dtype`."""
    return ir.PointerType(ir.PrimType(dtype))

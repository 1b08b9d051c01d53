"""Products of experts for the tests of their CUDA kernels: operands, routings and the truth."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import activate_reference
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_experts import experts_down_scratch, experts_read_tiles
from memra_compiler.ops.cuda_layouts import (
    a8_quantise,
    a8_reference,
    bf16_reference,
    bf16_round,
    repack_reference,
)
from memra_compiler.ops.experts import ExpertsDown, ExpertsGated
from memra_compiler.ops.formats import dequantise, random_bytes

Array = np.ndarray

#: Largest error allowed, over the sum of magnitudes of the products.
TOLERANCE = 1e-6


def everyone_the_same(rng: np.random.Generator, rows: int, active: int, experts: int) -> Array:
    """All rows choose the same experts: more pairs of one than a tensor core has columns."""
    return np.tile(rng.permutation(experts)[:active], (rows, 1))


def at_random(rng: np.random.Generator, rows: int, active: int, experts: int) -> Array:
    return rng.permuted(np.tile(np.arange(experts), (rows, 1)), axis=1)[:, :active]


def apart(rng: np.random.Generator, rows: int, active: int, experts: int) -> Array:
    """No two rows choose the same expert, as long as there are enough."""
    return np.arange(rows * active)[::-1].reshape(rows, active) % experts


def one_twice(rng: np.random.Generator, rows: int, active: int, experts: int) -> Array:
    """The last expert and a neighbour, which the first and the last row share."""
    ids = apart(rng, rows, active, experts - 1)
    ids[0, -1] = ids[-1, 0] = experts - 1
    return ids


ROUTINGS: dict[str, Callable[[np.random.Generator, int, int, int], Array]] = {
    f.__name__: f for f in (everyone_the_same, at_random, apart, one_twice)
}


@dataclass(frozen=True)
class Case:
    """Experts of `width` rows and `inner` columns in between; `formats`: of gate_up, or both."""

    half: str
    formats: tuple[str, ...]
    kind: str
    rows: int
    experts: int = 8
    active: int = 3
    width: int = 128
    inner: int = 64
    act: str = "gelu_tanh"
    routing: str = "at_random"

    @property
    def label(self) -> str:
        size = f"{self.experts}x{self.width}x{self.inner}"
        parts = (self.half, *self.formats, self.kind, size, f"T{self.rows}", self.routing)
        return "-".join(parts)

    @property
    def gated(self) -> bool:
        return self.half == "gated"

    @property
    def op(self) -> ExpertsGated | ExpertsDown:
        if self.gated:
            return ExpertsGated(self.experts, self.act)
        return ExpertsDown(self.experts)

    @property
    def operands(self) -> tuple[TensorType, ...]:
        """x, ids, shares where there are any, weights; not laid out."""
        ids = TensorType((self.rows, self.active), "i32")
        if not self.gated:
            x = TensorType((self.rows, self.active * self.inner), self.kind)
            w = TensorType((self.experts * self.width, self.inner), self.formats[0])
            return x, ids, TensorType((self.rows, self.active)), w
        rows = self.experts * self.inner * 2 // len(self.formats)
        weights = (TensorType((rows, self.width), name) for name in self.formats)
        return TensorType((self.rows, self.width), self.kind), ids, *weights

    def laid_out(self, arch: CudaArch) -> tuple[TensorType, ...]:
        """The operands as `assign_layouts` lays them."""
        types = self.operands
        layout = "tiles16" if experts_read_tiles(self.op, arch, *types) else "plain"
        x = types[0] if self.kind == "f32" else replace(types[0], layout="tile8")
        first = len(types) - len(self.formats)
        return x, *types[1:first], *(replace(w, layout=layout) for w in types[first:])

    def launches(self, arch: CudaArch, planes: bool = False) -> tuple[Launch, ...]:
        types = self.laid_out(arch)
        return self.op.lower_cuda(arch, *types, self.out(planes))

    def out(self, planes: bool = False) -> TensorType:
        (out,) = self.op.infer(*self.operands)
        leaves = planes and not self.gated
        return replace(out, layout=f"planes{self.active}") if leaves else out

    def empty_out(self) -> Array:
        """An output of NaN as `launches(planes=True)` writes it: [planes, rows, N]."""
        rows, columns = self.out().max_shape
        planes, rows = (1, rows) if self.gated else (self.active, -(-rows // 8) * 8)
        return np.full((planes, rows, columns), np.nan, np.float32)

    def scratch(self, planes: bool = False) -> int:
        """Floats of scratch of the launches."""
        if self.gated:
            return 0
        return experts_down_scratch(self.operands[1], self.out(planes)) // 4


@dataclass(frozen=True)
class Arrays:
    """The operands of a case, as kernels take them and as what they stand for."""

    case: Case
    arch: CudaArch

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(self.case.label.encode()))

    @cached_property
    def ids(self) -> Array:
        c = self.case
        return ROUTINGS[c.routing](self._rng, c.rows, c.active, c.experts).astype(np.int32)

    @cached_property
    def shares(self) -> Array:
        shape = (self.case.rows, self.case.active)
        return self._rng.uniform(-1, 1, shape).astype(np.float32)

    @cached_property
    def x(self) -> Array:
        shape = self.case.operands[0].max_shape
        x = self._rng.standard_normal(shape).astype(np.float32)
        x *= 10 ** self._rng.uniform(-2, 2, (shape[0], 1)).astype(np.float32)
        x[:, :32] = 0
        return x

    @cached_property
    def stored(self) -> list[Array]:
        """Weights as a file has them."""
        return [random_bytes(t, self._rng) for t in self.case.operands[-len(self.case.formats) :]]

    def rows(self, picked: Sequence[int]) -> Array:
        """The picked rows as kernels take them, with noise where no row is."""
        x = np.full_like(self.x, 1e3)
        x[: len(picked)] = self.x[picked]
        if self.case.kind == "a8":
            return a8_reference(x)
        return bf16_reference(x) if self.case.kind == "bf16" else x

    def weights(self) -> list[Array]:
        """Weights in the layout of the kernels."""
        types = self.case.laid_out(self.arch)[-len(self.stored) :]
        return [
            repack_reference(data, t) if t.layout == "tiles16" else data
            for data, t in zip(self.stored, types, strict=True)
        ]

    def values(self, picked: Sequence[int]) -> list[Array]:
        """The operands that are no weights, for the picked rows; ids beyond are out of range."""
        ids, shares = np.full_like(self.ids, 1 << 20), np.full_like(self.shares, np.nan)
        ids[: len(picked)], shares[: len(picked)] = self.ids[picked], self.shares[picked]
        return [self.rows(picked), ids, *([] if self.case.gated else [shares])]

    @property
    def _values(self) -> Array:
        """What the rows that kernels take stand for."""
        if self.case.kind == "a8":
            q, d = a8_quantise(self.x)
            return q * np.repeat(d.astype(np.float64), 32, 1)
        return bf16_round(self.x) if self.case.kind == "bf16" else self.x

    @cached_property
    def truth(self) -> tuple[Array, Array]:
        """The result in float64, and the size that errors are measured by."""
        c, x = self.case, self._values.astype(np.float64)
        shares = np.ones(self.ids.shape) if c.gated else self.shares.astype(np.float64)
        columns = c.inner if c.gated else c.width
        parts, sizes = np.zeros((2, c.rows, c.active, columns))
        for e in np.unique(self.ids):
            rows, slots = np.nonzero(self.ids == e)
            mine = x[rows] if c.gated else x.reshape(c.rows, c.active, -1)[rows, slots]
            found, size = self._product(int(e), mine)
            share = shares[rows, slots][:, None]
            parts[rows, slots], sizes[rows, slots] = share * found, np.abs(share) * size
        if c.gated:
            return parts.reshape(c.rows, -1), sizes.reshape(c.rows, -1)
        return parts.sum(1), sizes.sum(1)

    def _product(self, expert: int, x: Array) -> tuple[Array, Array]:
        """Rows times the matrices of one expert, and the bound of their errors."""
        c, weights = self.case, []
        for data, type in zip(self.stored, c.operands[-len(c.formats) :], strict=True):
            one = replace(type, shape=(type.max_shape[0] // c.experts, type.max_shape[1]))
            weights.append(dequantise(data.reshape(c.experts, -1)[expert], one))
        if c.gated and len(weights) == 1:
            weights = np.split(weights[0], 2)
        sums = [x @ w.T for w in weights]
        sizes = [np.abs(x) @ np.abs(w).T + 1e-30 for w in weights]
        if not c.gated:
            return sums[0], sizes[0]
        gated = activate_reference(c.act, sums[0])
        size = sizes[0] * np.abs(sums[1]) * 1.5 + sizes[1] * np.abs(gated) + 1e-30
        return gated * sums[1], size

    def check(self, got: Array) -> float:
        """The worst error of all rows, over the sizes; it must be allowed."""
        want, size = self.truth
        worst = float(np.max(np.abs(got - want) / size))
        assert worst <= TOLERANCE, f"{self.case.label}: {worst:.2e}"
        return worst


def add_planes(planes: Array) -> Array:
    """Partial sums added in order, in float32, as whoever reads them does."""
    total = planes[0].copy()
    for plane in planes[1:]:
        total += plane
    return total


def companies(rows: int) -> list[list[int]]:
    """Rows in another order, then fewer and fewer of them."""
    return [list(range(rows))[::-1], *(list(range(n)) for n in range(rows - 1, 0, -1))]


def small_cases() -> Iterator[Case]:
    """Every kernel and format, at sizes for the CPU: each routing, on both sides of eight rows."""
    crowd = "everyone_the_same"
    yield Case("gated", ("q4_0",), "a8", 19, routing=crowd)
    yield Case("down", ("q4_0",), "a8", 10, routing=crowd)
    yield Case("down", ("q4_0",), "bf16", 10, routing=crowd)
    yield Case("gated", ("q8_0", "q8_0"), "bf16", 5, act="silu", width=192, inner=48)
    yield Case("down", ("q8_0",), "a8", 4, inner=192, width=48, routing="one_twice")
    yield Case("gated", ("q6_k",), "a8", 3, width=256, inner=16, routing="apart")
    yield Case("down", ("q4_k",), "a8", 3, width=16, inner=256, routing="apart")
    yield Case("gated", ("f16",), "bf16", 3)
    yield Case("down", ("bf16",), "bf16", 1)
    # as stored: two formats, half pieces, rows of floats
    yield Case("gated", ("q4_0", "q8_0"), "a8", 2)
    yield Case("down", ("q4_0",), "bf16", 3, inner=32, active=4)
    yield Case("gated", ("f32",), "f32", 3)
    yield Case("down", ("q4_0",), "f32", 3)

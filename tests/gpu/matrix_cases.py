"""What tests of matrix kernels share: operands on the GPU, values they stand for, and errors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from gpu_driver import ARCH, Gpu
from worst_errors import note

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import activate_reference
from memra_compiler.ops.cuda import Launch
from memra_compiler.ops.cuda_layouts import (
    a8_quantise,
    a8_reference,
    bf16_reference,
    bf16_round,
    repack_reference,
)
from memra_compiler.ops.cuda_linear import repack_launches, weight_layout
from memra_compiler.ops.formats import dequantise, random_bytes

#: Largest error allowed, over the sum of magnitudes of the products.
TOLERANCE = 1e-6

#: (storage format, outputs) of each matrix of a product.
Weights = tuple[tuple[str, int], ...]
Array = np.ndarray
Named = tuple[Launch, str]


def weight_types(weights: Weights, inputs: int) -> list[TensorType]:
    return [TensorType((outputs, inputs), format) for format, outputs in weights]


def repacks(types: Sequence[TensorType]) -> list[Named]:
    """The launches that bring weights into the layout of their kernels."""
    tiled = [t for t in types if weight_layout(ARCH, t) != "plain"]
    return [(repack_launches(ARCH, type)[0], f"repack_{type.dtype}") for type in tiled]


class Operands:
    """Buffers of one case, freed at its end, and its random numbers."""

    def __init__(self, gpu: Gpu, seed: str) -> None:
        self.gpu = gpu
        self.rng = np.random.default_rng(zlib.crc32(seed.encode()))
        self._held: list[int] = []

    def __enter__(self) -> Operands:
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.free(self._held)

    def upload(self, array: Array) -> int:
        self._held.append(self.gpu.upload(array))
        return self._held[-1]

    def rows(self, count: int, inputs: int) -> Array:
        """Activations of magnitudes from 0.01 to 100, each row with a block of zeros."""
        x = self.rng.standard_normal((count, inputs)).astype(np.float32)
        x *= 10 ** self.rng.uniform(-2, 2, (count, 1)).astype(np.float32)
        x[:, :32] = 0
        return x

    def weight(self, type: TensorType) -> tuple[int, Array]:
        """A random weight as the kernels want it, and its values."""
        stored = random_bytes(type, self.rng)
        return self.repacked(type, stored), dequantise(stored, type)

    def repacked(self, type: TensorType, stored: Array) -> int:
        """A stored weight as the kernels want it; repacking is exact."""
        address = self.upload(stored)
        if weight_layout(ARCH, type) == "plain":
            return address
        launch, size = repack_launches(ARCH, type)
        out = np.full(size, 0xCD, np.uint8)
        repacked = self.upload(out)
        self.gpu.run((launch,), f"repack_{type.dtype}", ARCH, 0, [address, repacked])
        actual = self.gpu.download(repacked, out)
        np.testing.assert_array_equal(actual, repack_reference(stored, type), f"repack {type}")
        return repacked


def activations(x: Array, kind: str) -> tuple[Array, Array]:
    """Stored activations and the values that they stand for."""
    if kind == "a8":
        q, d = a8_quantise(x)
        return a8_reference(x), q.astype(np.float64) * np.repeat(d.astype(np.float64), 32, 1)
    if kind == "bf16":
        return bf16_reference(x), bf16_round(x).astype(np.float64)
    return x, x.astype(np.float64)


def stored_rows(x: Array, type: TensorType) -> Array:
    """`x` as kernels for rows of `type` take it: all of its tiles, with zeros after the last row.

    A kernel of few rows reads every tile, also where nobody asked for a row of it.
    """
    whole = np.zeros(type.max_shape, np.float32)
    whole[: len(x)] = x
    return activations(whole, type.dtype)[0]


def add_planes(planes: Array) -> Array:
    """Partial sums added in order, in float32, as whoever reads them does."""
    total = planes[0].copy()
    for plane in planes[1:]:
        total += plane
    return total


class Reference:
    """The product of all rows in float64, and how large its errors may be.

    Errors are over the sum of magnitudes; those of a gated product over the bound of its factors.
    """

    def __init__(self, x: Array, weights: Sequence[Array], act: str | None) -> None:
        sums = [x @ w.T for w in weights]
        sizes = [np.abs(x) @ np.abs(w).T + 1e-30 for w in weights]
        if act is not None:
            gate = activate_reference(act, sums[0])
            sizes = [sizes[0] * np.abs(sums[1]) * 1.5 + sizes[1] * np.abs(gate) + 1e-30]
            sums = [gate * sums[1]]
        self.products, self.sizes = sums, sizes

    def check(self, family: str, got: Sequence[Array]) -> None:
        """The first rows of the products."""
        worst = 0.0
        for g, product, size in zip(got, self.products, self.sizes, strict=True):
            rows = len(g)
            worst = max(worst, float(np.max(np.abs(g - product[:rows]) / size[:rows])))
        note(family, worst, TOLERANCE)
        assert worst <= TOLERANCE

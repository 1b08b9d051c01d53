"""Which CUDA kernels multiply: those for a round's few rows or that for a prompt's many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_linear import (
    gated_quantises,
    gated_scratch_bytes,
    linear_launches,
    split_planes,
)
from memra_compiler.ops.cuda_params import whole_tiles
from memra_compiler.ops.cuda_wide import wide_launches, wide_planes

#: Rows up to which a product only streams its weights, whatever the rows.
NARROW_ROWS = 16


def product_launches(
    arch: CudaArch,
    x: TensorType,
    weights: Sequence[TensorType],
    outs: Sequence[TensorType],
    act: str | None = None,
) -> tuple[Launch, ...]:
    """Launches of `weights x`, one output a weight, or with `act` of act(gate x) * (up x)."""
    if x.max_shape[0] > NARROW_ROWS:
        return wide_launches(arch, x, weights, outs, act=act)
    return linear_launches(arch, x, weights, outs, act=act)


def gated_launches(
    arch: CudaArch, x: TensorType, weights: Sequence[TensorType], out: TensorType, act: str
) -> tuple[Launch, ...]:
    """Launches of `act(gate x) * (up x)` as floats or, where `out` is a8, as int8 tiles.

    Where no product stores them itself, floats go to scratch and are quantised from there.
    """
    if out.dtype != "a8" or gated_meets(arch, x, weights):
        return product_launches(arch, x, weights, [out], act)
    from memra_compiler.ops.cuda_kernels import quantise_launches
    from memra_compiler.ops.quantise import Quantise

    held = _held(out)
    products = product_launches(arch, x, weights, [held], act)
    quantise = quantise_launches(Quantise(), arch, held, out)
    return (
        *(replace(launch, arguments=(0, 1, 2, 4)) for launch in products),
        *(replace(launch, arguments=(4, 3)) for launch in quantise),
    )


def gated_meets(arch: CudaArch, x: TensorType, weights: Sequence[TensorType]) -> bool:
    """Whether one launch multiplies, gates and quantises: its blocks meet in scratch."""
    return x.max_shape[0] <= NARROW_ROWS and gated_quantises(arch, x, weights)


def gated_scratch(
    arch: CudaArch, x: TensorType, weights: Sequence[TensorType], out: TensorType
) -> int:
    """Bytes of scratch of `gated_launches`."""
    if out.dtype != "a8":
        return 0
    return gated_scratch_bytes(arch, x, weights) if gated_meets(arch, x, weights) else (
        4 * whole_tiles(out.max_shape[0]) * out.max_shape[1])  # fmt: skip


def _held(out: TensorType) -> TensorType:
    """The one plane of floats that is quantised afterwards."""
    return TensorType(out.shape, layout="planes1")


def product_planes(
    arch: CudaArch, x: TensorType, weights: Sequence[TensorType], act: str | None = None
) -> int:
    """Partial planes that each output of `product_launches` has."""
    if x.max_shape[0] > NARROW_ROWS:
        return wide_planes(arch, x, weights, act)
    return split_planes(arch, x, weights, act)

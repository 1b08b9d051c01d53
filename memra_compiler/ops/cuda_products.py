"""Which CUDA kernel multiplies: the one for a round's few rows or that for a prompt's many."""

from __future__ import annotations

from collections.abc import Sequence

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_linear import linear_launches, split_planes
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


def product_planes(
    arch: CudaArch, x: TensorType, weights: Sequence[TensorType], act: str | None = None
) -> int:
    """Partial planes that each output of `product_launches` has."""
    if x.max_shape[0] > NARROW_ROWS:
        if x.dtype == "f32":  # TVM's: no sum is split
            return 1
        return wide_planes(arch, x, weights, act)
    return split_planes(arch, x, weights, act)

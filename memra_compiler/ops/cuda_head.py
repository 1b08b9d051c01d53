"""CUDA launches of a trimmed head's choice."""

from __future__ import annotations

from dataclasses import dataclass

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_params import WARP, launch
from memra_compiler.ops.cuda_state import ONE_BLOCK, argmax_launches
from memra_compiler.ops.head import BestRow, TokenOfRow


@dataclass(frozen=True)
class TokenOfRowParams:
    """`head/token_of_row.cu.j2`."""

    ids: int
    skip: bool


def best_row_launches(op: BestRow, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """The best of the rows in use: the kernels of `argmax`, with a bound."""
    return argmax_launches(op, arch, *types, splits=types[0].planes, bounded=True)


def token_of_row_launches(op: TokenOfRow, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """The map from rows to tokens."""
    params = TokenOfRowParams(types[1].elements, op.skip)
    return (launch(arch, "head/token_of_row.cu.j2", params, ONE_BLOCK, WARP),)

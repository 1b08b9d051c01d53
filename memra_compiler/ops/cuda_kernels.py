"""CUDA launches of the ops that have templates and are no matrix products: one function an op.

Each takes the op, the device, and the types of operands and outputs; an output's type says whether
it is float rows or tiles of rounded ones. `splits` is how many partial planes the operands that
come straight from a matrix product have: `[splits][whole tiles of 8 rows][N]`, added in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import Concat, GateMul
from memra_compiler.ops.attention import KvAppend, NormRopeAppend
from memra_compiler.ops.base import expect
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_params import (
    VECTOR,
    WARP,
    bound,
    c_type,
    cache_type,
    ceil_div,
    columns,
    launch,
    output_rows,
    row_format,
    whole_tiles,
)
from memra_compiler.ops.kv_move import KvMove
from memra_compiler.ops.norm import RMSNormAdd
from memra_compiler.ops.qkv import NormRopeQKV
from memra_compiler.ops.quantise import Quantise, RMSNormAddQuantise, RMSNormQuantise
from memra_compiler.ops.residual import ResidualNorms
from memra_compiler.ops.rope import NormRope

#: Warps of a block whose warps work alone.
WARPS = 4
#: Threads of a block of an element-wise kernel.
THREADS = 256
#: Vectors a thread of a row norm holds, before the block grows no more.
NORM_VECTORS = 768


def _row_block(size: int) -> tuple[int, int]:
    """Threads of a block that holds a row, and vectors a thread holds."""
    total = size // VECTOR
    vectors = ceil_div(total, NORM_VECTORS)
    return ceil_div(total, vectors * WARP) * WARP, vectors


@dataclass(frozen=True)
class RMSNormParams:
    """`norm/rmsnorm.cu.j2`: one block a row."""

    size: int
    threads: int
    vectors: int
    splits: int
    plane_rows: int
    eps: float
    weight_type: str
    to: str


@dataclass(frozen=True)
class NextNorm:
    """A norm that follows the residual: the format of its rows, of its weight, and its factor."""

    to: str
    weight_type: str
    factor: float = 1.0


@dataclass(frozen=True)
class ResidualNormParams:
    """`norm/residual_norm.cu.j2`: one block a row.

    `splits` are those of y and, with two branches, of z; `post_types` are of their weights and last
    of the weight of their sum.
    """

    size: int
    threads: int
    vectors: int
    splits: tuple[int, ...]
    plane_rows: int
    eps: float
    post_types: tuple[str, ...]
    norms: tuple[NextNorm, ...]
    scaled: bool
    scale_type: str


def rmsnorm_launches(
    op: RMSNormQuantise, arch: CudaArch, *types: TensorType, splits: int = 1
) -> tuple[Launch, ...]:
    """Norms of whole rows as tiles of int8 or bf16."""
    x, weight, out = types
    size = columns(x)
    threads, vectors = _row_block(size)
    params = RMSNormParams(
        size, threads, vectors, splits, whole_tiles(bound(x)), op.eps, c_type(op, weight),
        row_format(op, out),
    )  # fmt: skip
    return (launch(arch, "norm/rmsnorm.cu.j2", params, (output_rows(out), 1, 1), threads),)


def rmsnorm_add_launches(
    op: RMSNormAdd | RMSNormAddQuantise,
    arch: CudaArch,
    *types: TensorType,
    splits: int = 1,
) -> tuple[Launch, ...]:
    """The residual and its norm; then, for tiles, the next norm. `splits` are those of y."""
    to = row_format(op, types[-1])
    x, _, post, *rest = types[:-1] if to == "f32" else types[:-2]
    norms = () if to == "f32" else (NextNorm(to, c_type(op, rest.pop(0))),)
    return _residual_launches(op, arch, x, (splits,), [post], norms, rest, types[-1:])


def residual_norms_launches(
    op: ResidualNorms, arch: CudaArch, *types: TensorType
) -> tuple[Launch, ...]:
    """The residual of one or two branches, and the norms that follow."""
    outputs = types[-1 - len(op.to) :]
    (x, *branches), posts, weights, scale = op.parts(types[: -len(outputs)])
    norms = tuple(
        NextNorm(row_format(op, out), c_type(op, weight), factor)
        for out, weight, factor in zip(outputs[1:], weights, op.factors, strict=True)
    )
    splits = tuple(branch.planes for branch in branches)
    return _residual_launches(op, arch, x, splits, posts, norms, scale, outputs)


def _residual_launches(
    op: RMSNormAdd | RMSNormAddQuantise | ResidualNorms,
    arch: CudaArch,
    x: TensorType,
    splits: tuple[int, ...],
    posts: Sequence[TensorType],
    norms: tuple[NextNorm, ...],
    scale: Sequence[TensorType],
    outputs: Sequence[TensorType],
) -> tuple[Launch, ...]:
    size = columns(x)
    threads, vectors = _row_block(size)
    params = ResidualNormParams(
        size, threads, vectors, splits, whole_tiles(bound(x)), op.eps,
        tuple(c_type(op, post) for post in posts), norms, bool(scale),
        c_type(op, scale[0]) if scale else "float",
    )  # fmt: skip
    grid = (max(output_rows(type) for type in outputs), 1, 1)
    return (launch(arch, "norm/residual_norm.cu.j2", params, grid, threads),)


# -- element by element ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ElementParams:
    """What kernels over the elements of rows know of them."""

    size: int
    threads: int
    splits: int
    plane_rows: int


@dataclass(frozen=True)
class QuantiseParams(ElementParams):
    """`elementwise/quantise.cu.j2`."""

    to: str


@dataclass(frozen=True)
class GateMulParams(ElementParams):
    """`elementwise/gate_mul.cu.j2`; `act` is a function of `math.cuh`."""

    act: str
    to: str


@dataclass(frozen=True)
class ConcatParams:
    """`elementwise/concat.cu.j2`."""

    first: int
    second: int
    threads: int
    to: str


def _element_block(size: int) -> int:
    return min(THREADS, ceil_div(size, VECTOR * WARP) * WARP)


def _element_params(x: TensorType, splits: int) -> tuple[int, int, int, int]:
    size = columns(x)
    return size, _element_block(size), splits, whole_tiles(bound(x))


def _element_launch(
    arch: CudaArch, template: str, params: ElementParams | ConcatParams, out: TensorType
) -> tuple[Launch, ...]:
    grid = (ceil_div(columns(out), VECTOR * params.threads), output_rows(out), 1)
    return (launch(arch, f"elementwise/{template}.cu.j2", params, grid, params.threads),)


def quantise_launches(
    op: Quantise, arch: CudaArch, *types: TensorType, splits: int = 1
) -> tuple[Launch, ...]:
    """Float rows to tiles of int8 or bf16."""
    x, out = types
    params = QuantiseParams(*_element_params(x, splits), row_format(op, out))
    return _element_launch(arch, "quantise", params, out)


def gate_mul_launches(
    op: GateMul, arch: CudaArch, *types: TensorType, splits: int = 1
) -> tuple[Launch, ...]:
    """act(gate) * up, as float rows or tiles. `splits` are those of both."""
    gate, _, out = types
    params = GateMulParams(*_element_params(gate, splits), op.act, row_format(op, out))
    return _element_launch(arch, "gate_mul", params, out)


def concat_launches(op: Concat, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Two rows side by side as tiles of int8 or bf16."""
    x, y, out = types
    threads = _element_block(columns(out))
    params = ConcatParams(columns(x), columns(y), threads, row_format(op, out))
    return _element_launch(arch, "concat", params, out)


# -- heads and caches ------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormRopeParams:
    """`rope/norm_rope.cu.j2`: one warp a head."""

    head_dim: int
    heads: int
    warps: int
    splits: int
    plane_rows: int
    q_stride: int
    eps: float
    weight_type: str


@dataclass(frozen=True)
class NormRopeAppendParams:
    """`rope/norm_rope_append.cu.j2`: one warp a head."""

    head_dim: int
    kv_heads: int
    cache_rows: int
    warps: int
    splits: int
    plane_rows: int
    kv_stride: int
    unit_values: bool
    eps: float
    weight_type: str
    kv_type: str


@dataclass(frozen=True)
class NormRopeQKVParams:
    """`rope/norm_rope_qkv.cu.j2`: one warp a head."""

    head_dim: int
    heads: int
    kv_heads: int
    cache_rows: int
    warps: int
    splits: int
    plane_rows: int
    q_stride: int
    kv_stride: int
    unit_values: bool
    eps: float
    q_weight_type: str
    k_weight_type: str
    kv_type: str


@dataclass(frozen=True)
class KvAppendParams:
    """`attention/kv_append.cu.j2`: one warp a head."""

    head_dim: int
    kv_heads: int
    cache_rows: int
    warps: int
    splits: int
    plane_rows: int
    kv_type: str


@dataclass(frozen=True)
class KvMoveParams:
    """`attention/kv_move.cu.j2`: one warp a head."""

    head_dim: int
    kv_heads: int
    chunk_rows: int
    cache_rows: int
    warps: int
    kv_type: str
    piece: str


#: Vectors that a row is copied by, widest first: their bytes and C++ types.
PIECES = ((16, "uint4"), (8, "uint2"), (4, "unsigned"))


def _head_grid(units: int) -> tuple[int, int, int]:
    return ceil_div(units, WARPS), 1, 1


def norm_rope_launches(
    op: NormRope, arch: CudaArch, *types: TensorType, splits: int = 1, row_stride: int = 0
) -> tuple[Launch, ...]:
    """`row_stride`: floats from one row of x to the next, where x is part of wider planes."""
    x, _, weight, _ = types
    head_dim = columns(types[1])
    heads = columns(x) // head_dim
    params = NormRopeParams(
        head_dim, heads, WARPS, splits, whole_tiles(bound(x)), row_stride or columns(x), op.eps,
        c_type(op, weight),
    )  # fmt: skip
    grid = _head_grid(bound(x) * heads)
    return (launch(arch, "rope/norm_rope.cu.j2", params, grid, WARPS * WARP),)


def norm_rope_append_launches(
    op: NormRopeAppend, arch: CudaArch, *types: TensorType, splits: int = 1, row_stride: int = 0
) -> tuple[Launch, ...]:
    """Keys normed and turned, values normed if the op says so, into their caches."""
    k, _, _, weight, _, cache, _ = types
    kv_heads, cache_rows, head_dim = cache.max_shape
    params = NormRopeAppendParams(
        head_dim, kv_heads, cache_rows, WARPS, splits, whole_tiles(bound(k)),
        row_stride or columns(k), op.v_norm == "unit", op.eps, c_type(op, weight),
        cache_type(op, cache),
    )  # fmt: skip
    grid = _head_grid(bound(k) * 2 * kv_heads)
    return (launch(arch, "rope/norm_rope_append.cu.j2", params, grid, WARPS * WARP),)


def norm_rope_qkv_launches(
    op: NormRopeQKV, arch: CudaArch, *types: TensorType, splits: int = 1,
    q_stride: int = 0, kv_stride: int = 0,
) -> tuple[Launch, ...]:  # fmt: skip
    """A layer's q, k and v in one launch; strides as in `norm_rope_launches`."""
    q, k, _, _, q_weight, k_weight, _, cache, _, _ = types
    kv_heads, cache_rows, head_dim = cache.max_shape
    heads = columns(q) // head_dim
    params = NormRopeQKVParams(
        head_dim, heads, kv_heads, cache_rows, WARPS, splits, whole_tiles(bound(q)),
        q_stride or columns(q), kv_stride or columns(k), op.v_norm == "unit", op.eps,
        c_type(op, q_weight), c_type(op, k_weight), cache_type(op, cache),
    )  # fmt: skip
    grid = _head_grid(bound(q) * (heads + 2 * kv_heads))
    return (launch(arch, "rope/norm_rope_qkv.cu.j2", params, grid, WARPS * WARP),)


def kv_append_launches(
    op: KvAppend, arch: CudaArch, *types: TensorType, splits: int = 1
) -> tuple[Launch, ...]:
    """Keys and values into their caches as they are."""
    k, _, _, cache, _ = types
    kv_heads, cache_rows, head_dim = cache.max_shape
    params = KvAppendParams(
        head_dim, kv_heads, cache_rows, WARPS, splits, whole_tiles(bound(k)), cache_type(op, cache)
    )
    grid = _head_grid(bound(k) * 2 * kv_heads)
    return (launch(arch, "attention/kv_append.cu.j2", params, grid, WARPS * WARP),)


def kv_move_launches(op: KvMove, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """A step's rows from its chunk planes into the caches."""
    positions, chunk, _, cache, _ = types
    kv_heads, cache_rows, head_dim = cache.max_shape
    row_bytes = cache.nbytes // (kv_heads * cache_rows)
    piece = next((name for size, name in PIECES if row_bytes % size == 0), "")
    expect(bool(piece), op, f"rows must be whole words of 4 bytes, got {cache}")
    params = KvMoveParams(
        head_dim, kv_heads, chunk.max_shape[1], cache_rows, WARPS, cache_type(op, cache), piece
    )
    grid = _head_grid(bound(positions) * 2 * kv_heads)
    return (launch(arch, "attention/kv_move.cu.j2", params, grid, WARPS * WARP),)

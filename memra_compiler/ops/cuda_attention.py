"""CUDA launches of attention: how the work is cut, and why that never depends on the rows.

The positions are cut into units and folds as `templates/lib/kv_split.cuh` says. Unit, slots and the
arithmetic follow from the caches and the device alone; how many rows a block takes together does
not touch the bits of any of them.

Tensor cores take keys and values as a float16 or bfloat16 cache has them. Those of a q8_0 cache are
widened first, to q * d rounded to float16, which is what the format means (`kv_rows`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memra_compiler.ir.types import CACHE_BLOCKS, TensorType
from memra_compiler.ops.attention import Attention
from memra_compiler.ops.base import expect
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_params import (
    VECTOR,
    WARP,
    bound,
    cache_type,
    ceil_div,
    columns,
    launch,
    output_rows,
    row_format,
)
from memra_compiler.ops.kv_rows import reads
from memra_runtime.artifact import BATCH_ROWS

THREADS = 256
COMBINE_WARPS = 4
#: (row, head) pairs of one tensor-core tile.
TILE = 16
#: Tiles of a block, most first: 64 pairs of 512 columns fill half the registers.
ROW_TILES = (4, 2, 1)
#: Positions of a unit, best first.
UNITS = (64, 32)
#: Pairs of a block of the kernel without tensor cores.
PLAIN_PAIRS = 16
#: Shared memory the driver keeps of each block.
RESERVED_BYTES = 1024
#: Two blocks share a multiprocessor where heads are no wider than this.
NARROW_HEAD = 256


@dataclass(frozen=True)
class PlainAttentionParams:
    """`attention/attention_plain.cu.j2`."""

    scale: float
    unit: int
    span: int
    slots: int
    kv_type: str
    head_dim: int
    heads: int
    kv_heads: int
    cache_rows: int
    max_rows: int
    shared_bytes: int
    #: Rows of the chunk planes, 0 without any.
    chunk_rows: int


@dataclass(frozen=True)
class AttentionParams(PlainAttentionParams):
    """`attention/attention_mma.cu.j2`."""

    row_tiles: int
    query_parts: int
    blocks: int


@dataclass(frozen=True)
class CombineParams:
    """`attention/attention_combine.cu.j2`."""

    unit: int
    span: int
    slots: int
    head_dim: int
    heads: int
    max_rows: int
    warps: int
    to: str
    #: Whether there are chunk planes among the operands.
    chunked: bool


@dataclass(frozen=True)
class AttentionPlan:
    """How attention over one kind of cache is cut, for any number of rows."""

    unit: int
    slots: int
    query_parts: int
    tensor_cores: bool
    head_dim: int
    max_rows: int
    #: Bytes of a row that is copied before it is widened; 0 where rows are used as they are.
    packed_row: int = 0

    def shared_bytes(self, row_tiles: int) -> int:
        """Dynamic shared memory of a block, as `AttentionShared` and `PlainShared` lay it out."""
        plan = 8 * self.max_rows
        if not self.tensor_cores:
            return 4 * PLAIN_PAIRS * (self.head_dim + self.unit + 1) + plan
        pairs, row = TILE * row_tiles, 2 * (self.head_dim + 8)
        queries = self.query_parts * pairs * row
        scores = pairs * 4 * (self.unit + 4)
        softmax = pairs * 4 * (2 + WARP)
        units = self.unit * (row + 2 * self.packed_row if self.packed_row else 2 * row)
        return queries + units + scores + softmax + plan

    def row_tiles(self, arch: CudaArch, pairs: int) -> int:
        """Tiles of a block: as many as fit, and no more than `pairs` (row, head) pairs fill.

        Two blocks of two tiles on a multiprocessor hide more than one of four.
        """
        wanted = ceil_div(pairs, TILE)
        most = 2 if self.resident_blocks(arch, 2) == 2 else ROW_TILES[0]
        for tiles in ROW_TILES if self.tensor_cores else ():
            fits = self.shared_bytes(tiles) + RESERVED_BYTES <= arch.shared_bytes
            if fits and tiles <= most and tiles < 2 * wanted:
                return tiles
        return 1

    def block_pairs(self, tiles: int) -> int:
        """(row, head) pairs of a block."""
        return TILE * tiles if self.tensor_cores else PLAIN_PAIRS

    def resident_blocks(self, arch: CudaArch, tiles: int) -> int:
        """Blocks of a multiprocessor, where two fit its registers and shared memory."""
        small = tiles <= 2 and self.head_dim <= NARROW_HEAD and self.query_parts == 1
        both = 2 * (self.shared_bytes(tiles) + RESERVED_BYTES)
        return 2 if small and both <= arch.shared_bytes + RESERVED_BYTES else 1

    def partials(self, span: int) -> int:
        """Splits of a row that may be under way: entries of the scratch."""
        return self.slots + 1 if span else self.slots


def plan_attention(op: Attention, arch: CudaArch, *types: TensorType) -> AttentionPlan:
    """The plan for `q, ends, k_cache, v_cache, ..`. Nothing in it but `max_rows` depends on T."""
    q, _, cache = types[:3]
    kv_heads, _, head_dim = cache.max_shape
    expect(head_dim % VECTOR == 0, op, f"heads must be whole vectors of {VECTOR}, got {cache}")
    density = 2 if head_dim <= NARROW_HEAD else 1
    slots = max(1, density * arch.multiprocessors // kv_heads)
    parts = 2 if cache.dtype == "bf16" else 1  # bf16 alone would lose half of a query's bits
    packed = cache.row_bytes if cache.dtype in CACHE_BLOCKS else 0
    for unit in UNITS if cache.dtype != "f32" and head_dim % 32 == 0 else ():
        plan = AttentionPlan(unit, slots, parts, True, head_dim, bound(q), packed)
        widest = dataclasses.replace(plan, max_rows=BATCH_ROWS)  # T must not choose the unit
        if widest.shared_bytes(1) + RESERVED_BYTES <= arch.shared_bytes:
            return plan
    return AttentionPlan(UNITS[-1], slots, 1, False, head_dim, bound(q))


def attention_scratch_floats(op: Attention, arch: CudaArch, *types: TensorType) -> int:
    """Scratch of `attention_launches`: weighted values, largest score and mass of each split."""
    plan = plan_attention(op, arch, *types)
    heads = columns(types[0]) // plan.head_dim
    return plan.partials(op.span) * plan.max_rows * heads * (plan.head_dim + 2)


def attention_class(op: Attention, arch: CudaArch, *types: TensorType) -> str:
    """What decides the bits of a row."""
    plan = plan_attention(op, arch, *types)
    cache = types[2]
    cut = f"units of {plan.unit}, folded into at most {plan.slots} splits by the row's end"
    if not plan.tensor_cores:
        return f"f32 x {reads(cache)}->f32, fma over lanes, tree of 32; softmax f32 exp2; {cut}"
    terms = f"{plan.query_parts} x {'f16' if plan.packed_row else cache.dtype}"
    return (
        f"({terms}) x {reads(cache)}, mma k16 f32, even and odd steps; softmax f32 exp2; "
        f"weights {terms}, mma k16 f32 in position order; {cut}"
    )


def attention_launches(op: Attention, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Partial results of each split, then their sum in order of position."""
    q, _, cache, _, *chunk, out = types
    plan = plan_attention(op, arch, *types)
    kv_heads, cache_rows, head_dim = cache.max_shape
    heads, rows = columns(q) // head_dim, bound(q)
    pairs = rows * (heads // kv_heads)
    tiles = plan.row_tiles(arch, pairs)
    shared = plan.shared_bytes(tiles)
    plain = PlainAttentionParams(
        op.scale, plan.unit, op.span, plan.slots, cache_type(op, cache), head_dim, heads, kv_heads,
        cache_rows, rows, shared, chunk[0].max_shape[1] if chunk else 0,
    )  # fmt: skip
    grid = (plan.partials(op.span), kv_heads, ceil_div(pairs, plan.block_pairs(tiles)))
    if plan.tensor_cores:
        params = AttentionParams(
            **dataclasses.asdict(plain),
            row_tiles=tiles,
            query_parts=plan.query_parts,
            blocks=plan.resident_blocks(arch, tiles),
        )
        first = launch(arch, "attention/attention_mma.cu.j2", params, grid, THREADS, shared)
    else:
        first = launch(arch, "attention/attention_plain.cu.j2", plain, grid, THREADS, shared)
    combine = CombineParams(
        plan.unit, op.span, plan.slots, head_dim, heads, rows, COMBINE_WARPS, row_format(op, out),
        bool(chunk),
    )  # fmt: skip
    units = heads * ceil_div(head_dim, VECTOR * WARP)
    second = launch(
        arch, "attention/attention_combine.cu.j2", combine,
        (ceil_div(units, COMBINE_WARPS), output_rows(out), 1), COMBINE_WARPS * WARP,
    )  # fmt: skip
    return first, second

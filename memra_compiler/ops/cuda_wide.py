"""CUDA kernels of matrix products with many rows (prompts): up to 64 rows of int8 or bf16.

They read the weights that `cuda_linear` repacks, and take the same arguments. A matrix that does
not tile takes the plain kernel; f32 rows are multiplied by TVM's gemm. Outputs are float
planes `[splits][rows rounded up to 8][N]`: whoever reads them adds the planes in order. How K is
cut depends on the matrices and the architecture alone: no row's bits depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from memra_compiler.ir.errors import OpError
from memra_compiler.ir.types import PIECE_BYTES, TensorType
from memra_compiler.ops.cuda import TILE_ROWS, CudaArch, Launch
from memra_compiler.ops.cuda_linear import (
    FORMATS,
    TILE_OUTPUTS,
    Matrix,
    Product,
    plain_launch,
)

#: Most rows of a launch, and their tiles.
WIDE_ROWS = 64
WIDE_COLUMN_TILES = WIDE_ROWS // TILE_ROWS
#: Tiles of outputs that a warp multiplies at a time.
WARP_TILES = 2
#: Warps that multiply: their registers fill a multiprocessor.
MOST_WARPS = 12
MOST_SPLITS = 9
MOST_STAGES = 8
#: A stage should hold as much: fewer barriers, and yet several stages.
STAGE_BYTES = 40 << 10
#: Shared memory that int8 products start from (templates/lib/wide_mma.cuh).
START_BYTES = {"a8": 16, "bf16": 0}

# What a launch costs, in cycles of a multiprocessor. Estimates, to rank geometries.
#: A scheduler is busy for so long with two tiles, 64 inputs and 64 rows: int8 issues as many
#: instructions, bf16 waits for the tensor cores.
PIECE_CYCLES = {"a8": 390, "bf16": 480}
SCHEDULERS = 4
#: Fewer warps than that on a scheduler leave it idle at times.
ENOUGH_WARPS = 3
IDLE_SHARE = 0.15
#: Bytes a cycle into a multiprocessor: its share of the memory, and from L2.
MEMORY_BYTES = 18
L2_BYTES = 26
#: The smaller of computing and copying is hidden but for this share.
EXPOSED_SHARE = 0.25
#: A block that starts and ends, and the groups of a block that meet.
BLOCK_CYCLES = 4000
MEETING_CYCLES = 1000


@dataclass(frozen=True)
class WideWork:
    """What a geometry is chosen for; rows have no say."""

    format: str
    inputs: int
    tiles: int
    may_split: bool
    x_class: str = "a8"

    @property
    def units(self) -> int:
        return self.inputs // FORMATS[self.format].unit_inputs


@dataclass(frozen=True)
class WideGeometry:
    """How K and the outputs are spread.

    `splits` of `split_units` units of K go to different blocks. In a block, `groups` groups of
    warps take units by turns; each has `output_warps` warps of two tiles.
    """

    splits: int
    split_units: int
    output_warps: int
    groups: int

    @property
    def warps(self) -> int:
        return self.output_warps * self.groups

    @property
    def block_tiles(self) -> int:
        return WARP_TILES * self.output_warps

    def blocks(self, work: WideWork) -> int:
        return math.ceil(work.tiles / self.block_tiles) * self.splits


@dataclass(frozen=True)
class WideRing:
    """The stages of a ring in shared memory, and all that is in it."""

    stage_units: int
    stages: int
    shared_bytes: int


@dataclass(frozen=True)
class WideParams:
    """Variables of linear/wide.cu.j2."""

    format: str
    header: str
    work: WideWork
    column_tiles: int
    matrices: tuple[Matrix, ...]
    weights: int
    outs: int
    act: str
    gated: bool
    reads_out: bool
    geometry: WideGeometry
    stage_units: int
    stages: int
    start_bytes: int
    shared_bytes: int
    bulk_copy: bool
    dependent_launch: bool


def ring(arch: CudaArch, work: WideWork, g: WideGeometry, column_tiles: int) -> WideRing | None:
    """The ring that fits, or None if not even two stages do."""
    format = FORMATS[work.format]
    columns = column_tiles * format.unit_pieces * PIECE_BYTES[work.x_class]
    turn = g.groups * (g.block_tiles * format.unit_bytes + columns)  # a unit for each group
    turns = max(1, min(STAGE_BYTES // turn, math.ceil(g.split_units / g.groups)))
    stage_bytes = turns * turn
    partials = g.warps * WARP_TILES * column_tiles * 512 if g.groups > 1 else 0
    for stages in range(MOST_STAGES, 1, -1):
        barriers = 16 * stages if arch.bulk_copy else 0
        size = max(stages * stage_bytes, partials) + START_BYTES[work.x_class] + barriers
        if size <= arch.shared_bytes - 1024:
            return WideRing(turns * g.groups, stages, size)
    return None


def candidates(arch: CudaArch, work: WideWork) -> Iterator[WideGeometry]:
    """Ways to spread `work` that fit with the most rows."""
    for splits in range(1, MOST_SPLITS + 1 if work.may_split else 2):
        split_units = math.ceil(work.units / splits)
        if math.ceil(work.units / split_units) != splits:
            continue  # some splits would have nothing to do
        for output_warps in range(1, MOST_WARPS + 1):
            for groups in range(1, min(MOST_WARPS // output_warps, split_units) + 1):
                shape = WideGeometry(splits, split_units, output_warps, groups)
                if ring(arch, work, shape, WIDE_COLUMN_TILES):
                    yield shape


def tiling_cost(arch: CudaArch, work: WideWork, g: WideGeometry) -> float:
    """Cycles that the busiest multiprocessor takes, by and large."""
    format = FORMATS[work.format]
    blocks = g.blocks(work)
    rounds = math.ceil(blocks / arch.multiprocessors)
    warps = math.ceil(g.warps / SCHEDULERS)
    pieces = math.ceil(g.split_units / g.groups) * format.unit_pieces
    idle = 1 + IDLE_SHARE * max(0, ENOUGH_WARPS - warps)
    computing = warps * pieces * PIECE_CYCLES[work.x_class] * idle
    weights = g.split_units * min(g.block_tiles, work.tiles) * format.unit_bytes
    piece = WIDE_COLUMN_TILES * PIECE_BYTES[work.x_class]
    columns = g.split_units * format.unit_pieces * piece
    copying = max(weights / MEMORY_BYTES, (weights + columns) / L2_BYTES)
    both = max(computing, copying) + EXPOSED_SHARE * min(computing, copying)
    meeting = MEETING_CYCLES * (g.groups > 1)
    planes = 2 * g.splits * 4 * WIDE_ROWS * TILE_OUTPUTS * work.tiles  # written, then read
    return rounds * (both + BLOCK_CYCLES + meeting) + planes / arch.multiprocessors / L2_BYTES


@cache
def geometry(arch: CudaArch, work: WideWork) -> WideGeometry:
    """The cheapest way to spread `work`.

    Raises: OpError where none fits.
    """
    found = list(candidates(arch, work))
    if not found:
        raise OpError(f"no wide kernel for {work} on {arch.name}: shared memory is too small")
    return min(found, key=lambda g: (tiling_cost(arch, work, g), g.splits, g.groups, g.warps))


def wide_launches(
    arch: CudaArch,
    x_type: TensorType,
    weight_types: Sequence[TensorType],
    out_types: Sequence[TensorType],
    *,
    act: str | None = None,
) -> tuple[Launch, ...]:
    """Launches of `linear`, `linear_group` and, with `act`, of `gated_linear` for many rows.

    Arguments of each launch and their order as those of `cuda_linear.linear_launches`.

    Raises: OpError for more rows than a launch takes, for f32 rows, or weights of other inputs.
    """
    weights = tuple(weight_types)
    _check(x_type, weights)
    if act is not None:
        gated, up = Product(arch, x_type, weights, 1, act), Product(arch, x_type, weights, 1)
        if gated.meet and weights[0].max_shape == weights[1].max_shape:
            return (_launch(gated, (0, 1)),)
        return _single(up, 1), _single(gated, 0)
    product = Product(arch, x_type, weights, len(weights))
    formats: dict[str, list[int]] = {}
    plain: list[int] = []
    for i, w in enumerate(weights):
        (formats.setdefault(w.dtype, []) if product.tiles(i) else plain).append(i)
    # outputs of layout `planes1` are read by an op that adds no planes
    adds = all(out.layout != "planes1" for out in out_types)
    may_split = adds and len(formats) + len(plain) == 1
    tiled = (_launch(product, tuple(mine), may_split=may_split) for mine in formats.values())
    return *tiled, *(plain_launch(product, i) for i in plain)


def wide_planes(
    arch: CudaArch, x_type: TensorType, weight_types: Sequence[TensorType], act: str | None = None
) -> int:
    """Planes that each output of `wide_launches` has; the reader adds them in order."""
    params = [launch.params for launch in wide_launches(arch, x_type, weight_types, (), act=act)]
    return max((p.geometry.splits for p in params if isinstance(p, WideParams)), default=1)


def _check(x: TensorType, weights: tuple[TensorType, ...]) -> None:
    rows, inputs = x.max_shape[0], x.max_shape[-1]
    if not 0 < rows <= WIDE_ROWS:
        raise OpError(f"wide products take up to {WIDE_ROWS} rows, got {rows}")
    if x.dtype not in PIECE_BYTES:
        kinds = " or ".join(PIECE_BYTES)
        raise OpError(
            f"wide products take rows of {kinds}, got {x}; f32 rows are TVM's to schedule"
        )
    for w in weights:
        if w.max_shape[-1] != inputs:
            raise OpError(f"weights {w} do not fit activations {x}")


def _single(p: Product, index: int) -> Launch:
    return _launch(p, (index,)) if p.tiles(index) else plain_launch(p, index)


def _launch(p: Product, indices: tuple[int, ...], *, may_split: bool = False) -> Launch:
    """One launch over the matrices `indices`, all of one format."""
    name = p.weights[indices[0]].dtype
    matrices = tuple(Matrix(i, min(i, p.outs - 1), p.weights[i].max_shape[0]) for i in indices)
    tiles = sum(m.outputs for m in matrices) // TILE_OUTPUTS
    work = WideWork(name, p.x.max_shape[-1], tiles, may_split, p.x.dtype)
    params = WideParams(
        format=FORMATS[name].struct,
        header=FORMATS[name].header,
        work=work,
        column_tiles=p.column_tiles,
        matrices=matrices,
        weights=len(p.weights),
        outs=p.outs,
        act=p.act,
        gated=bool(p.act) and len(indices) == 2,
        reads_out=bool(p.act) and len(indices) == 1,
        geometry=geometry(p.arch, work),
        stage_units=0,
        stages=0,
        start_bytes=START_BYTES[work.x_class],
        shared_bytes=0,
        bulk_copy=p.arch.bulk_copy,
        dependent_launch=p.arch.dependent_launch,
    )
    return launch_of(p.arch, params)


def launch_of(arch: CudaArch, params: WideParams) -> Launch:
    """The launch of a product whose geometry is given; its ring is fitted here.

    Raises: OpError where none fits.
    """
    g = params.geometry
    fitted = ring(arch, params.work, g, params.column_tiles)
    if fitted is None:
        raise OpError(f"no ring fits {g} on {arch.name}")
    params = replace(
        params,
        stage_units=fitted.stage_units,
        stages=fitted.stages,
        shared_bytes=fitted.shared_bytes,
    )
    grid = (g.blocks(params.work), 1, 1)
    return Launch("linear/wide.cu.j2", params, grid, 32 * g.warps, fitted.shared_bytes)

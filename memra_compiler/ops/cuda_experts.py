"""CUDA launches of a mixture of experts: the choice, and the products of the chosen only.

Weights of experts lie as those of any matrix (`cuda_linear`): in tiles of 16 outputs, an expert's
one after the other, or as stored. A block of a tiled product plans from the table of choices, on
the device, which experts it streams (templates/lib/expert_plan.cuh): one grid serves every routing.

The down products leave one plane a slot, `[active][whole tiles of rows][N]`, already multiplied by
the shares: whoever reads them adds the planes in order, as those of any product that is split. An
output of another layout is added up by a launch of its own, from planes in scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from memra_compiler.ir.types import PIECE_INPUTS, TensorType
from memra_compiler.ops.base import Op
from memra_compiler.ops.cuda import TILE_ROWS, CudaArch, Launch
from memra_compiler.ops.cuda_linear import (
    FIXED_REGISTERS,
    FORMATS,
    REGISTERS,
    STAGE_BYTES,
    TILE_OUTPUTS,
    UNROLLED_REGISTERS,
    reads_tiles,
)
from memra_compiler.ops.cuda_params import (
    VECTOR,
    WARP,
    bound,
    c_type,
    ceil_div,
    columns,
    launch,
    whole_tiles,
)
from memra_compiler.ops.experts import ExpertsDown, ExpertsGated
from memra_compiler.ops.top_experts import TopExperts

#: Tiles of eight pairs of (row, slot) that share a pass over an expert's weights: those of a round.
MOST_COLUMN_TILES = 2
#: Registers of a thread for the columns beyond the first eight.
FAR_REGISTERS = 12
#: Rows of the largest batch of a prompt: a plan has room for them, whatever the rows of a launch.
PLAN_ROWS = 64
#: Warps of a block, at most and as many as hide latency.
MOST_WARPS = 24
ENOUGH_WARPS = 12
MOST_STAGES = 8
#: Bytes on their way to a multiprocessor that keep the memory busy, and of an item, so that single
#: rows spread evenly.
RING_BYTES = 112 << 10
ITEM_BYTES = 56 << 10
PLAIN_WARPS = 4
SUM_THREADS = 256
MOST_THREADS = 1024


@dataclass(frozen=True)
class ExpertsWork:
    """What a geometry is chosen for: matrices of K `inputs`, `tiles` of outputs an expert.

    `parts`: 2 where gate and up meet. `pairs` a plan has room for: the same for all batches of up
    to `PLAN_ROWS` rows, since how K is cut decides bits.
    """

    format: str
    x_class: str
    inputs: int
    tiles: int
    parts: int
    pairs: int

    @property
    def units(self) -> int:
        return self.inputs // FORMATS[self.format].unit_inputs


@dataclass(frozen=True)
class ExpertsGeometry:
    """How an item is spread over a block: `tiles` tiles a part, each over `warps` slices of K."""

    tiles: int
    warps: int
    slice_units: int
    stage_units: int = 1
    stages: int = 2

    def all_warps(self, work: ExpertsWork) -> int:
        return self.tiles * self.warps * work.parts

    def shared_bytes(self, work: ExpertsWork) -> int:
        """Dynamic shared memory: rings, partial sums, tokens, barriers, the plan."""
        format, warps = FORMATS[work.format], self.all_warps(work)
        token_bytes = 128 if work.x_class == "a8" else 0
        tokens = self.slice_units * format.unit_pieces * token_bytes
        ring = self.stages * (self.stage_units * format.unit_bytes + 8)
        own = warps * (ring + 2 * 512 + tokens)
        return ceil_div(own, 16) * 16 + _plan_bytes(work.pairs)


def _plan_bytes(pairs: int) -> int:
    """Bytes of an `ExpertPlan`, whole vectors."""
    return ceil_div(16 * ceil_div(pairs, 4) + 4 * (2 * pairs + 2), 16) * 16


def _registers(work: ExpertsWork, slice_units: int) -> int:
    """Registers that a thread needs at most, by experience (tests/codegen/test_cuda_experts.py)."""
    pieces = FORMATS[work.format].unit_pieces
    values = slice_units * pieces * (4 if work.x_class == "a8" else 8)
    return values + FIXED_REGISTERS + FAR_REGISTERS + UNROLLED_REGISTERS * (pieces > 1)


def _register_limit(warps: int) -> int:
    """Registers that a thread of a block of so many warps can have: four schedulers share them."""
    return min(255, REGISTERS // (WARP * ceil_div(warps, 4) * 4) // 8 * 8)


def _with_ring(arch: CudaArch, work: ExpertsWork, shape: ExpertsGeometry) -> ExpertsGeometry | None:
    """`shape` with the stages that fit, or None if not even two do."""
    unit_bytes = FORMATS[work.format].unit_bytes
    chunks = max(1, round(shape.slice_units * unit_bytes / STAGE_BYTES))
    wanted = ceil_div(shape.slice_units, min(chunks, shape.slice_units))
    for stage_units in sorted({wanted, ceil_div(wanted, 2), 1}, reverse=True):
        stage_bytes = shape.all_warps(work) * stage_units * unit_bytes
        most = min(MOST_STAGES, max(2, ceil_div(RING_BYTES, stage_bytes)))
        for stages in range(most, 1, -1):
            found = ExpertsGeometry(
                shape.tiles, shape.warps, shape.slice_units, stage_units, stages
            )
            if found.shared_bytes(work) <= arch.shared_bytes - 1024:
                return found
    return None


def candidates(arch: CudaArch, work: ExpertsWork) -> Iterator[ExpertsGeometry]:
    """Ways to spread `work` that fit; a slice's activations stay in registers."""
    for tiles in (n for n in range(1, MOST_WARPS + 1) if work.tiles % n == 0):
        for warps in range(1, MOST_WARPS // (tiles * work.parts) + 1):
            slice_units = ceil_div(work.units, warps)
            if ceil_div(work.units, slice_units) != warps:
                continue  # some warps would have nothing to do
            shape = ExpertsGeometry(tiles, warps, slice_units)
            if _registers(work, slice_units) > _register_limit(shape.all_warps(work)):
                continue
            if found := _with_ring(arch, work, shape):
                yield found


def tiling_cost(work: ExpertsWork, g: ExpertsGeometry) -> float:
    """How much worse than streaming at full speed, by and large; an estimate to rank by."""
    unit_bytes = FORMATS[work.format].unit_bytes
    warps = g.all_warps(work)
    ragged = g.warps * g.slice_units / work.units - 1
    thin = max(0, ENOUGH_WARPS - warps) / ENOUGH_WARPS
    crowd = max(0, warps - ENOUGH_WARPS) / ENOUGH_WARPS
    short = max(0.0, 1 - g.stage_units * unit_bytes / STAGE_BYTES)
    item = g.tiles * work.parts * work.units * unit_bytes
    coarse = max(0.0, item / ITEM_BYTES - 1)
    fine = ENOUGH_WARPS * 100 / item  # a barrier an item
    return ragged + thin + 0.1 * crowd + 0.3 * short + 0.2 * coarse + fine


@cache
def geometry(arch: CudaArch, work: ExpertsWork) -> ExpertsGeometry | None:
    """The cheapest way to spread `work`; None where a slice of K is more than registers hold."""
    found = list(candidates(arch, work))
    return min(found, key=lambda g: (tiling_cost(work, g), g.warps), default=None)


@dataclass(frozen=True)
class Stored:
    """Where an expert's outputs begin in a matrix as stored, for experts/plain.cu.j2."""

    format: str
    index: int
    rows: int
    first: int
    row_bytes: int


@dataclass(frozen=True)
class ExpertsParams:
    """Variables of experts/experts.cu.j2."""

    format: str
    header: str
    work: ExpertsWork
    row_inputs: int
    outputs: int
    experts: int
    active: int
    plane_rows: int
    column_tiles: int
    expert_tiles: int
    up_tile: int
    weights: int
    scratch: bool
    act: str
    geometry: ExpertsGeometry
    shared_bytes: int
    bulk_copy: bool
    dependent_launch: bool


@dataclass(frozen=True)
class PlainExpertsParams:
    """Variables of experts/plain.cu.j2."""

    headers: tuple[str, ...]
    x_class: str
    inputs: int
    row_inputs: int
    outputs: int
    experts: int
    active: int
    plane_rows: int
    matrices: tuple[Stored, ...]
    weights: int
    scratch: bool
    act: str
    warps: int
    dependent_launch: bool


@dataclass(frozen=True)
class SumPlanesParams:
    """Variables of experts/sum_planes.cu.j2."""

    size: int
    threads: int
    active: int
    plane_rows: int


@dataclass(frozen=True)
class TopExpertsParams:
    """Variables of experts/top_experts.cu.j2."""

    experts: int
    active: int
    threads: int
    splits: int
    plane_rows: int
    scale_type: str


@dataclass(frozen=True)
class _Product:
    """The products of a launch: of rows `x` with `weights`, `outputs` an expert and pair."""

    arch: CudaArch
    experts: int
    x: TensorType
    ids: TensorType
    weights: tuple[TensorType, ...]
    outputs: int
    act: str = ""
    scratch: bool = False

    @property
    def work(self) -> ExpertsWork:
        w, parts = self.weights[0], 2 if self.act else 1
        tiles = self.outputs // TILE_OUTPUTS
        room = ceil_div(bound(self.ids), PLAN_ROWS) * PLAN_ROWS * self.active
        return ExpertsWork(w.dtype, self.x.dtype, w.max_shape[1], tiles, parts, room)

    @property
    def active(self) -> int:
        return self.ids.max_shape[1]

    @property
    def pairs(self) -> int:
        return bound(self.ids) * self.active

    @property
    def tiles(self) -> bool:
        """Whether the weights have a tensor-core kernel for these rows, and so lie in tiles."""
        same = len({w.dtype for w in self.weights}) == 1
        tile = same and all(reads_tiles(self.arch, self.x, w) for w in self.weights)
        whole = self.outputs % TILE_OUTPUTS == 0 and columns(self.x) % PIECE_INPUTS == 0
        return tile and whole and geometry(self.arch, self.work) is not None


def _gated(
    op: ExpertsGated, arch: CudaArch, x: TensorType, ids: TensorType, *weights: TensorType
) -> _Product:
    return _Product(arch, op.experts, x, ids, weights, op.width(weights), op.act)


def _down(
    op: ExpertsDown, arch: CudaArch, h: TensorType, ids: TensorType, w: TensorType,
    scratch: bool = False,
) -> _Product:  # fmt: skip
    return _Product(arch, op.experts, h, ids, (w,), w.max_shape[0] // op.experts, "", scratch)


def _product(op: Op, arch: CudaArch, *types: TensorType) -> _Product:
    """The products of an `experts_gated` or `experts_down` of these operands."""
    if isinstance(op, ExpertsGated):
        return _gated(op, arch, *types)
    assert isinstance(op, ExpertsDown)
    h, ids, _, w = types
    return _down(op, arch, h, ids, w)


def experts_read_tiles(op: Op, arch: CudaArch, *types: TensorType) -> bool:
    """Whether the op, of these operands, reads its weights in tiles."""
    return _product(op, arch, *types).tiles


def experts_sum_order(op: Op, arch: CudaArch, *types: TensorType) -> tuple[int | str, ...]:
    """How the op cuts K, as `cuda_linear.sum_order`: (1, warps, units of a slice), or a file."""
    product = _product(op, arch, *types)
    shape = geometry(arch, product.work) if product.tiles else None
    return (1, shape.warps, shape.slice_units) if shape else ("experts/plain.cu.j2",)


def experts_gated_launches(
    op: ExpertsGated, arch: CudaArch, *types: TensorType
) -> tuple[Launch, ...]:
    """act(gate x) * (up x) for the experts of each row, as float rows."""
    *operands, _ = types
    return (_launch(_gated(op, arch, *operands)),)


def experts_down_launches(
    op: ExpertsDown, arch: CudaArch, *types: TensorType
) -> tuple[Launch, ...]:
    """The shares of each row's experts, a plane a slot; a sum of them unless its reader adds."""
    h, ids, _, w, out = types
    product = _down(op, arch, h, ids, w, scratch=not _leaves_planes(ids, out))
    if not product.scratch:
        return (_launch(product),)
    size, rows = columns(out), bound(out)
    params = SumPlanesParams(size, SUM_THREADS, product.active, whole_tiles(rows))
    grid = (ceil_div(size, VECTOR * SUM_THREADS), rows, 1)
    return _launch(product), launch(arch, "experts/sum_planes.cu.j2", params, grid, SUM_THREADS)


def _leaves_planes(ids: TensorType, out: TensorType) -> bool:
    """Whether the output of a down product has the planes of the slots, for its reader to add."""
    return out.planes == ids.max_shape[1] and out.layout != "row"


def experts_down_scratch(ids: TensorType, out: TensorType) -> int:
    """Bytes of the planes that `experts_down_launches` keeps in scratch."""
    if _leaves_planes(ids, out):
        return 0
    return 4 * ids.max_shape[1] * whole_tiles(bound(out)) * columns(out)


def _launch(p: _Product) -> Launch:
    return _tiled(p) if p.weights[0].layout != "plain" and p.tiles else _plain(p)


def _tiled(p: _Product) -> Launch:
    shape, w = geometry(p.arch, p.work), p.weights[0]
    assert shape is not None
    expert_tiles = w.max_shape[0] // p.experts // TILE_OUTPUTS
    params = ExpertsParams(
        format=FORMATS[w.dtype].struct,
        header=FORMATS[w.dtype].header,
        work=p.work,
        row_inputs=columns(p.x),
        outputs=p.outputs,
        experts=p.experts,
        active=p.active,
        plane_rows=whole_tiles(bound(p.x)),
        column_tiles=min(MOST_COLUMN_TILES, ceil_div(bound(p.ids), TILE_ROWS)),
        expert_tiles=expert_tiles,
        up_tile=expert_tiles - p.outputs // TILE_OUTPUTS,
        weights=len(p.weights),
        scratch=p.scratch,
        act=p.act,
        geometry=shape,
        shared_bytes=0,
        bulk_copy=p.arch.bulk_copy,
        dependent_launch=p.arch.dependent_launch,
    )
    return launch_of(p.arch, params)


def launch_of(arch: CudaArch, params: ExpertsParams) -> Launch:
    """The launch of a tiled product whose geometry is given: one block a multiprocessor."""
    g = params.geometry
    shared = g.shared_bytes(params.work)
    params = replace(params, shared_bytes=shared)
    block = WARP * g.all_warps(params.work)
    grid = ("sms", 1, 1)
    return Launch("experts/experts.cu.j2", params, grid, block, shared, arch.dependent_launch)


def _plain(p: _Product) -> Launch:
    params = PlainExpertsParams(
        headers=tuple(sorted({FORMATS[w.dtype].header for w in p.weights})),
        x_class=p.x.dtype,
        inputs=p.weights[0].max_shape[1],
        row_inputs=columns(p.x),
        outputs=p.outputs,
        experts=p.experts,
        active=p.active,
        plane_rows=whole_tiles(bound(p.x)),
        matrices=tuple(_stored(p)),
        weights=len(p.weights),
        scratch=p.scratch,
        act=p.act,
        warps=PLAIN_WARPS,
        dependent_launch=p.arch.dependent_launch,
    )
    grid = (ceil_div(p.outputs, PLAIN_WARPS), p.pairs, 1)
    return launch(p.arch, "experts/plain.cu.j2", params, grid, WARP * PLAIN_WARPS)


def _stored(p: _Product) -> Iterator[Stored]:
    """The matrices that a pair meets: gate and up, or down."""
    indices: Sequence[int] = (0, len(p.weights) - 1) if p.act else (0,)
    for part, index in enumerate(indices):
        w = p.weights[index]
        rows = w.max_shape[0] // p.experts
        yield Stored(FORMATS[w.dtype].struct, index, rows, part * (rows - p.outputs), w.row_bytes)


def top_experts_launches(
    op: TopExperts, arch: CudaArch, *types: TensorType, splits: int = 1
) -> tuple[Launch, ...]:
    """The experts of each row and their shares: one block a row."""
    logits, scale, *_ = types
    experts = columns(logits)
    threads = min(MOST_THREADS, ceil_div(experts, WARP) * WARP)
    params = TopExpertsParams(
        experts, op.active, threads, splits, whole_tiles(bound(logits)), c_type(op, scale)
    )
    shared = 16 * ceil_div(experts, 4) + 8 * op.active
    grid = (bound(logits), 1, 1)
    return (launch(arch, "experts/top_experts.cu.j2", params, grid, threads, shared),)

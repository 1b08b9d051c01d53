"""CUDA kernels of matrix products with few rows: which template, which geometry, which layout.

Weights are repacked once, at load, into tiles of 16 outputs in the order in which tensor-core lanes
read them (templates/lib/dequant_*.cuh); matrices that do not tile stay as the file stores them and
take a plain kernel. Activations come as int8 ("a8", templates/lib/a8.cuh), as bf16 fragments
("bf16", templates/lib/bf16.cuh) or as rows of floats ("f32", plain kernel only).

Outputs are float planes `[splits][rows of a tile][N]`: whoever reads them adds the planes in order.
Only rows below `rows` are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from memra_compiler.ir.errors import OpError
from memra_compiler.ir.types import PIECE_INPUTS, TensorType
from memra_compiler.ops.cuda import TILE_ROWS, CudaArch, Launch
from memra_schedules import records

TILE_OUTPUTS = 16


@dataclass(frozen=True)
class Format:
    """What the geometry of a kernel needs to know of a weight format."""

    struct: str
    header: str
    unit_pieces: int
    unit_bytes: int
    classes: tuple[str, ...]

    @property
    def unit_inputs(self) -> int:
        return PIECE_INPUTS * self.unit_pieces


FORMATS = {
    "q4_0": Format("Q4_0", "dequant_q4_0.cuh", 1, 576, ("a8", "bf16")),
    "q8_0": Format("Q8_0", "dequant_q8_0.cuh", 1, 1088, ("a8", "bf16")),
    "q6_k": Format("Q6_K", "dequant_q6_k.cuh", 4, 3360, ("a8", "bf16")),
    "q4_k": Format("Q4_K", "dequant_k.cuh", 4, 2304, ("a8", "bf16")),
    "q5_k": Format("Q5_K", "dequant_k.cuh", 4, 2816, ("a8", "bf16")),
    "bf16": Format("BF16", "dequant_float.cuh", 1, 2048, ("bf16",)),
    "f16": Format("F16", "dequant_float.cuh", 1, 2048, ("bf16",)),
    "f32": Format("F32", "dequant_float.cuh", 1, 4096, ()),
}

#: Registers of a thread beside its activations (a unit of several pieces is unrolled further),
#: and those of a multiprocessor.
FIXED_REGISTERS = 52
UNROLLED_REGISTERS = 20
REGISTERS = 65536
#: Bytes a stage of the ring should hold. Measured on an H200: 4 KiB copies stream a chain of layers
#: at 85% of the bandwidth, 2 KiB ones at 75%.
STAGE_BYTES = 4096
#: What one round of a block costs beside its bytes, as bytes at full speed: the barrier, and the
#: partial sum of each warp.
ROUND_BYTES = 1000
SUM_BYTES = 50
#: Warps of a multiprocessor below which latency starts to show.
ENOUGH_WARPS = 12
MAX_SPLITS = 8
PLAIN_WARPS = 4
#: Vectors of weights that a thread of the plain kernel holds at most, before its rows are there.
PLAIN_STEPS = 8
EMBED_THREADS = 128
#: Registers for the activations of a warp's slice: usually at most, and at the very most.
USUAL_VALUES = 56
LARGEST_VALUES = 112
#: Tiles of at most so many bytes are streamed by several small blocks a multiprocessor.
SMALL_TILE_BYTES = 32 << 10


@dataclass(frozen=True)
class Geometry:
    """How one matrix product is spread over the chip.

    `splits` parts of K go to different blocks; in a block, `warps` warps own `slice_units` units of
    K each, read `stage_units` at a time through a ring of `stages`. `blocks` share a
    multiprocessor; registers are limited so that `resident_blocks` fit, which leaves room for the
    next kernel of the stream to fill its rings. Where registers cannot hold a slice of the
    activations, it is not `held` but read again with every tile: slower, but the same sums.
    """

    splits: int
    warps: int
    slice_units: int
    stage_units: int
    stages: int
    blocks: int = 1
    resident_blocks: int = 1
    held: bool = True

    def shared_bytes(self, work: Work) -> int:
        """Dynamic shared memory: rings, partial sums of two tiles, a gate, tokens, barriers."""
        format = FORMATS[work.format]
        ring = self.warps * self.stages * (self.stage_units * format.unit_bytes + 8)
        sums = work.column_tiles * 512 * (2 * self.warps + work.parts - 1)
        token_bytes = 128 if work.x_class == "a8" else 0
        tokens = self.slice_units * format.unit_pieces * work.column_tiles * token_bytes
        return ring + sums + self.warps * tokens


@dataclass(frozen=True)
class Work:
    """What a geometry is chosen for: `items` tiles (or pairs) of K `inputs`."""

    format: str
    x_class: str
    inputs: int
    items: int
    parts: int = 1
    column_tiles: int = 1
    may_split: bool = True


def _value_registers(work: Work, slice_units: int, held: bool) -> int:
    """Registers that hold a slice of the activations, or a piece of them."""
    piece = 4 if work.x_class == "a8" else 8
    pieces = slice_units * FORMATS[work.format].unit_pieces if held else 1
    return piece * work.column_tiles * pieces


def _registers(work: Work, g: Geometry) -> int:
    """Registers that a thread needs at most, by experience (tests/codegen/test_cuda_linear.py)."""
    pieces = FORMATS[work.format].unit_pieces
    held = _value_registers(work, g.slice_units, g.held) + 4 * (work.column_tiles - 1)
    return held + FIXED_REGISTERS + UNROLLED_REGISTERS * (pieces > 1)


def _ring(arch: CudaArch, work: Work, shape: Geometry) -> Geometry | None:
    """`shape` with the stages that fit, or None if not even two do."""
    format = FORMATS[work.format]
    # Memory is left for the next kernel to fill its rings, where it may start early; its registers
    # fit beside ours without a limit on either.
    share = 2 if arch.dependent_launch and arch.shared_bytes > (128 << 10) else 1
    chunks = max(1, round(shape.slice_units * format.unit_bytes / STAGE_BYTES))
    wanted = math.ceil(shape.slice_units / min(chunks, shape.slice_units))
    # shorter stages only where memory leaves no choice
    for stage_units, blocks in (
        (wanted, share * shape.blocks),
        (wanted, shape.blocks),
        (1, shape.blocks),
    ):
        room = arch.shared_bytes // blocks - 1024
        for stages in (8, 7, 6, 5, 4, 3, 2):
            ring = replace(
                shape, stage_units=stage_units, stages=stages, resident_blocks=shape.blocks
            )
            registers = min(255, REGISTERS // (shape.blocks * 32 * shape.warps) // 8 * 8)
            fits = ring.shared_bytes(work) <= room
            if fits and _registers(work, shape) <= registers:
                return ring
    return None


def candidates(
    arch: CudaArch, work: Work, largest: int = LARGEST_VALUES, *, held: bool = True
) -> Iterator[Geometry]:
    """Ways to spread `work` that fit; activations take at most `largest` registers of a thread."""
    format = FORMATS[work.format]
    units = work.inputs // format.unit_inputs
    small = units * format.unit_bytes <= SMALL_TILE_BYTES
    for splits in range(1, min(MAX_SPLITS, arch.multiprocessors) + 1 if work.may_split else 2):
        for warps in range(1, 17):
            slice_units = math.ceil(units / (splits * warps))
            if math.ceil(units / slice_units) != splits * warps:
                continue  # some warps would have nothing to do
            if _value_registers(work, slice_units, held) > largest:
                continue
            for blocks in (1, 2, 4) if small else (1,):
                shape = Geometry(splits, warps, slice_units, 1, 2, blocks, held=held)
                if warps * blocks <= 16 and (ring := _ring(arch, work, shape)):
                    yield ring


def tiling_cost(arch: CudaArch, work: Work, g: Geometry) -> float:
    """Bytes that the busiest multiprocessor has to wait for, by and large."""
    format = FORMATS[work.format]
    share = arch.multiprocessors * g.blocks // g.splits
    rounds = math.ceil(work.items / share)
    tile = g.warps * g.slice_units * format.unit_bytes
    used = min(g.blocks, math.ceil(work.items * g.splits / arch.multiprocessors))
    bytes_ = rounds * work.parts * (used * tile + ROUND_BYTES + SUM_BYTES * g.warps)
    planes = 2 * g.splits * 4 * TILE_ROWS * TILE_OUTPUTS * work.items / arch.multiprocessors
    units = work.inputs // format.unit_inputs
    ragged = units != g.splits * g.warps * g.slice_units
    thin = max(0, ENOUGH_WARPS - used * g.warps) / ENOUGH_WARPS
    alone = 2 * (g.shared_bytes(work) + 1024) * g.blocks > arch.shared_bytes
    return (bytes_ + planes) * (1 + 0.1 * thin + 0.05 * alone + 0.03 * ragged)


@cache
def _tuned(arch: CudaArch) -> dict[Work, Geometry]:
    """What a tuner found best on this architecture.

    A geometry without splits was best also among those without: it holds whether or not the
    product may split.
    """
    found = {Work(**r["work"]): Geometry(**r["geometry"]) for r in records(arch.name)}
    whole = {replace(w, may_split=False): g for w, g in found.items() if g.splits == 1}
    return whole | found


@cache
def geometry(arch: CudaArch, work: Work) -> Geometry:
    """What was tuned for `work`, else the cheapest way to spread it.

    Tiles come in whole numbers, so the busiest block decides: its rounds times the bytes of its
    share of K, plus a fixed cost a round, plus the planes that splits leave, plus a little for
    fewer warps than hide latency and for leaving no room to the next kernel.

    Raises: OpError where none fits.
    """
    if work in _tuned(arch):
        return _tuned(arch)[work]
    found = list(candidates(arch, work, USUAL_VALUES))
    found = found or list(candidates(arch, work, LARGEST_VALUES))
    if work.x_class == "bf16":
        found = found or list(candidates(arch, work, held=False))
    if not found:
        raise OpError(f"no kernel geometry for {work} on {arch.name}")
    return min(found, key=lambda g: (tiling_cost(arch, work, g), g.splits, -g.warps, g.blocks))


@dataclass(frozen=True)
class Matrix:
    """A weight operand that a launch reads: its index, where its sums go, and how many rows."""

    index: int
    out: int
    outputs: int


@dataclass(frozen=True)
class LinearParams:
    """Variables of linear/linear.cu.j2."""

    format: str
    header: str
    work: Work
    matrices: tuple[Matrix, ...]
    weights: int
    outs: int
    act: str
    reads_out: bool
    geometry: Geometry
    shared_bytes: int
    bulk_copy: bool
    dependent_launch: bool


@dataclass(frozen=True)
class PlainParams:
    """Variables of linear/plain.cu.j2."""

    format: str
    header: str
    x_class: str
    inputs: int
    outputs: int
    row_bytes: int
    matrix: int
    out: int
    weights: int
    outs: int
    plane_rows: int
    warps: int
    shared: bool
    act: str
    dependent_launch: bool


@dataclass(frozen=True)
class RepackParams:
    """Variables of repack/tiles.cu.j2."""

    format: str
    header: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class EmbedParams:
    """Variables of linear/embed.cu.j2."""

    format: str
    header: str
    tiled: bool
    inputs: int
    outputs: int
    row_bytes: int
    scale: float
    threads: int
    dependent_launch: bool


def weight_layout(arch: CudaArch, type: TensorType) -> str:
    """The layout that kernels of `arch` want a weight in: `tiles16` or `plain` (as stored)."""
    outputs, inputs = type.max_shape
    format = FORMATS[type.dtype]
    tiles = outputs % TILE_OUTPUTS == 0 and inputs % format.unit_inputs == 0
    return "tiles16" if tiles and format.classes else "plain"


def reads_tiles(arch: CudaArch, x: TensorType, w: TensorType) -> bool:
    """Whether products of `x` read `w` in tiles; all others read it as stored."""
    return weight_layout(arch, w) == "tiles16" and _x_class(x) in FORMATS[w.dtype].classes


def repack_launches(arch: CudaArch, type: TensorType) -> tuple[Launch, int]:
    """The launch `(rows unused, stored, repacked)` that runs once at load, and the bytes it writes.

    Raises: OpError where the layout is plain: nothing is to be repacked.
    """
    if weight_layout(arch, type) == "plain":
        raise OpError(f"weights {type} stay as stored")
    outputs, inputs = type.max_shape
    format = FORMATS[type.dtype]
    units = outputs // TILE_OUTPUTS * (inputs // format.unit_inputs)
    params = RepackParams(format.struct, format.header, inputs, outputs)
    launch = Launch("repack/tiles.cu.j2", params, (math.ceil(units / 4), 1, 1), 128, early=False)
    return launch, units * format.unit_bytes


def _x_class(x: TensorType) -> str:
    if x.dtype not in ("a8", "bf16", "f32"):
        raise OpError(f"activations must be a8, bf16 or f32, got {x}")
    return x.dtype


@dataclass(frozen=True)
class Product:
    """What a launch is called with: x, the weights, and how many outputs."""

    arch: CudaArch
    x: TensorType
    weights: tuple[TensorType, ...]
    outs: int
    act: str = ""

    @property
    def column_tiles(self) -> int:
        return math.ceil(self.x.max_shape[0] / TILE_ROWS)

    def tiles(self, index: int) -> bool:
        """Whether weight `index` has a tensor-core kernel for these activations."""
        w = self.weights[index]
        return w.layout != "plain" and reads_tiles(self.arch, self.x, w)

    @property
    def meet(self) -> bool:
        """Whether a gate and an up projection share a launch."""
        return self.weights[0].dtype == self.weights[1].dtype and self.tiles(0) and self.tiles(1)


def linear_launches(
    arch: CudaArch,
    x_type: TensorType,
    weight_types: Sequence[TensorType],
    out_types: Sequence[TensorType],
    *,
    act: str | None = None,
) -> tuple[Launch, ...]:
    """Launches of `linear`, `linear_group` and, with `act`, of `gated_linear` (gate, up).

    Arguments of each: rows, x, the weights, the outputs. x has all tiles of its type: they
    are read whatever rows is.
    Matrices of one format share a launch. A gate and an up projection of one format meet in a
    block; otherwise the up projection goes first and the gate's launch multiplies it by act(gate).
    """
    weights = tuple(weight_types)
    # outputs of layout `planes1` are read by an op that adds no planes
    may_split = all(out.layout != "planes1" for out in out_types)
    if act is None:
        product = Product(arch, x_type, weights, len(weights))
        return _group(product, range(len(weights)), may_split=may_split)
    gated, up = Product(arch, x_type, weights, 1, act), Product(arch, x_type, weights, 1)
    if gated.meet:
        return (_tiled(gated, (0, 1), parts=2, may_split=False),)
    return _group(up, (1,), may_split=False) + _group(gated, (0,), may_split=False)


def split_planes(
    arch: CudaArch, x_type: TensorType, weight_types: Sequence[TensorType], act: str | None = None
) -> int:
    """Planes that each output of `linear_launches` has; the reader adds them in order."""
    params = [launch.params for launch in linear_launches(arch, x_type, weight_types, (), act=act)]
    return max((p.geometry.splits for p in params if isinstance(p, LinearParams)), default=1)


def sum_order(
    arch: CudaArch,
    x_type: TensorType,
    weight_types: Sequence[TensorType],
    out_types: Sequence[TensorType],
    act: str | None = None,
) -> tuple[tuple[int | str, ...], ...]:
    """How each of `linear_launches` cuts K: (splits, warps, units of a slice), or its template.

    A slice is summed in order, then the slices of a block, then the splits: equal cuts of equal
    matrices give equal bits. The other templates know but one order each.
    """
    cuts: list[tuple[int | str, ...]] = []
    for launch in linear_launches(arch, x_type, weight_types, out_types, act=act):
        if isinstance(launch.params, LinearParams):
            g = launch.params.geometry
            cuts.append((g.splits, g.warps, g.slice_units))
        else:
            cuts.append((launch.template,))
    return tuple(cuts)


def _group(p: Product, indices: Sequence[int], *, may_split: bool = True) -> tuple[Launch, ...]:
    """One launch a format for the matrices that tile, then one for each that does not.

    All outputs have as many planes: with several launches, none splits.
    """
    formats: dict[str, list[int]] = {}
    plain: list[int] = []
    for i in indices:
        (formats.setdefault(p.weights[i].dtype, []) if p.tiles(i) else plain).append(i)
    may_split = may_split and len(formats) + len(plain) == 1
    tiled = [_tiled(p, tuple(mine), may_split=may_split) for mine in formats.values()]
    return *tiled, *(plain_launch(p, i) for i in plain)


def _tiled(
    p: Product,
    indices: tuple[int, ...],
    *,
    may_split: bool,
    parts: int = 1,
) -> Launch:
    name = p.weights[indices[0]].dtype
    matrices = tuple(Matrix(i, min(i, p.outs - 1), p.weights[i].max_shape[0]) for i in indices)
    items = sum(m.outputs for m in matrices) // TILE_OUTPUTS // parts
    inputs = p.x.max_shape[-1]
    work = Work(name, _x_class(p.x), inputs, items, parts, p.column_tiles, may_split)
    shape = geometry(p.arch, work)
    params = LinearParams(
        format=FORMATS[name].struct,
        header=FORMATS[name].header,
        work=work,
        matrices=matrices,
        weights=len(p.weights),
        outs=p.outs,
        act=p.act,
        reads_out=bool(p.act) and parts == 1,
        geometry=shape,
        shared_bytes=0,
        bulk_copy=p.arch.bulk_copy,
        dependent_launch=p.arch.dependent_launch,
    )
    return launch_of(p.arch, params)


def launch_of(arch: CudaArch, params: LinearParams) -> Launch:
    """The launch of a tiled product: as many blocks as there is work for, at most one wave."""
    g = params.geometry
    params = replace(params, shared_bytes=g.shared_bytes(params.work))
    needed = params.work.items * g.splits
    full = arch.multiprocessors * g.blocks
    grid = ("sms", g.blocks, 1) if needed >= full else (needed, 1, 1)
    shared = max(params.shared_bytes, _exclusive_bytes(arch, params.work, g))
    return Launch("linear/linear.cu.j2", params, grid, 32 * g.warps, shared)


def _exclusive_bytes(arch: CudaArch, work: Work, g: Geometry) -> int:
    """Shared memory that keeps more than `g.blocks` blocks off a multiprocessor; 0 if registers do.

    A kernel that starts early finds some multiprocessors free and others busy. Where two blocks
    fit, they double up on the free ones and leave others idle: gate and up of the 31B then took
    49 us instead of 33.
    """
    registers = 32 * g.warps * math.ceil(1.1 * _registers(work, g))
    if not arch.dependent_launch or (g.blocks + 1) * registers > REGISTERS:
        return 0
    return (arch.shared_bytes + 1024) // (g.blocks + 1) - 1024 + 16


def plain_launch(p: Product, index: int) -> Launch:
    """The launch of one matrix as stored, for any number of rows.

    Warps share an output where there would be less than a block a multiprocessor, as for a router.
    """
    w = p.weights[index]
    outputs, inputs = w.max_shape
    plane_rows, threads = TILE_ROWS * p.column_tiles, 32 * PLAIN_WARPS
    few = outputs < PLAIN_WARPS * p.arch.multiprocessors
    shared = few and inputs <= PLAIN_STEPS * 4 * threads
    params = PlainParams(
        format=FORMATS[w.dtype].struct,
        header=FORMATS[w.dtype].header,
        x_class=_x_class(p.x),
        inputs=inputs,
        outputs=outputs,
        row_bytes=w.row_bytes,
        matrix=index,
        out=min(index, p.outs - 1),
        weights=len(p.weights),
        outs=p.outs,
        plane_rows=plane_rows,
        warps=PLAIN_WARPS,
        shared=shared,
        act=p.act,
        dependent_launch=p.arch.dependent_launch,
    )
    grid = (outputs if shared else math.ceil(outputs / PLAIN_WARPS), 1, 1)
    partials = 4 * PLAIN_WARPS * plane_rows if shared else 0
    return Launch("linear/plain.cu.j2", params, grid, threads, partials)


def embed_launches(
    arch: CudaArch, rows: int, table: TensorType, scale: float
) -> tuple[Launch, ...]:
    """The launch `(rows, ids, table, out)` for up to `rows` ids.

    The table lies as `weight_layout` says, unless its type says `plain`.
    """
    outputs, inputs = table.max_shape
    format = FORMATS[table.dtype]
    params = EmbedParams(
        format=format.struct,
        header=format.header,
        tiled=weight_layout(arch, table) == "tiles16" and table.layout != "plain",
        inputs=inputs,
        outputs=outputs,
        row_bytes=table.row_bytes,
        scale=scale,
        threads=EMBED_THREADS,
        dependent_launch=arch.dependent_launch,
    )
    grid = (math.ceil(inputs / (4 * EMBED_THREADS)), rows, 1)
    return (Launch("linear/embed.cu.j2", params, grid, EMBED_THREADS),)

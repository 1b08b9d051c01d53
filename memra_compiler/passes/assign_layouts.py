"""CUDA: decide how weights and values lie in memory. What they are does not change.

Matrices are repacked into tiles that tensor cores read in order; int8 and bf16 activations lie as
fragments of eight rows; a matrix product leaves partial planes that its reader adds in a fixed
order. How a product is cut decides its bits: those of `verify` must be cut as their twins in
`plain_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memra_compiler.ir.errors import OpError
from memra_compiler.ir.graph import Module, Node, Program, Weight
from memra_compiler.ir.types import PIECE_BYTES, TILE_ROWS, TensorType
from memra_compiler.ops.base import Op
from memra_compiler.ops.clusters import ClusterLogits
from memra_compiler.ops.cuda import CudaArch, cuda_arch
from memra_compiler.ops.cuda_experts import experts_read_tiles, experts_sum_order
from memra_compiler.ops.cuda_linear import reads_tiles, sum_order, weight_layout
from memra_compiler.ops.cuda_products import product_planes
from memra_compiler.ops.embed import Embed
from memra_compiler.ops.experts import EXPERTS, ExpertsDown
from memra_compiler.ops.linear import PRODUCTS, GatedLinear
from memra_runtime.errors import fail


def assign_layouts(module: Module) -> Module:
    """State the layout of every matrix, rounded row and matrix product; on the CPU, none.

    Raises: MemraError where a batch to verify would be summed in another order than a single row.
    """
    arch = cuda_arch(module.target)
    if arch is None:
        return module

    def read_by(*ops: type[Op]) -> set[str]:
        return {
            operand[1:]
            for _, node in module.nodes()
            if isinstance(node.op, ops)
            for operand in node.inputs
            if operand.startswith("$")
        }

    products = read_by(*PRODUCTS, *EXPERTS)
    matrices = products | read_by(Embed)
    # rows of a table that meets nothing else are read as well as they lie
    as_stored = (matrices - products) | read_by(ClusterLogits)
    as_stored |= {
        name
        for program, node in module.nodes()
        for name in _read_as_stored(module, program, node, arch)
    }

    def place(name: str, weight: Weight) -> Weight:
        if name not in matrices:
            return weight
        layout = "plain" if name in as_stored else weight_layout(arch, weight.type)
        return replace(weight, type=replace(weight.type, layout=layout))

    placed = replace(module, weights={n: place(n, w) for n, w in module.weights.items()})

    def rewrite(program: Program) -> Program:
        values = dict(program.values)
        for node in program.nodes:
            layout = _product_layout(placed, program, node, arch)
            for name in node.outputs:
                values[name] = _value_type(values[name], layout)
        return replace(program, values=values)

    laid_out = placed.with_programs(rewrite)
    _check_exact(laid_out, arch)
    for program in laid_out.programs.values():
        check_early_reads(program)
    return laid_out


def _read_as_stored(module: Module, program: Program, node: Node, arch: CudaArch) -> Iterator[str]:
    """Matrices that the products of a node read as the file stores them."""
    types = module.operand_types(program, node)
    for operand, type in zip(node.inputs, types, strict=True):
        if not operand.startswith("$"):
            continue
        if isinstance(node.op, EXPERTS):
            tiles = experts_read_tiles(node.op, arch, *types)
        else:
            tiles = not isinstance(node.op, PRODUCTS) or reads_tiles(arch, types[0], type)
        if not tiles:
            yield operand[1:]


def check_early_reads(program: Program) -> None:
    """Refuse an operand that is read early and not known to be written by then: a bug of ours.

    Raises: OpError.
    """
    written: set[str] = set()
    settled: set[str] = set()
    for node in program.nodes:
        if node.op.settles:
            settled = set(written)
        for i, operand in enumerate(node.inputs):
            if node.op.operand(i).name in node.op.reads_early and operand not in settled:
                raise OpError(
                    f"{node.label}: {operand} is read early, and nothing settles it before"
                )
        written |= {f"%{name}" for name in node.outputs}


def _check_exact(module: Module, arch: CudaArch) -> None:
    """Compare each node of `verify` with its twin in `plain_step`, where a module has both."""
    verify, plain = (module.programs.get(name) for name in ("verify", "plain_step"))
    if verify is None or plain is None:
        return
    pairs = [
        (node, _cut(module, verify, node, arch), _cut(module, plain, twin, arch))
        for node, twin in zip(verify.nodes, plain.nodes, strict=True)
    ]
    wrong = [pair for pair in pairs if pair[1] != pair[2]]
    if not wrong:
        return
    node, ours, twin = wrong[0]
    rows = verify.rows.bound
    narrow = (
        f"lower `round.depth.max` to {TILE_ROWS - 1}: a tile of {TILE_ROWS} rows is cut as one row"
    )
    fail(
        "inexact",
        f"speculation could change the text: in `{node.label}`, {module.target} would add up "
        f"{rows} rows in another order than one row",
        node.position or node.label,
        notes=(
            f"verify: {', '.join(map(str, ours))}",
            f"plain step: {', '.join(map(str, twin))}; splits, warps and units of a warp's slice",
            f"{len(wrong)} of {len(pairs)} steps differ",
        ),
        hints=(narrow,) if rows > TILE_ROWS else (),
    )


def _cut(module: Module, program: Program, node: Node, arch: CudaArch) -> tuple[object, ...]:
    """What decides how a node's results lie and, of a product, in which order they are summed."""
    outputs = [program.values[name] for name in node.outputs]
    layouts = tuple(type.layout for type in outputs)
    if isinstance(node.op, EXPERTS):
        return *layouts, *experts_sum_order(node.op, arch, *module.operand_types(program, node))
    if not isinstance(node.op, PRODUCTS):
        return layouts
    x, *weights = module.operand_types(program, node)
    act = node.op.act if isinstance(node.op, GatedLinear) else None
    return *layouts, *sum_order(arch, x, weights, outputs, act)


def _product_layout(module: Module, program: Program, node: Node, arch: CudaArch) -> str:
    """`planesN` for the outputs of a matrix product, else `row`."""
    if isinstance(node.op, ExpertsDown) and _readers_add(program, node):
        _, ids, *_ = module.operand_types(program, node)
        return f"planes{ids.max_shape[1]}"
    if not isinstance(node.op, PRODUCTS):
        return "row"
    if not _readers_add(program, node):
        return "planes1"
    x, *weights = module.operand_types(program, node)
    act = node.op.act if isinstance(node.op, GatedLinear) else None
    return f"planes{product_planes(arch, x, weights, act)}"


def _readers_add(program: Program, node: Node) -> bool:
    """Whether every reader of the node's outputs adds partial planes itself."""
    outputs = {f"%{name}" for name in node.outputs}
    if outputs & {f"%{name}" for name in program.results}:
        return False
    return all(
        reader.op.operand(i).name in reader.op.adds_planes
        for reader in program.nodes
        for i, operand in enumerate(reader.inputs)
        if operand in outputs
    )


def _value_type(type: TensorType, layout: str) -> TensorType:
    if type.dtype in PIECE_BYTES:
        return replace(type, layout="tile8")
    return replace(type, layout=layout)

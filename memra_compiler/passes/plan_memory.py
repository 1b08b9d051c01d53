"""Place every plane, value and scratch buffer in one arena, by fixed offsets.

Planes come first and live for ever. The rest of the arena belongs to the running program: a value
takes a free place when it is made and gives it back after its last reader. An output never shares
bytes with an operand of the same node, so kernels may assume that buffers do not overlap.
"""

from __future__ import annotations

from dataclasses import replace

from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ops.attention import Attention
from memra_compiler.ops.cuda import scratch_bytes
from memra_runtime.errors import fail

#: Alignment of every buffer: a cache line, and a vector of sixteen floats.
ALIGN = 64


def plan_memory(module: Module) -> Module:
    """Fill `arena`: `@plane`, `program/%value`, `program/%` (scratch), and the size under "".

    Raises: MemraError where a step reads a ring that cannot hold all that its rows see.
    """
    for program, node in module.nodes():
        check_ring(module, program, node)
    arena: dict[str, int] = {}
    end = 0
    for name, plane in module.planes.items():
        arena[f"@{name}"] = end
        end += aligned(plane.type.nbytes)
    base = end
    for program in module.programs.values():
        places, size = place_values(module, program)
        arena.update({f"{program.name}/{k}": base + at for k, at in places.items()})
        end = max(end, base + size)
    arena[""] = end
    return replace(module, arena=arena)


def check_ring(module: Module, program: Program, node: Node) -> None:
    """Refuse an attention whose ring is smaller than what its first row sees and the step's rows.

    The step's rows are in the ring by then, and its last ones have overwritten what is older. With
    chunk planes they are not: the ring need only hold the window.
    """
    if not isinstance(node.op, Attention):
        return
    cache, chunked = module.planes[node.inputs[2][1:]], len(node.inputs) > 4
    rows, step = cache.type.max_shape[1], 0 if chunked else program.rows.bound
    if cache.ring and rows < node.op.span + step:
        fail(
            "ring",
            f"`{node.label}` sees {node.op.span} rows of @{cache.name} in steps of {step} rows: "
            f"`{program.name}` would overwrite some of its {rows} rows before they are read",
            node.position or node.label,
            hints=("only a layer with keys of its own reads a chunk of a prompt beside its ring: "
                   "let layers that read another's come last, which a prompt need not run",),
        )  # fmt: skip


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGN) * ALIGN


def last_uses(program: Program) -> dict[str, int]:
    """Index of the node that reads each value last; results are read at the end."""
    last = {}
    for i, node in enumerate(program.nodes):
        for name in node.outputs:
            last[f"%{name}"] = i
        for operand in node.inputs:
            if operand.startswith("%"):
                last[operand] = i
    last.update({f"%{name}": len(program.nodes) for name in program.results})
    return last


def place_values(module: Module, program: Program) -> tuple[dict[str, int], int]:
    """Offsets of a program's values and scratch (`%`), and the bytes they need: first fit."""
    last, size = last_uses(program), 0
    places: dict[str, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, bytes, last reader
    for i, node in enumerate(program.nodes):
        live = [(at, length, until) for at, length, until in live if until >= i]
        for name in node.outputs:
            length = aligned(program.values[name].nbytes)
            at = first_fit([(a, n) for a, n, _ in live], length)
            places[f"%{name}"] = at
            live.append((at, length, last[f"%{name}"]))
            size = max(size, at + length)
    scratch = max((_scratch(module, program, node) for node in program.nodes), default=0)
    places["%"] = size
    return places, size + aligned(scratch)


def _scratch(module: Module, program: Program, node: Node) -> int:
    outputs = tuple(program.values[name] for name in node.outputs)
    return scratch_bytes(module.target, node.op, module.operand_types(program, node), outputs)


def first_fit(taken: list[tuple[int, int]], length: int) -> int:
    """The lowest offset where `length` bytes are free of every (offset, length) taken."""
    at = 0
    for start, size in sorted(taken):
        if at + length <= start:
            break
        at = max(at, start + size)
    return at

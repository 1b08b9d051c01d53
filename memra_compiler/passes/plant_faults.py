"""Red arms: broken copies of programs that every artifact carries, so that checks can be checked.

A check is trusted only if it turns red when the thing it guards is broken. Each fault is another
launch list over the same kernels, so it costs a few hundred bytes and works on any target.

    skip_rollback    keep the rows of rejected drafts
    shift_kv_target  let drafter layers read the cache of the previous layer of the same kind
    wrong_carry_row  start the next chain from another row's hidden
    skip_remap       take the row of a trimmed head for a token id
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ops.head import TokenOfRow
from memra_compiler.ops.settle import Commit, Rollback
from memra_compiler.passes.resolve_kv_targets import cache_owners

FAULTS = ("skip_rollback", "shift_kv_target", "wrong_carry_row", "skip_remap")


def plant_faults(module: Module) -> Module:
    """Add the faulty programs `NAME_fault_FAULT`. One that changes nothing is left out."""
    changes: dict[str, tuple[str, Callable[[Node], Node]]] = {
        "skip_rollback": ("rollback", lambda node: replace(node, op=Rollback(skip=True))),
        "wrong_carry_row": ("commit", lambda node: replace(node, op=Commit(row_shift=1))),
        "shift_kv_target": ("draft", lambda node: _shift(module, node)),
        "skip_remap": ("draft", _skip_remap),
    }
    programs = dict(module.programs)
    for fault in FAULTS:
        name, change = changes[fault]
        program = module.programs[name]
        nodes = tuple(change(node) for node in program.nodes)
        if nodes != program.nodes:
            faulty = fault_program(name, fault)
            programs[faulty] = replace(program, name=faulty, nodes=nodes, fault=fault)
    return replace(module, programs=programs)


def fault_program(name: str, fault: str) -> str:
    """Name of the copy of program `name` that carries `fault`."""
    return f"{name}_fault_{fault}"


def faults_of(module: Module) -> dict[str, Program]:
    """The planted programs by fault."""
    return {p.fault: p for p in module.programs.values() if p.fault}


def _skip_remap(node: Node) -> Node:
    """The node without the map of a trimmed head, if it is that map."""
    return replace(node, op=TokenOfRow(skip=True)) if isinstance(node.op, TokenOfRow) else node


def _shift(module: Module, node: Node) -> Node:
    """The node reading the cache one layer of its kind earlier, if there is such a layer."""
    inputs = []
    for operand in node.inputs:
        plane = module.planes.get(operand[1:]) if operand.startswith("@") else None
        if plane is not None and plane.kind:
            layer, _, part = operand[1:].rpartition(".")
            owners = cache_owners(module, plane.kind)
            at = owners.index(layer)
            layer = owners[at - 1] if at else layer
            operand = f"@{layer}.{part}"
        inputs.append(operand)
    return replace(node, inputs=tuple(inputs))

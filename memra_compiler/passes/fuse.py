"""Merge neighbours into one launch, and drop what nobody reads.

Rewrites, in order, each on values used once:

    y = linear(x, $a); z = linear(x, $b)          ->  y, z = linear_group(x, $a, $b)   (q, k, v)
    gate_mul(linear(x, $g), linear(x, $u))        ->  gated_linear(x, $g, $u)
    rope(rmsnorm(x, $w), angles)                  ->  norm_rope(x, angles, $w)
    kv_append(norm_rope(k, ..), rmsnorm(v), ..)   ->  norm_rope_append(k, v, ..)
    add(x, rmsnorm(y, $w)) [then scale]           ->  rmsnorm_add(x, y, $w[, $s])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ops.activation import Add, GateMul, Scale
from memra_compiler.ops.attention import KvAppend, NormRopeAppend
from memra_compiler.ops.linear import GatedLinear, Linear, LinearGroup
from memra_compiler.ops.norm import RMSNorm, RMSNormAdd
from memra_compiler.ops.rope import NormRope, Rope


@dataclass(frozen=True)
class Uses:
    """Who makes each value of a program, and how often it is read."""

    makers: Mapping[str, Node]
    counts: Mapping[str, int]

    def only(self, operand: str, kind: type) -> Node | None:
        """The node that makes `operand`, if it is of this op and its value is read once."""
        node = self.makers.get(operand)
        if node is None or not isinstance(node.op, kind) or self.counts[operand] != 1:
            return None
        return node


def uses(program: Program) -> Uses:
    makers = {f"%{name}": node for node in program.nodes for name in node.outputs}
    counts = Counter(operand for node in program.nodes for operand in node.inputs)
    counts.update(f"%{name}" for name in program.results)
    return Uses(makers, counts)


#: A rewrite of one node: the node that replaces it, or None when the pattern is not there.
Rewrite = Callable[[Node, Uses], Node | None]


def fuse(module: Module) -> Module:
    """Apply all rewrites to every program and remove dead nodes."""

    def rewrite(program: Program) -> Program:
        program = drop_dead(program)
        program = drop_dead(group_linears(program))
        for step in (gated_linear, norm_rope, norm_rope_append, norm_add, scaled_norm_add):
            program = drop_dead(_apply(program, step))
        return program

    return module.with_programs(rewrite)


def _apply(program: Program, step: Rewrite) -> Program:
    known = uses(program)
    return replace(program, nodes=tuple(step(node, known) or node for node in program.nodes))


def drop_dead(program: Program) -> Program:
    """Remove nodes that write no plane and whose values nobody reads."""
    wanted = {f"%{name}" for name in program.results}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        effect = any(node.op.operand(i).writes for i in range(len(node.inputs)))
        if effect or any(f"%{name}" in wanted for name in node.outputs):
            kept.append(node)
            wanted.update(node.inputs)
    kept.reverse()
    names = {name for node in kept for name in node.outputs}
    values = {name: type for name, type in program.values.items() if name in names}
    return replace(program, nodes=tuple(kept), values=values)


def group_linears(program: Program) -> Program:
    """Make one `linear_group` of the linears of a layer's mixer that read the same rows."""
    known = uses(program)
    gates = {
        operand for node in program.nodes if isinstance(node.op, GateMul) for operand in node.inputs
    }
    groups: dict[tuple[str, str], list[Node]] = {}
    for node in program.nodes:
        plain = isinstance(node.op, Linear) and f"%{node.outputs[0]}" not in gates
        if plain and known.counts[node.inputs[0]] > 1:
            groups.setdefault((node.inputs[0], node.label.rpartition(".")[0]), []).append(node)
    first = {id(members[0]): members for members in groups.values() if len(members) > 1}
    later = {id(node) for members in first.values() for node in members[1:]}
    nodes = []
    for node in program.nodes:
        members = first.get(id(node))
        if members is not None:
            weights = [m.inputs[1] for m in members]
            outputs = tuple(name for m in members for name in m.outputs)
            parts = "".join(m.label.rpartition(".")[2] for m in members)
            label = f"{node.label.rpartition('.')[0]}.{parts}"
            nodes.append(Node(LinearGroup(), (node.inputs[0], *weights), outputs, label,
                              node.position))  # fmt: skip
        elif id(node) not in later:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes))


def gated_linear(node: Node, known: Uses) -> Node | None:
    if not isinstance(node.op, GateMul):
        return None
    gate, up = (known.only(operand, Linear) for operand in node.inputs)
    if gate is None or up is None or gate.inputs[0] != up.inputs[0]:
        return None
    inputs = (gate.inputs[0], gate.inputs[1], up.inputs[1])
    return replace(node, op=GatedLinear(node.op.act), inputs=inputs)


def norm_rope(node: Node, known: Uses) -> Node | None:
    if not isinstance(node.op, Rope):
        return None
    norm = known.only(node.inputs[0], RMSNorm)
    if norm is None or len(norm.inputs) != 2:
        return None
    assert isinstance(norm.op, RMSNorm)
    inputs = (norm.inputs[0], node.inputs[1], norm.inputs[1])
    return replace(node, op=NormRope(norm.op.eps), inputs=inputs)


def norm_rope_append(node: Node, known: Uses) -> Node | None:
    if not isinstance(node.op, KvAppend):
        return None
    keys, values = known.only(node.inputs[0], NormRope), node.inputs[1]
    if keys is None:
        return None
    assert isinstance(keys.op, NormRope)
    unit, v_norm = known.only(values, RMSNorm), "none"
    if unit is not None and len(unit.inputs) == 1:
        assert isinstance(unit.op, RMSNorm)
        if unit.op.eps != keys.op.eps:
            return None
        values, v_norm = unit.inputs[0], "unit"
    k, angles, weight = keys.inputs
    inputs = (k, values, angles, weight, *node.inputs[2:])
    return replace(node, op=NormRopeAppend(keys.op.eps, v_norm), inputs=inputs)


def norm_add(node: Node, known: Uses) -> Node | None:
    if not isinstance(node.op, Add):
        return None
    norm = known.only(node.inputs[1], RMSNorm)
    if norm is None or len(norm.inputs) != 2:
        return None
    assert isinstance(norm.op, RMSNorm)
    return replace(node, op=RMSNormAdd(norm.op.eps), inputs=(node.inputs[0], *norm.inputs))


def scaled_norm_add(node: Node, known: Uses) -> Node | None:
    if not isinstance(node.op, Scale):
        return None
    joined = known.only(node.inputs[0], RMSNormAdd)
    if joined is None or len(joined.inputs) != 3:
        return None
    return replace(node, op=joined.op, inputs=(*joined.inputs, node.inputs[1]))

"""Merge neighbours into one launch, and drop what nobody reads.

Rewrites, in order, each on values used once:

    y = linear(x, $a); z = linear(x, $b)          ->  y, z = linear_group(x, $a, $b)   (q, k, v)
    gate_mul(linear(x, $g), linear(x, $u))        ->  gated_linear(x, $g, $u)
    rope(rmsnorm(x, $w), angles)                  ->  norm_rope(x, angles, $w)
    kv_append(norm_rope(k, ..), rmsnorm(v), ..)   ->  norm_rope_append(k, v, ..)
    norm_rope(q, ..); norm_rope_append(k, v, ..)  ->  norm_rope_qkv(q, k, v, ..)
    add(x, rmsnorm(y, $w)) [then scale]           ->  rmsnorm_add(x, y, $w[, $s])
    quantise(rmsnorm(x, $w))                      ->  rmsnorm_quantise(x, $w)
    quantise(attention(..))                       ->  attention(..) {to}
    rmsnorm_add(x, rmsnorm_add(rmsnorm(y, $a), z, $b), $w)  ->  branch_norms(x, y, z, $a, $b, $w)
    u = rmsnorm_add(..); rmsnorm_quantise(u, $w)  ->  u, q = rmsnorm_add_quantise(.., $w)
    the same of several norms of u, or of branch_norms      ->  u, q, n = residual_norms(.., $w, $v)

What is quantised (to int8 blocks or to bf16) stays what `quantise` said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import Add, GateMul, Scale
from memra_compiler.ops.attention import Attention, KvAppend, NormRopeAppend
from memra_compiler.ops.base import Op
from memra_compiler.ops.linear import GatedLinear, Linear, LinearGroup
from memra_compiler.ops.norm import RMSNorm, RMSNormAdd
from memra_compiler.ops.qkv import NormRopeQKV
from memra_compiler.ops.quantise import Quantise, RMSNormAddQuantise, RMSNormQuantise
from memra_compiler.ops.residual import BranchNorms, ResidualNorms
from memra_compiler.ops.rope import NormRope, Rope


@dataclass(frozen=True)
class Uses:
    """Who makes each value of a program, and how often it is read."""

    makers: Mapping[str, Node]
    counts: Mapping[str, int]
    values: Mapping[str, TensorType]

    def only(self, operand: str, kind: type) -> Node | None:
        """The node that makes `operand`, if it is of this op and its value is read once."""
        node = self.makers.get(operand)
        if node is None or not isinstance(node.op, kind) or self.counts[operand] != 1:
            return None
        return node

    def norm(self, operand: str) -> Node | None:
        """The `rmsnorm` that makes `operand`, if that is all it does and its value is read once."""
        node = self.only(operand, RMSNorm)
        return node if node is None or node.op.attrs()["factor"] == 1 else None

    def width(self, operand: str) -> int:
        """Elements of one row of a value."""
        return math.prod(self.values[operand[1:]].max_shape[1:])

    def norm_size(self, norm: Node) -> int:
        """Elements that an `rmsnorm` node norms together."""
        assert isinstance(norm.op, RMSNorm)
        return norm.op.size or self.width(norm.inputs[0])


def uses(program: Program) -> Uses:
    """Who makes and who reads the values of `program`."""
    makers = {f"%{name}": node for node in program.nodes for name in node.outputs}
    counts = Counter(operand for node in program.nodes for operand in node.inputs)
    counts.update(f"%{name}" for name in program.results)
    return Uses(makers, counts, program.values)


#: A rewrite of one node: the node that replaces it, or None when the pattern is not there.
Rewrite = Callable[[Node, Uses], Node | None]


def fuse(module: Module) -> Module:
    """Apply all rewrites to every program and remove dead nodes."""

    def rewrite(program: Program) -> Program:
        program = drop_dead(program)
        program = drop_dead(group_linears(program))
        for step in (
            gated_linear,
            norm_rope,
            norm_rope_append,
            norm_add,
            scaled_norm_add,
            branch_norms,
            norm_quantise,
            attention_quantise,
        ):
            program = drop_dead(_apply(program, step))
        return join_residuals(join_queries(program))

    return module.with_programs(rewrite)


def _apply(program: Program, step: Rewrite) -> Program:
    """Rewrite nodes, but for those that would read a plane after another node has written it."""
    known = uses(program)
    place = {id(node): i for i, node in enumerate(program.nodes)}
    written: dict[str, int] = {}  # planes, and the last node so far that writes each
    nodes = []
    for i, node in enumerate(program.nodes):
        made = step(node, known) or node
        for plane in (set(made.inputs) - set(node.inputs)) & written.keys():
            makers = [known.makers[o] for o in node.inputs if o in known.makers]
            read = max((place[id(m)] for m in makers if plane in m.inputs), default=-1)
            if written[plane] > read:
                made = node
        nodes.append(made)
        written |= {p: i for at, p in enumerate(node.inputs) if node.op.operand(at).writes}
    return replace(program, nodes=tuple(nodes))


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
    """Make one `linear_group` of a layer's linears that read the same rows: q, k, v; or head and
    post projection of a drafter. Gates stay out: they fuse with their activation."""
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
    """`gate_mul` of two linears of the same rows."""
    if not isinstance(node.op, GateMul):
        return None
    gate, up = (known.only(operand, Linear) for operand in node.inputs)
    if gate is None or up is None or gate.inputs[0] != up.inputs[0]:
        return None
    inputs = (gate.inputs[0], gate.inputs[1], up.inputs[1])
    return replace(node, op=GatedLinear(node.op.act), inputs=inputs)


def norm_rope(node: Node, known: Uses) -> Node | None:
    """`rope` of a norm of the same heads."""
    if not isinstance(node.op, Rope):
        return None
    norm = known.norm(node.inputs[0])
    if norm is None or len(norm.inputs) != 2:
        return None
    if known.norm_size(norm) != known.width(node.inputs[1]):  # cosines and sines: d in all
        return None
    assert isinstance(norm.op, RMSNorm)
    inputs = (norm.inputs[0], node.inputs[1], norm.inputs[1])
    return replace(node, op=NormRope(norm.op.eps), inputs=inputs)


def norm_rope_append(node: Node, known: Uses) -> Node | None:
    """`kv_append` of rotated keys, and of values raw or normed by head."""
    if not isinstance(node.op, KvAppend):
        return None
    keys, values = known.only(node.inputs[0], NormRope), node.inputs[1]
    if keys is None:
        return None
    assert isinstance(keys.op, NormRope)
    unit, v_norm = known.norm(values), "none"
    if unit is not None and len(unit.inputs) == 1:
        assert isinstance(unit.op, RMSNorm)
        if unit.op.eps != keys.op.eps or known.norm_size(unit) != known.width(keys.inputs[1]):
            return None
        values, v_norm = unit.inputs[0], "unit"
    k, angles, weight = keys.inputs
    inputs = (k, values, angles, weight, *node.inputs[2:])
    return replace(node, op=NormRopeAppend(keys.op.eps, v_norm), inputs=inputs)


def norm_add(node: Node, known: Uses) -> Node | None:
    """`add` of a residual and a norm of the whole row."""
    if not isinstance(node.op, Add):
        return None
    norm = known.norm(node.inputs[1])
    if norm is None or len(norm.inputs) != 2:
        return None
    if known.norm_size(norm) != known.width(node.inputs[1]):
        return None
    assert isinstance(norm.op, RMSNorm)
    return replace(node, op=RMSNormAdd(norm.op.eps), inputs=(node.inputs[0], *norm.inputs))


def scaled_norm_add(node: Node, known: Uses) -> Node | None:
    """`scale` of a `rmsnorm_add` that has no scale yet."""
    if not isinstance(node.op, Scale):
        return None
    joined = known.only(node.inputs[0], RMSNormAdd)
    if joined is None or len(joined.inputs) != 3:
        return None
    return replace(node, op=joined.op, inputs=(*joined.inputs, node.inputs[1]))


def branch_norms(node: Node, known: Uses) -> Node | None:
    """Rewrite `rmsnorm_add` of a sum of two norms: the end of a half with two branches."""
    if not isinstance(node.op, RMSNormAdd):
        return None
    both = known.only(node.inputs[1], RMSNormAdd)
    if both is None or len(both.inputs) != 3 or both.op != node.op:
        return None
    first = known.norm(both.inputs[0])
    if first is None or len(first.inputs) != 2 or first.op != RMSNorm(node.op.eps):
        return None
    x, _, post, *scale = node.inputs
    _, z, post_z = both.inputs
    y, post_y = first.inputs
    op = BranchNorms(node.op.eps)
    return replace(node, op=op, inputs=(x, y, z, post_y, post_z, post, *scale))


def norm_quantise(node: Node, known: Uses) -> Node | None:
    """Rewrite `quantise(rmsnorm(x, $w))` of whole rows."""
    if not isinstance(node.op, Quantise):
        return None
    norm = known.norm(node.inputs[0])
    if norm is None or len(norm.inputs) != 2:
        return None
    assert isinstance(norm.op, RMSNorm)
    if norm.op.size:
        return None
    return replace(node, op=RMSNormQuantise(norm.op.eps, node.op.to), inputs=norm.inputs)


def attention_quantise(node: Node, known: Uses) -> Node | None:
    """Rewrite `quantise(attention(..))`."""
    if not isinstance(node.op, Quantise):
        return None
    heads = known.only(node.inputs[0], Attention)
    if heads is None:
        return None
    assert isinstance(heads.op, Attention)
    return replace(node, op=replace(heads.op, to=node.op.to), inputs=heads.inputs)


def join_queries(program: Program) -> Program:
    """Put the query's norm and rotation into the launch that appends keys and values."""
    queries = {_layer(n): n for n in program.nodes if isinstance(n.op, NormRope)}
    joined: dict[int, Node] = {}
    for node in program.nodes:
        if not isinstance(node.op, NormRopeAppend):
            continue
        query = queries.get(_layer(node))
        k, v, angles, weight, *rest = node.inputs
        if query is None or query.inputs[1] != angles:
            continue
        inputs = (query.inputs[0], k, v, angles, query.inputs[2], weight, *rest)
        op = NormRopeQKV(node.op.eps, node.op.v_norm)
        joined[id(node)] = replace(node, op=op, inputs=inputs, outputs=query.outputs)
        joined[id(query)] = query
    nodes = []
    for node in program.nodes:
        replaced = joined.get(id(node), node)
        if replaced is not node or id(node) not in joined:
            nodes.append(replaced)
    return replace(program, nodes=tuple(nodes))


def join_residuals(program: Program) -> Program:
    """Let the residual's launch also norm it for what reads it, where rows are rounded or it is
    normed more than once."""
    makers = uses(program).makers
    followers: dict[int, list[Node]] = {}
    for node in program.nodes:
        maker = makers.get(node.inputs[0]) if node.inputs else None
        if maker is not None and _norms_residual(node, maker):
            followers.setdefault(id(maker), []).append(node)
    joined = {
        key: norms
        for key, norms in followers.items()
        if len(norms) > 1 or isinstance(norms[0].op, RMSNormQuantise)
    }
    gone = {id(norm) for norms in joined.values() for norm in norms}
    nodes = []
    for node in program.nodes:
        if id(node) in joined:
            nodes.append(_with_norms(node, joined[id(node)]))
        elif id(node) not in gone:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes))


def _norms_residual(node: Node, maker: Node) -> bool:
    """Whether `node` norms whole rows of the residual that `maker` makes."""
    if not isinstance(maker.op, RMSNormAdd | BranchNorms) or len(node.inputs) != 2:
        return False
    whole = isinstance(node.op, RMSNormQuantise) or (
        isinstance(node.op, RMSNorm) and node.op.size == 0
    )
    return whole and node.op.attrs()["eps"] == maker.op.eps


def _with_norms(node: Node, norms: list[Node]) -> Node:
    """The node that makes a residual, and norms of it, too."""
    assert isinstance(node.op, RMSNormAdd | BranchNorms)
    weights = [norm.inputs[1] for norm in norms]
    outputs = (*node.outputs, *(name for norm in norms for name in norm.outputs))
    first = norms[0].op
    before = 3 if isinstance(node.op, RMSNormAdd) else 6
    inputs = (*node.inputs[:before], *weights, *node.inputs[before:])
    op: Op
    if before == 3 and len(norms) == 1 and isinstance(first, RMSNormQuantise):
        op = RMSNormAddQuantise(node.op.eps, first.to)
    else:
        kind = ResidualNorms if before == 3 else BranchNorms
        attrs = [norm.op.attrs() for norm in norms]
        to = tuple(str(a.get("to", "f32")) for a in attrs)
        op = kind(node.op.eps, to, tuple(float(a.get("factor", 1.0)) for a in attrs))
    return replace(node, op=op, inputs=inputs, outputs=outputs)


def _layer(node: Node) -> str:
    """`target.layers.3` of `target.layers.3.q_rope`."""
    return node.label.rpartition(".")[0]

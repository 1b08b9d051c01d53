"""Connect the drafter to the target: its embedding table and its post-norm hidden row."""

from __future__ import annotations

from dataclasses import replace

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Module, Program
from memra_compiler.ir.verify import open_references

#: What a drafter may ask of the target, and what it is given. The hidden row is the one the head
#: multiplies, after the output norm; there is no plane for a pre-norm hidden, so none can be wired.
WIRES = {
    "?target.embed": "$target.embed",
    "?target.hidden_post_norm": "@hidden",
}


def wire_drafter(module: Module) -> Module:
    """Replace the drafter's open references; afterwards none may be left.

    Raises: IRError that lists references nothing can be wired to.
    """

    def rewrite(program: Program) -> Program:
        nodes = tuple(
            replace(node, inputs=tuple(WIRES.get(name, name) for name in node.inputs))
            for node in program.nodes
        )
        return replace(program, nodes=nodes)

    wired = module.with_programs(rewrite)
    left = open_references(wired)
    if left:
        raise IRError("wire_drafter: nothing to wire to\n  " + "\n  ".join(left))
    return wired

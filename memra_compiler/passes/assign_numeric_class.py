"""State on every node what decides the bits of its result."""

from __future__ import annotations

from dataclasses import replace

from memra_compiler.ir.graph import Module, Program


def assign_numeric_class(module: Module) -> Module:
    """Ask each op for its numeric class."""

    def rewrite(program: Program) -> Program:
        nodes = tuple(
            replace(node, numeric_class=node.op.numeric_class(*module.operand_types(program, node)))
            for node in program.nodes
        )
        return replace(program, nodes=nodes)

    return module.with_programs(rewrite)

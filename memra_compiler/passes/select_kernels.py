"""Give every node its kernel: nodes with the same op, parameters and types share one."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace

from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ir.types import Sym, TensorType


def select_kernels(module: Module) -> Module:
    """Name each node's kernel: readable, then a digest of everything that specialises it.

    The row bound is not part of it: `plain_step` and `verify` run the very same machine code.
    """

    def rewrite(program: Program) -> Program:
        nodes = tuple(
            replace(node, kernel=kernel_name(module, program, node)) for node in program.nodes
        )
        return replace(program, nodes=nodes)

    return module.with_programs(rewrite)


def kernel_name(module: Module, program: Program, node: Node) -> str:
    """`linear_q8_0_1024x256_1f3c9a02`: op, largest operand, digest. A C identifier."""
    inputs = module.operand_types(program, node)
    types = [*inputs, *node.op.infer(*inputs)]
    attrs = {k: v for k, v in node.op.attrs().items() if k != "limit"}
    identity = f"{node.op.name} {attrs} {[_text(t) for t in types]}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    largest = max(types, key=lambda t: math.prod(_fixed(t)))
    dims = "x".join(map(str, _fixed(largest)))
    return re.sub(r"\W", "_", f"{node.op.name}_{largest.dtype}_{dims}_{digest}")


def _fixed(type: TensorType) -> list[int]:
    return [d for d in type.shape if not isinstance(d, Sym)]


def _text(type: TensorType) -> str:
    dims = ",".join("T" if isinstance(d, Sym) else str(d) for d in type.shape)
    return f"{type.dtype}[{dims}]{type.layout}"

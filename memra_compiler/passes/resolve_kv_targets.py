"""Turn each `last_own(KIND)` into the cache of one target layer, and check that it fits."""

from __future__ import annotations

import re
from dataclasses import replace

from memra_compiler.ir.errors import OpError
from memra_compiler.ir.graph import Module, Node, Program
from memra_runtime.errors import Position, fail

_TARGET = re.compile(r"\?last_own\((?P<kind>\w+)\)\.(?P<part>[kv])$")


def resolve_kv_targets(module: Module) -> Module:
    """Replace `?last_own(KIND).k` by the cache of the last target layer of that kind.

    Raises: MemraError when no layer of the kind owns a cache, or its shape does not fit the query.
    """

    def operand(node: Node, name: str) -> str:
        match = _TARGET.match(name)
        if match is None:
            return name
        owners = cache_owners(module, match["kind"])
        if not owners:
            fail(
                "kv-target",
                f"no target layer of kind `{match['kind']}` owns keys and values",
                _place(node),
                hints=(f"kinds with a cache: {', '.join(_kinds(module)) or 'none'}",),
            )
        return f"@{owners[-1]}.{match['part']}"

    def rewrite(program: Program) -> Program:
        nodes = []
        for node in program.nodes:
            wired = replace(node, inputs=tuple(operand(node, name) for name in node.inputs))
            if wired != node:
                _check(module, program, wired)
            nodes.append(wired)
        return replace(program, nodes=tuple(nodes))

    return module.with_programs(rewrite)


def cache_owners(module: Module, kind: str) -> list[str]:
    """Layers (`target.layers.4`) whose own cache belongs to layer kind `kind`, first to last."""
    return [
        name.removesuffix(".k")
        for name, plane in module.planes.items()
        if plane.kind == kind and name.startswith("target.") and name.endswith(".k")
    ]


def _kinds(module: Module) -> list[str]:
    return sorted({plane.kind for plane in module.planes.values() if plane.kind})


def _place(node: Node) -> Position | str:
    return node.position or node.label


def _check(module: Module, program: Program, node: Node) -> None:
    try:
        node.op.infer(*module.operand_types(program, node))
    except OpError as error:
        caches = ", ".join(name for name in node.inputs if name.startswith("@"))
        fail("kv-target", f"`{node.label}` cannot read {caches}: {error}", _place(node))

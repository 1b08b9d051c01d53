"""The first law, at compile time: a verified row has the bits a plain step would give it.

Each node of `verify` is paired with its twin in `plain_step`. The proof holds when both are the
same op on the same operands, of the same numeric class, and row-independent. Prefill may use
another class: both arms share it.
"""

from __future__ import annotations

import dataclasses

from memra_compiler.ir.graph import Module, Node
from memra_runtime.errors import Diagnostic, MemraError


def prove_exact(module: Module) -> Module:
    """Return the module unchanged, or raise a `MemraError` naming every pair that differs."""
    verify, plain = module.programs["verify"], module.programs["plain_step"]
    problems = []
    if len(verify.nodes) != len(plain.nodes):
        problems.append(
            Diagnostic(
                "inexact",
                f"verify has {len(verify.nodes)} steps, the plain step has {len(plain.nodes)}",
                notes=("both must be the same mathematics on more or fewer rows",),
            )
        )
    for ours, twin in zip(verify.nodes, plain.nodes, strict=False):
        why = _difference(ours, twin)
        if why:
            problems.append(_refuse(ours, twin, why))
    if problems:
        raise MemraError(tuple(problems))
    return module


def _difference(ours: Node, twin: Node) -> str:
    """Why the two nodes could give different bits; empty when they cannot."""
    if not ours.op.rows_independent:
        return "its rows depend on each other, so a row's bits depend on how many there are"
    if ours.numeric_class != twin.numeric_class:
        return "the two steps compute it in different numeric classes"
    if _meaning(ours) != _meaning(twin) or ours.inputs != twin.inputs:
        return "the two steps do not compute the same thing"
    return ""


def _meaning(node: Node) -> tuple[object, ...]:
    """Op and parameters, without the row limit that only sizes buffers."""
    attrs = {k: v for k, v in dataclasses.asdict(node.op).items() if k != "limit"}  # type: ignore[call-overload]
    return (type(node.op), tuple(attrs.items()))


def _refuse(ours: Node, twin: Node, why: str) -> Diagnostic:
    return Diagnostic(
        "inexact",
        f"speculation could change the text: in `{ours.label}`, op `{ours.op.name}`, {why}",
        ours.position or ours.label,
        notes=(
            f"verify: {ours.op.name}, class `{ours.numeric_class}`",
            f"plain step: {twin.op.name}, class `{twin.numeric_class}`",
        ),
        hints=("give both programs the same row-independent op",),
    )

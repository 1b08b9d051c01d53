"""What there is to know of a pipeline, as plain data: read off the resolved spec and the IR."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memra_compiler.ir.graph import Module, Program, Weight

#: Sections of a spec, with the source their weights come from.
SOURCES = {"target": "target", "drafter": "draft"}

_CACHE = re.compile(r"@target\.layers\.(?P<target>\d+)\.")
_DRAFT_LAYER = re.compile(r"drafter\.layers\.(?P<layer>\d+)\.")


@dataclass(frozen=True)
class Pipeline:
    """A lowered pipeline: its resolved spec and its module after all passes."""

    spec: Mapping[str, Any]
    digest: str
    module: Module


def summary_facts(pipeline: Pipeline) -> dict[str, Any]:
    """Layers, wiring, round policy, parameters, memory and cost."""
    spec, module = pipeline.spec, pipeline.module
    sections = {}
    for section, source in SOURCES.items():
        part = spec[section]
        sections[section] = {
            "arch": part["arch"],
            "width": part["width"],
            "layers": len(part["layers"]),
            "order": list(part["layers"]),
            "kinds": list(layer_kinds(part)),
            "parameters": parameters(module, source),
            "active_parameters": active_parameters(module, source),
            "weight_bytes": sum(w.type.nbytes for w in module.weights.values()
                                if w.source == source),
            "formats": formats(module, source),
        }  # fmt: skip
    target, drafter = spec["target"], spec["drafter"]
    sections["target"].update(vocab=target["vocab"], max_positions=target["max_positions"])
    known = ("arch", "formats", "width", "norm_eps", "layer_kinds", "layers", "head")
    wired = {key: value for key, value in drafter.items() if key not in known}
    sections["drafter"].update(wiring=wired, reads=drafter_reads(module, drafter["layers"]))
    return {
        "name": spec["name"],
        "spec_digest": pipeline.digest,
        **sections,
        "round": spec["round"],
        "runtime": spec["runtime"],
        "memory": memory_facts(module),
        "programs": program_facts(module),
    }


def layer_kinds(section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each layer kind in order of first use, with the layers that are of it."""
    for kind in dict.fromkeys(section["layers"]):
        at = [i for i, name in enumerate(section["layers"]) if name == kind]
        yield {"kind": kind, "at": at, **section["layer_kinds"][kind]}


def drafter_reads(module: Module, order: Sequence[str]) -> list[dict[str, Any]]:
    """Which target layer's cache each drafter layer reads, by drafter layer."""
    reads = {}
    for node in module.programs["draft"].nodes:
        layer = _DRAFT_LAYER.match(node.label)
        for operand in node.inputs:
            cache = _CACHE.match(operand)
            if layer and cache:
                reads[int(layer["layer"])] = int(cache["target"])
    return [
        {"layer": layer, "kind": order[layer], "target_layer": target}
        for layer, target in sorted(reads.items())
    ]


def parameters(module: Module, source: str) -> int:
    """Elements of all weights of a source that were learned."""
    return sum(_learned(w) for w in module.weights.values() if w.source == source)


def _learned(weight: Weight) -> int:
    """Elements of a weight, but of a table that follows from the spec."""
    return 0 if weight.made[:1] == ("rope_factors",) else weight.type.elements


def active_parameters(module: Module, source: str) -> int:
    """Of `parameters`, those that one row meets: of all experts, the ones chosen for it."""
    idle = {
        weight.name: weight.type.elements // weight.stacked * (weight.stacked - active)
        for program, node in module.nodes()
        if node.op.name in ("experts_gated", "experts_down")
        for active in [module.type_of(program, node.inputs[1]).max_shape[1]]
        for operand in node.inputs
        if operand.startswith("$") and (weight := module.weights[operand[1:]]).source == source
    }
    return parameters(module, source) - sum(idle.values())


def formats(module: Module, source: str) -> dict[str, int]:
    """Bytes of a source's weights by storage format, the largest first."""
    total: dict[str, int] = {}
    for weight in module.weights.values():
        if weight.source == source:
            total[weight.type.dtype] = total.get(weight.type.dtype, 0) + weight.type.nbytes
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def memory_facts(module: Module) -> dict[str, int]:
    """Bytes of the arena and of the weights."""
    caches = [p for p in module.planes.values() if p.kind]
    state = [p for p in module.planes.values() if not p.kind]
    placed = [module.arena[f"@{n}"] + p.type.nbytes for n, p in module.planes.items()]
    cached = sum(p.type.nbytes for p in caches)
    kept = sum(p.type.nbytes for p in state)
    return {
        "arena_bytes": module.arena[""],
        "cache_bytes": cached,
        "state_bytes": kept,
        "working_offset": max(placed, default=0),
        "working_bytes": module.arena[""] - cached - kept,
        "weight_bytes": sum(w.type.nbytes for w in module.weights.values()),
    }


def plane_facts(module: Module) -> list[dict[str, Any]]:
    """Every plane in the order of the arena."""
    return [
        {
            "plane": name,
            "offset": module.arena[f"@{name}"],
            "bytes": plane.type.nbytes,
            "type": str(plane.type),
            "rollback": plane.rollback,
            "ring": plane.ring,
            "kind": plane.kind,
        }
        for name, plane in module.planes.items()
    ]


def program_facts(module: Module) -> list[dict[str, Any]]:
    """Cost of each program of the product at its largest row count; planted faults are left out."""
    return [program_cost(module, p) for p in module.programs.values() if not p.fault]


def program_cost(module: Module, program: Program) -> dict[str, Any]:
    """Launches, bytes and operations of one program, as plain data."""
    rows = program.rows.bound
    costs = [
        n.op.cost(rows, *(t.in_rows for t in module.operand_types(program, n)))
        for n in program.nodes
    ]
    return {
        "program": program.name,
        "rows": rows,
        "launches": len(program.nodes),
        "kernels": len({node.kernel for node in program.nodes}),
        "bytes": sum(cost.bytes for cost in costs),
        "flops": sum(cost.flops for cost in costs),
    }


def plan_facts(module: Module) -> dict[str, Any]:
    """Memory and launch plan."""
    kernels = {node.kernel for program, node in module.nodes()}
    faults = [p.fault for p in module.programs.values() if p.fault]
    sequences = {
        s.name + (f" while {s.loop}" if s.loop else ""): [
            {"program": c.program, "repeat": "at most " * c.live + c.repeat} for c in s.calls
        ]
        for s in module.sequences.values()
        if not any(s.name.endswith(f"_fault_{fault}") for fault in faults)
    }
    return {
        "memory": memory_facts(module),
        "planes": plane_facts(module),
        "sequences": sequences,
        "programs": program_facts(module),
        "distinct_kernels": len(kernels),
        "planted_faults": faults,
    }


def weight_facts(module: Module) -> dict[str, Any]:
    """Every weight with the names it may have in a file, and parameter totals."""
    return {
        "weights": [
            {
                "id": w.name,
                "source": w.source,
                "shape": list(w.stored_shape),
                "format": w.type.dtype,
                "bytes": w.type.nbytes,
                "parameters": _learned(w),
                "names": list(w.names),
            }
            for w in module.weights.values()
        ],
        "totals": {
            source: {
                "tensors": sum(w.source == source for w in module.weights.values()),
                "parameters": parameters(module, source),
                "bytes": sum(formats(module, source).values()),
            }
            for source in SOURCES.values()
        },
    }

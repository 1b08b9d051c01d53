"""The CUDA target: one cubin a kernel, and programs as launch lists."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path

from memra_compiler.codegen.build import Parts, node_cost
from memra_compiler.codegen.cache import KernelCache, content_key
from memra_compiler.codegen.cuda import (
    compile_cuda,
    library_digest,
    load_nvrtc,
    render,
    templates_digest,
)
from memra_compiler.codegen.kernels import Progress
from memra_compiler.ir.graph import Module, Node, Program, Weight
from memra_compiler.ops.cuda import CudaArch, scratch_bytes
from memra_compiler.ops.cuda_linear import FORMATS, repack_launches
from memra_compiler.ops.linear import PRODUCTS
from memra_runtime.artifact import LaunchEntry, WeightEntry
from memra_schedules import records, rules_digest

log = logging.getLogger("memra.cuda")


def slow_products(module: Module) -> int:
    """Weights that have fast kernels, but none that reads the rows they meet."""
    slow = set()
    for program, node in module.nodes():
        if isinstance(node.op, PRODUCTS):
            rows, *weights = module.operand_types(program, node)
            for name, weight in zip(node.inputs[1:], weights, strict=True):
                classes = FORMATS[weight.dtype].classes
                if classes and rows.dtype not in classes:
                    slow.add(name)
    return len(slow)


@dataclass(frozen=True)
class CudaTools:
    """Templates and scheduled functions, compiled by NVRTC for one architecture."""

    arch: CudaArch
    cache: KernelCache

    @property
    def target(self) -> str:
        return f"cuda:{self.arch.name}"

    def identity(self) -> str:
        return " ".join(
            map(str, (self.arch, templates_digest(), rules_digest(), nvrtc_version(),
                      records(self.arch.name)))
        )  # fmt: skip

    def write(self, module: Module, key: str, folder: Path, progress: Progress) -> Parts:
        weights = list(module.weights)
        if slow := slow_products(module):
            log.warning(
                "%d quantised or 16-bit weights meet f32 activations, which no fast kernel "
                "reads; for speed: --set runtime.activations=auto",
                slow,
            )
        sources: dict[str, str] = {}
        launches = {
            program.name: tuple(
                entry
                for node in program.nodes
                for entry in self._node(module, program, node, weights, sources)
            )
            for program in module.programs.values()
        }
        repacks, entries = [], []
        for name, weight in module.weights.items():
            entry, repack = self._weight(name, weight, sources)
            entries.append(entry)
            repacks += [repack] if repack else []
        files = self._compile(sources, folder, progress)
        fields = {
            "weights": tuple(entries),
            "weight_bytes": sum(e.device_bytes for e in entries),
            "launches": launches,
            "repacks": tuple(repacks),
            "rows_from": {p.name: p.rows_from for p in module.programs.values()},
            "kernels": tuple(sources),
        }
        return Parts(files, fields)

    def _node(
        self,
        module: Module,
        program: Program,
        node: Node,
        weights: list[str],
        sources: dict[str, str],
    ) -> Iterator[LaunchEntry]:
        """The launches of one node, with every argument's place."""
        types = module.operand_types(program, node)
        outputs = tuple(program.values[name] for name in node.outputs)
        operands: list[tuple[str, int]] = []
        for operand in (*node.inputs, *(f"%{name}" for name in node.outputs)):
            if operand.startswith("$"):
                operands.append(("weight", weights.index(operand[1:])))
            else:
                name = operand if operand.startswith("@") else f"{program.name}/{operand}"
                operands.append(("arena", module.arena[name]))
        if scratch_bytes(module.target, node.op, types, outputs):
            operands.append(("arena", module.arena[f"{program.name}/%"]))
        place = node.position
        where = f" at {Path(place.file).name}:{place.line}:{place.column}" if place else ""
        header = (
            f"// {node.op.name}: {', '.join(map(str, (*types, *outputs)))}\n"
            f"// first used by {node.label}{where}\n"
        )
        moved = node_cost(module, program, node).bytes
        for launch in node.op.lower_cuda(self.arch, *types, *outputs):
            symbol, source = render(launch, node.op.name, header)
            sources.setdefault(symbol, source)
            yield LaunchEntry(
                symbol, launch.grid, launch.block, launch.shared_bytes,
                launch.early and self.arch.dependent_launch,
                (*operands, *(("graph", i) for i in range(launch.graph_handles))),
                bytes=moved,
            )  # fmt: skip
            moved = 0

    def _weight(
        self, name: str, weight: Weight, sources: dict[str, str]
    ) -> tuple[WeightEntry, LaunchEntry | None]:
        type = weight.type
        stored = type.max_shape[0] * type.row_bytes if len(type.shape) > 1 else type.row_bytes
        repack, size = None, stored
        if type.layout == "tiles16":
            launch, size = repack_launches(self.arch, type)
            symbol, source = render(launch, "repack", f"// repack {type}\n")
            sources.setdefault(symbol, source)
            repack = LaunchEntry(symbol, launch.grid, launch.block, launch.shared_bytes, False,
                                 weight=name)  # fmt: skip
        entry = WeightEntry(name, weight.source, weight.names, type.max_shape, type.dtype, stored,
                            weight.made, size, weight.stacked, weight.of_rows)  # fmt: skip
        return entry, repack

    def _compile(
        self, sources: dict[str, str], folder: Path, progress: Progress
    ) -> tuple[str, ...]:
        """Compile every kernel (from the cache where known) and write cubins and sources."""
        for part in ("kernels", "sources"):
            (folder / part).mkdir()

        def compile_one(symbol: str) -> tuple[str, bytes, bool]:
            body = "\n".join(
                line for line in sources[symbol].splitlines() if not line.startswith("// ")
            )
            key = content_key(body, self.target, library_digest(), nvrtc_version())
            known = self.cache.get(key, ".cubin")
            if known is not None:
                return symbol, known, True
            cubin = compile_cuda(sources[symbol], symbol, self.arch)
            self.cache.put(key, ".cubin", cubin)
            return symbol, cubin, False

        with ThreadPoolExecutor(cpu_count() or 1) as pool:
            for done, (symbol, cubin, cached) in enumerate(pool.map(compile_one, sources), 1):
                (folder / "kernels" / f"{symbol}.cubin").write_bytes(cubin)
                (folder / "sources" / f"{symbol}.cu").write_text(sources[symbol], encoding="utf-8")
                progress(symbol, done, len(sources), cached)
        return tuple(f"kernels/{symbol}.cubin" for symbol in sources)


def nvrtc_version() -> str:
    """Version of the compiler that makes the cubins."""
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"

"""Compile the distinct kernels of a module, from the cache where they are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path

from memra_compiler.codegen.cache import KernelCache, content_key
from memra_compiler.codegen.cpu import KernelSpec, canonical, compile_kernel
from memra_compiler.ir.graph import Module

#: Told after each kernel: name, done, total, whether it came from the cache.
Progress = Callable[[str, int, int, bool], None]

#: Fewer kernels than this are compiled in this process: starting another costs a second.
PARALLEL_FROM = 24


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's object file and its readable source."""

    name: str
    object: Path
    source: str


def kernel_specs(module: Module) -> dict[str, KernelSpec]:
    """The distinct kernels of a module, by name, in order of first use."""
    specs: dict[str, KernelSpec] = {}
    for program, node in module.nodes():
        if node.kernel not in specs:
            inputs = module.operand_types(program, node)
            types = tuple(canonical(t) for t in (*inputs, *node.op.infer(*inputs)))
            scratch = node.op.scratch_floats(*inputs)
            specs[node.kernel] = KernelSpec(node.kernel, node.op, types, scratch)
    return specs


def compile_kernels(
    module: Module, cpu: str, cache: KernelCache, progress: Progress
) -> list[CompiledKernel]:
    """Compile every kernel of the module for `cpu`; known ones are read from the cache."""
    specs = kernel_specs(module)
    keys = {name: content_key(_identity(spec), cpu) for name, spec in specs.items()}
    found: dict[str, CompiledKernel] = {}
    for name, key in keys.items():
        source = cache.get(key, ".tir")
        if source is not None and cache.path(key, ".o").is_file():
            found[name] = CompiledKernel(name, cache.path(key, ".o"), source.decode())
            progress(name, len(found), len(specs), True)
    missing = [specs[name] for name in specs if name not in found]
    for spec, (code, text) in zip(missing, _compile(missing, cpu), strict=True):
        key = keys[spec.symbol]
        path = cache.put(key, ".o", code)
        cache.put(key, ".tir", text.encode())
        found[spec.symbol] = CompiledKernel(spec.symbol, path, text)
        progress(spec.symbol, len(found), len(specs), False)
    return [found[name] for name in specs]


def _identity(spec: KernelSpec) -> str:
    attrs = {k: v for k, v in spec.op.attrs().items() if k != "limit"}
    return f"{spec.symbol} {spec.op.name} {attrs} {[str(t) for t in spec.types]}"


def _compile(specs: list[KernelSpec], cpu: str) -> Iterator[tuple[bytes, str]]:
    workers = min(len(specs) // 8, cpu_count() or 1)
    if len(specs) < PARALLEL_FROM or workers < 2:
        yield from (compile_kernel(spec, cpu) for spec in specs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(compile_kernel, specs, [cpu] * len(specs))

"""What can be compiled for, by name."""

from __future__ import annotations

from pathlib import Path

from memra_compiler.codegen.build import Toolchain, Tools
from memra_compiler.codegen.cache import KernelCache
from memra_compiler.codegen.cuda_tools import CudaTools
from memra_compiler.codegen.toolchain import find_linker
from memra_compiler.ops.cuda import ARCHS, cuda_arch
from memra_runtime.errors import fail

TARGETS = ("cpu", *(f"cuda:{arch}" for arch in ARCHS))


def tools_for(target: str, cache: Path) -> Tools:
    """The code generator of a target. Raises: MemraError for one that is unknown or unusable."""
    if target == "cpu":
        return Toolchain(find_linker(), KernelCache(cache))
    arch = cuda_arch(target)
    if arch is None:
        fail(
            "target",
            f"`{target}` is not a target of this memra",
            "--target",
            hints=(f"targets: {', '.join(TARGETS)}",),
        )
    return CudaTools(arch, KernelCache(cache))

"""What the host offers: a linker, and the CPU that code is compiled for."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from memra_runtime.errors import fail


@dataclass(frozen=True)
class Linker:
    """How a shared library is linked here."""

    command: tuple[str, ...]
    libraries: tuple[str, ...]


def find_linker() -> Linker:  # noqa: RET503  (fail never returns)
    """The first of cc, gcc, clang, ld on the path; a clear error when there is none."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return Linker((path,), ("-lm",))
    if path := shutil.which("ld"):
        return Linker((path,), ())
    fail(
        "no-linker",
        "compiling for the CPU needs a linker, and none of cc, gcc, clang, ld is on the path",
        hints=(
            "Debian, Ubuntu: apt install gcc",
            "Fedora: dnf install gcc",
            "macOS: xcode-select --install",
        ),
    )


def host_cpu() -> str:
    """LLVM's name of this machine's processor."""
    from tvm.target import codegen

    return str(codegen.llvm_get_system_cpu())


#: Instruction sets the vector code may use, as the kernel of the host names them.
_FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "asimd")


def host_features() -> tuple[str, ...]:
    """Instruction sets of this machine that compiled code may depend on; empty if unknown."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return (platform.machine(),)
    words = set(path.read_text(encoding="ascii", errors="replace").split())
    return (platform.machine(), *(f for f in _FEATURES if f in words))


def processor_name() -> str:
    """The processor's model as the kernel of the host names it; empty if unknown."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    return " ".join(line for line in lines if line.startswith(("model", "cpu family")))[:200]

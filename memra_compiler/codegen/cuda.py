"""The CUDA code generator: templates and scheduled functions as readable CUDA, NVRTC's cubins.

No GPU and no CUDA toolkit is needed: the headers come from wheels.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from memra_compiler.codegen.scheduled import cuda_text
from memra_compiler.ops.cuda import AnyLaunch, CudaArch, Scheduled
from memra_runtime.errors import fail


def _templates() -> Path:
    """The folder of templates: in a checkout beside the compiler, else `memra_templates`."""
    beside = Path(__file__).parents[2] / "templates"
    if (beside / "__init__.py").is_file():
        return beside
    spec = importlib.util.find_spec("memra_templates")
    places = spec.submodule_search_locations if spec else None
    if not places:
        fail("install", "the package `memra_templates` is missing: memra is installed in part",
             hints=("install memra again",))  # fmt: skip
    return Path(places[0])


TEMPLATES = _templates()
LIBRARY = TEMPLATES / "lib"


class KernelError(Exception):
    """A kernel that does not render or compile: a bug of ours. Carries NVRTC's log."""


def cfloat(value: float) -> str:
    """The shortest float literal that reads back the same."""
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    text = repr(float(value))
    return f"{text}f" if any(c in text for c in ".en") else f"{text}.0f"


@cache
def environment() -> jinja2.Environment:
    """Strict templates: an unknown variable is an error, blocks leave no blank lines."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    env = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["cfloat"] = cfloat
    env.filters["cbool"] = lambda value: "true" if value else "false"
    return env


def render(launch: AnyLaunch, name: str, header: str = "") -> tuple[str, str]:
    """Render a launch; returns its C symbol and its source.

    The symbol is `name` and a digest of the text, so that equal kernels are one. The header
    comment stays out of the digest.
    """
    if isinstance(launch, Scheduled):
        text = cuda_text(launch)
    else:
        template = environment().get_template(launch.template)
        text = template.render(symbol="KERNEL_SYMBOL", **launch.variables())
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    symbol = f"{name}_{digest}"
    return symbol, f"{header}{text.replace('KERNEL_SYMBOL', symbol)}"


@cache
def include_paths() -> tuple[str, ...]:
    """Folders of CUDA's headers in the installed wheels, and of our own library."""
    found = [str(LIBRARY)]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else []:
        found += sorted(str(p) for p in Path(root).glob("*/include") if p.is_dir())
    return tuple(found)


@cache
def templates_digest() -> str:
    """Digest of all templates: those of an artifact are rendered only when it may have changed."""
    digest = hashlib.sha256(library_digest().encode())
    for path in sorted(TEMPLATES.rglob("*.j2")):
        digest.update(path.relative_to(TEMPLATES).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def library_digest() -> str:
    """Digest of the shared headers: a changed header is a changed kernel."""
    digest = hashlib.sha256()
    for path in sorted(LIBRARY.glob("*.cuh")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _check(call: Callable[..., Any], *args: Any) -> Any:
    error, *values = call(*args)
    if int(error):
        raise KernelError(f"{call.__name__}: {error}")
    return values[0] if len(values) == 1 else values


def load_nvrtc() -> Any:
    """NVRTC's bindings, their library loaded. Raises: MemraError where a wheel is missing."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the library is looked for at the first call
    except (ImportError, RuntimeError):
        fail(
            "no-nvrtc",
            "compiling for CUDA needs the NVRTC wheels, which are not installed",
            hints=('pip install "memra[cuda]"',),
        )
    return nvrtc


def nvrtc_options(arch: CudaArch) -> list[str]:
    """What NVRTC is told of every kernel."""
    return [
        f"--gpu-architecture={arch.name}",
        "--std=c++17",
        "--fmad=false",  # every fused multiply-add is written as one: it is part of the class
        "--device-as-default-execution-space",
        *(f"--include-path={path}" for path in include_paths()),
    ]


def compile_cuda(source: str, name: str, arch: CudaArch, *, log: list[str] | None = None) -> bytes:
    """Compile CUDA source to a cubin for `arch`; `log` collects the compiler's resource report.

    No line numbers are kept: they would bring the current folder into the cubin.

    Raises: KernelError with NVRTC's log.
    """
    nvrtc = load_nvrtc()
    options = [*nvrtc_options(arch), *(["--ptxas-options=-v"] if log is not None else [])]
    program = _check(nvrtc.nvrtcCreateProgram, source.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        encoded = [option.encode() for option in options]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        # NVRTC writes into these; `b" " * 1` would be the one b" " that all of Python shares
        text = bytearray(_check(nvrtc.nvrtcGetProgramLogSize, program))
        _check(nvrtc.nvrtcGetProgramLog, program, text)
        messages = text.decode(errors="replace").strip("\0 \n")
        if log is not None:
            log.append(messages)
        if int(error):
            raise KernelError(f"{name} does not compile for {arch.name}:\n{messages}")
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize, program))
        _check(nvrtc.nvrtcGetCUBIN, program, cubin)
        return bytes(cubin)
    finally:
        _check(nvrtc.nvrtcDestroyProgram, program)

"""What an op says about its CUDA kernels: templates or scheduled functions, and their launches.

A kernel is `extern "C" __global__ void NAME(int rows, T0* operand0, ..., outputs, float* scratch)`:
the calling convention of the CPU kernels. Where an op needs several launches, each takes the same
arguments and they run in order. Lengths are read from the device block, never from the launch:
one grid serves every context length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memra_compiler.ir.types import TensorType

if TYPE_CHECKING:
    from memra_compiler.ops.base import Op

#: Columns of one tensor-core tile: up to eight rows of activations cost the same as one.
TILE_ROWS = 8


@dataclass(frozen=True)
class CudaArch:
    """What a kernel may use. `name` is NVRTC's (`sm_90a`)."""

    name: str
    multiprocessors: int
    shared_bytes: int
    bulk_copy: bool
    dependent_launch: bool


#: Multiprocessors are those of the common part; a grid of "sms" is filled in from the real device.
ARCHS = {
    "sm_80": CudaArch("sm_80", 108, 163 << 10, False, False),
    "sm_89": CudaArch("sm_89", 128, 99 << 10, False, False),
    "sm_90a": CudaArch("sm_90a", 132, 227 << 10, True, True),
    "sm_120a": CudaArch("sm_120a", 170, 99 << 10, True, True),
}


@dataclass(frozen=True)
class Launch:
    """One launch: a template, its typed parameters, and the shape of the grid.

    `grid` may hold the string "sms": one block a multiprocessor. `shared_bytes` is dynamic shared
    memory. `early` starts the block before its predecessor has finished (programmatic dependent
    launch); the template then waits itself before it touches an operand that is not a weight.
    `graph_handles` handles of conditional nodes follow the usual arguments: 0 outside of them.
    """

    template: str
    params: Any
    grid: tuple[int | str, int, int]
    block: int
    shared_bytes: int = 0
    early: bool = True
    graph_handles: int = 0

    def variables(self) -> dict[str, Any]:
        """The template's variables: the fields of `params`."""
        return {f.name: getattr(self.params, f.name) for f in dataclasses.fields(self.params)}


@dataclass(frozen=True)
class Argument:
    """A pointer that a kernel takes: its C type, its name, and its shape for the reader.

    `header` is that of our library which decodes it, if one must.
    """

    c_type: str
    name: str
    shape: str
    header: str = ""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """One launch of a function that TVM schedules (`ops/scheduled.py`), beside `Launch`.

    `function` is the scheduled TIR, `rule` the rule of `memra_schedules` that made it, `arguments`
    all that the op's kernels are called with.
    """

    rule: str
    function: Any
    arguments: tuple[Argument, ...]
    summary: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int = 0
    early: bool = True
    graph_handles: int = 0


AnyLaunch = Launch | Scheduled


def cuda_arch(target: str) -> CudaArch | None:
    """The architecture of a target `cuda:NAME`; None for any other target."""
    kind, _, name = target.partition(":")
    return ARCHS.get(name) if kind == "cuda" else None


def scratch_bytes(
    target: str, op: Op, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]
) -> int:
    """Scratch that a kernel of `op` needs on a target."""
    arch = cuda_arch(target)
    if arch is None:
        return 4 * op.scratch_floats(*inputs)
    return op.scratch_bytes_cuda(arch, *inputs, *outputs)

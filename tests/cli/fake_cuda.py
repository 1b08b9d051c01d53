"""A CUDA driver made of host memory, on which every line of the runtime runs without a GPU.

Copies are real, and so are the ops that decide a round: their NumPy references run in place of
their kernels. All other kernels do nothing; the target's choice is a function of the token before.
Time passes on a clock of its own, a microsecond a kernel.
"""

# ruff: noqa: N802, N815 (the names are CUDA's)

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda.bindings import driver as real

from memra_compiler.ir.graph import Module
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Op
from memra_runtime.artifact import Manifest, load_manifest, slot
from memra_runtime.device import cuda_driver

#: What is queued, in order.
Graph = list[Callable[[], None]]

#: Ops whose references run: those of the device block.
STATE_OPS = (
    "begin", "draft_token", "weigh_draft", "accept", "rollback", "commit", "adapt_depth",
    "advance", "again", "token_of_row",
)  # fmt: skip
ALIGN = 256
TOTAL_BYTES = 80 << 30
BYTES_PER_S = 4e12
#: Copies of so many bytes are there to be timed, and move nothing.
TIMED_BYTES = 32 << 20


def next_token(token: int) -> int:
    """What the fake target answers; from any start it soon leaves 0, which is always drafted."""
    return (7 * token + 11) % 4096


def confidence(state: npt.NDArray[np.int32]) -> float:
    """How sure the fake drafter is of the draft it just made: 0.00 to 1.00, by its position."""
    at = int(state[slot("position")]) + int(state[slot("step")])
    return float(37 * at * at % 101) / 100


def _state_ops(
    module: Module, manifest: Manifest
) -> Iterator[tuple[str, tuple[Op, tuple[TensorType, ...]]]]:
    """By symbol, the ops whose references run, with the types of their arguments."""
    for program in module.programs.values():
        nodes = [node for node in program.nodes if node.op.name in STATE_OPS]
        entries = manifest.launches[program.name]
        symbols = [e.symbol for e in entries if e.symbol.rpartition("_")[0] in STATE_OPS]
        for symbol, node in zip(symbols, nodes, strict=True):
            outputs = tuple(program.values[name] for name in node.outputs)
            yield symbol, (node.op, (*module.operand_types(program, node), *outputs))


class FakeDriver:
    """Stands in for `cuda.bindings.driver`; types and enumerations are the real ones."""

    def __init__(self, module: Module, manifest: Manifest, version: int = 13000) -> None:
        self.version = version
        self.clock = 0.0
        self.launched: list[str] = []
        self._ops = dict(_state_ops(module, manifest))
        self._memory: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._recording: list[Callable[[], None]] | None = None
        #: Values of conditions by handle, now and at the start of a launch.
        self._conditions: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AttributeError(f"the fake driver has no {name}")
        return getattr(real, name)

    @property
    def held_bytes(self) -> int:
        """What is allocated on the device."""
        return sum(self._sizes.values())

    def _do(self, work: Callable[[], None]) -> tuple[int]:
        """Run what is queued at once, or record it."""
        if self._recording is None:
            work()
        else:
            self._recording.append(work)
        return (0,)

    # -- context, memory -----------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, str]:
        return 0, "context"

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:
        return (0,)

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:
        return 0, b"NVIDIA Fake\0\0"

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[int, int]:
        values = {"CAPABILITY_MAJOR": 9, "CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}
        return 0, next(v for k, v in values.items() if attribute.name.endswith(k))

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, TOTAL_BYTES - self.held_bytes, TOTAL_BYTES

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        buffer = np.zeros(size + ALIGN, np.uint8)
        address = -(-buffer.ctypes.data // ALIGN) * ALIGN
        self._memory[address], self._sizes[address] = buffer, size
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        del self._memory[address], self._sizes[address]
        return (0,)

    def cuMemAllocHost(self, size: int) -> tuple[int, int]:
        _, address = self.cuMemAlloc(size)
        self._sizes[address] = 0  # not the device's
        return 0, address

    cuMemFreeHost = cuMemFree

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[int]:
        if size < TIMED_BYTES:
            ctypes.memset(address, value, size)
        return (0,)

    def cuMemcpyHtoD(self, target: int, source: int, size: int) -> tuple[int]:
        ctypes.memmove(target, source, size)
        return (0,)

    def cuMemcpyDtoH(self, target: int, source: int, size: int) -> tuple[int]:
        return self.cuMemcpyHtoD(target, source, size)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[int]:
        return self._do(partial(self._copy, target, source, size))

    cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoDAsync

    def _copy(self, target: int, source: int, size: int) -> None:
        self.clock += 2 * size / BYTES_PER_S
        if size < TIMED_BYTES:
            ctypes.memmove(target, source, size)

    # -- streams, graphs, events ---------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> tuple[int, Any]:
        return 0, real.CUstream(1)

    def cuStreamSynchronize(self, stream: Any) -> tuple[int]:
        assert self._recording is None, "waiting for a stream that is being captured"
        return (0,)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[int]:
        self._recording = []
        return (0,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[int, list[Callable[[], None]]]:
        assert self._recording is not None
        found, self._recording = self._recording, None
        return 0, found

    def cuStreamBeginCaptureToGraph(
        self, stream: Any, graph: Graph, after: Any, data: Any, count: int, mode: Any
    ) -> tuple[int]:
        assert (after is None) == (count == 0)
        self._recording = graph
        return (0,)

    def cuGraphCreate(self, flags: int) -> tuple[int, Graph]:
        return 0, []

    def cuGraphConditionalHandleCreate(
        self, graph: Graph, context: Any, first: int, flags: int
    ) -> tuple[int, int]:
        handle = 1000 + len(self._first)
        self._first[handle] = first
        return 0, handle

    @staticmethod
    def CUgraphNodeParams() -> Any:
        return SimpleNamespace(conditional=SimpleNamespace())

    def cuGraphAddNode(
        self, graph: Graph, after: Any, data: Any, count: int, params: Any
    ) -> tuple[int, str]:
        node = params.conditional
        node.phGraph_out = bodies = [[] for _ in range(node.size)]
        kinds = real.CUgraphConditionalNodeType
        if node.type == kinds.CU_GRAPH_COND_TYPE_WHILE:
            graph.append(partial(self._repeat, node.handle, bodies[0]))
        else:
            assert node.type == kinds.CU_GRAPH_COND_TYPE_SWITCH
            graph.append(partial(self._choose, node.handle, bodies))
        return 0, "node"

    def _repeat(self, handle: int, body: Graph) -> None:
        while self._conditions[handle]:
            self._run(body)

    def _choose(self, handle: int, bodies: list[Graph]) -> None:
        self._run(bodies[self._conditions[handle]])

    @staticmethod
    def _run(graph: Graph) -> None:
        for work in graph:
            work()

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        return 0, graph

    def cuGraphGetNodes(self, graph: Any, count: int) -> tuple[int, list[Any], int]:
        return 0, ["node"] * count, len(graph)

    def cuGraphLaunch(self, graph: Graph, stream: Any) -> tuple[int]:
        self._conditions = dict(self._first)
        self._run(graph)
        return (0,)

    def cuEventCreate(self, flags: int) -> tuple[int, list[float]]:
        return 0, [0.0]

    def cuEventRecord(self, event: list[float], stream: Any) -> tuple[int]:
        event[0] = self.clock
        return (0,)

    def cuEventSynchronize(self, event: list[float]) -> tuple[int]:
        return (0,)

    def cuEventQuery(self, event: list[float]) -> tuple[Any]:
        return (real.CUresult.CUDA_SUCCESS,)

    def cuEventElapsedTime(self, start: list[float], end: list[float]) -> tuple[int, float]:
        return 0, 1e3 * (end[0] - start[0])

    # -- kernels -------------------------------------------------------------------------------

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, bytes]:
        assert cubin[:4] == b"\x7fELF"
        return 0, cubin

    def cuModuleGetFunction(self, module: bytes, symbol: bytes) -> tuple[int, str]:
        assert symbol in module
        return 0, symbol.decode()

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[int]:
        return (0,)

    def cuLaunchKernelEx(
        self, config: Any, function: str, arguments: int, extra: int
    ) -> tuple[int]:
        op, types = self._ops.get(function, (None, ()))
        handles = 2 if op is not None and _steers(op) else 0
        table = (ctypes.c_uint64 * (1 + len(types) + handles)).from_address(arguments)
        rows = ctypes.c_int32.from_address(table[0]).value
        pointers = [ctypes.c_uint64.from_address(p).value for p in table[1:]]
        return self._do(partial(self._kernel, function, op, types, rows, pointers))

    def _kernel(
        self, symbol: str, op: Op | None, types: tuple[TensorType, ...], rows: int, at: list[int]
    ) -> None:
        self.clock += 1e-6
        self.launched.append(symbol)
        if op is None:
            return
        handles = at[len(types) :]
        arrays = [_view(p, type) for p, type in zip(at, types, strict=False)]
        if op.name == "accept":
            _, batch, choice = arrays
            choice[:] = [next_token(int(token)) for token in batch]
        count = len(op.operands)
        state = next((a for a, operand in zip(arrays, op.operands, strict=False)
                      if operand.name == "state"), None)  # fmt: skip
        if op.name == "weigh_draft":
            arrays[0][0] = confidence(state)
        results = op.reference(rows, *arrays[:count])
        for out, found in zip(arrays[count:], results, strict=True):
            out[: len(found)] = found
        if state is None:
            return
        count = {name: int(state[slot(name)]) for name in ("more", "depth", "step", "drafted")}
        chain = (int(count["step"] < count["drafted"]), count["drafted"])
        values = (count["more"], count["depth"]) if op.name == "again" else chain
        for handle, value in zip(handles, values, strict=False):
            if handle:
                self._conditions[handle] = value


def _steers(op: Op) -> bool:
    """Whether the kernel of an op takes handles of conditional nodes."""
    return op.name in ("weigh_draft", "again") or bool(op.attrs().get("cuts"))


def _view(address: int, type: TensorType) -> npt.NDArray[Any]:
    dtype = {"i32": np.int32, "head_row": np.int32, "f32": np.float32, "f16": np.float16}[
        type.dtype
    ]
    size = int(np.prod(type.max_shape)) * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(raw, dtype).reshape(type.max_shape)


@contextmanager
def in_place(module: Module, artifact: Path) -> Iterator[FakeDriver]:
    """The fake driver in place of the real one; whatever is allocated meanwhile must be freed."""
    fake = FakeDriver(module, load_manifest(artifact))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "driver", fake)
        yield fake
        gc.collect()  # what is freed is freed here, not by the real driver
        assert fake.held_bytes == 0

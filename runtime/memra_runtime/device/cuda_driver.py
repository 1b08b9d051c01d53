"""The part of the CUDA driver Memra uses: memory, streams, modules, launches, graphs.

One small class a CUDA noun, over `cuda.bindings.driver`. A failed call raises `DeviceError` with
the driver's own name for the error and what was being done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from memra_runtime.errors import fail

#: The stream of calls that name none; ours do not wait for it.
DEFAULT_STREAM = 0


class DeviceError(Exception):
    """A driver call failed in the middle of work: the context is not to be trusted any more."""


def call(function: Callable[..., Any], *args: Any, doing: str = "") -> Any:
    """The value of a driver call. Raises `DeviceError` naming call, error and `doing`."""
    error, *values = function(*args)
    if int(error):
        what = f" while {doing}" if doing else ""
        raise DeviceError(f"{function.__name__}: {error.name}{what}")
    return values[0] if len(values) == 1 else values


def _no_gpu(why: str) -> NoReturn:
    fail(
        "no-gpu",
        f"no usable NVIDIA GPU: {why}",
        hints=("compile with --target cpu to run on the processor",),
    )


class Context:
    """The primary context of one GPU."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            error = driver.cuInit(0)[0]
        except RuntimeError:  # the bindings look for the driver's library on the first call
            _no_gpu("the NVIDIA driver is not installed")
        count = driver.cuDeviceGetCount()[1] if not int(error) else 0
        if int(error) or ordinal >= count:
            _no_gpu(f"cuInit says {error.name}, {count} devices are visible")
        self.device = call(driver.cuDeviceGet, ordinal)
        self.handle = call(driver.cuDevicePrimaryCtxRetain, self.device)
        call(driver.cuCtxSetCurrent, self.handle)
        self.name = call(driver.cuDeviceGetName, 128, self.device).decode().strip("\0")
        attribute = driver.CUdevice_attribute
        prefix = "CU_DEVICE_ATTRIBUTE_"

        def get(name: str) -> int:
            return int(call(driver.cuDeviceGetAttribute, getattr(attribute, prefix + name),
                            self.device))  # fmt: skip

        self.capability = (get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR"))
        self.multiprocessors = get("MULTIPROCESSOR_COUNT")
        #: The newest CUDA the driver knows: 13000 is 13.0.
        self.driver_version = int(call(driver.cuDriverGetVersion))

    def free_memory(self) -> int:
        """Bytes a new allocation may take."""
        return int(call(driver.cuMemGetInfo)[0])


class Memory:
    """One allocation on the device; freed with the object."""

    def __init__(self, size: int, doing: str) -> None:
        self.size = size
        self.address = int(call(driver.cuMemAlloc, max(size, 1), doing=doing))

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            driver.cuMemFree(self.address)

    def write(self, offset: int, data: npt.NDArray[Any]) -> None:
        """Copy to the device and wait.

        The copy itself returns once its bytes are staged; no other stream waits for them.
        """
        flat = np.ascontiguousarray(data)
        call(driver.cuMemcpyHtoD, self.address + offset, flat.ctypes.data, flat.nbytes)
        call(driver.cuStreamSynchronize, DEFAULT_STREAM)

    def read(self, offset: int, out: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Copy from the device into `out` and wait."""
        call(driver.cuMemcpyDtoH, out.ctypes.data, self.address + offset, out.nbytes)
        return out

    def fill(self, value: int, offset: int = 0, size: int | None = None) -> None:
        """Set bytes and wait."""
        call(driver.cuMemsetD8, self.address + offset, value, size or self.size - offset)
        call(driver.cuStreamSynchronize, DEFAULT_STREAM)


class PinnedBuffer:
    """Page-locked host memory, as a byte array: copies to and from it need no staging."""

    def __init__(self, size: int) -> None:
        import ctypes

        self._pointer = call(driver.cuMemAllocHost, size)
        raw = (ctypes.c_uint8 * size).from_address(int(self._pointer))
        self.bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array(raw)

    @property
    def address(self) -> int:
        return int(self._pointer)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) is not None:
            driver.cuMemFreeHost(self._pointer)


class Stream:
    """A queue of device work."""

    def __init__(self) -> None:
        self.handle = call(
            driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        )

    def wait(self, doing: str = "") -> None:
        call(driver.cuStreamSynchronize, self.handle, doing=doing)

    def copy_out(self, out: PinnedBuffer, address: int, size: int, at: int = 0) -> None:
        """Queue a copy to pinned memory, to byte `at` of it."""
        call(driver.cuMemcpyDtoHAsync, out.address + at, address, size, self.handle)

    def copy_in(self, address: int, data: PinnedBuffer, size: int) -> None:
        """Queue a copy from pinned memory."""
        call(driver.cuMemcpyHtoDAsync, address, data.address, size, self.handle)

    def copy(self, address: int, source: int, size: int) -> None:
        """Queue a copy from one place on the device to another."""
        call(driver.cuMemcpyDtoDAsync, address, source, size, self.handle)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Record what `enqueue` puts on this stream as a graph, without running it."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(driver.cuStreamBeginCapture, self.handle, mode)
        try:
            enqueue()
        finally:
            graph = call(driver.cuStreamEndCapture, self.handle)
        return Graph(graph)


class Graph:
    """A captured graph, ready to launch. It does not own the buffers its nodes touch."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._executable = call(driver.cuGraphInstantiate, graph, 0)

    def launch(self, stream: Stream) -> None:
        call(driver.cuGraphLaunch, self._executable, stream.handle)


class GraphDraft:
    """A graph under construction: the root, or the body of a conditional node of another."""

    def __init__(self, context: Context, graph: Any = None) -> None:
        self._context = context
        self._graph = call(driver.cuGraphCreate, 0) if graph is None else graph

    def condition(self, first: int) -> int:
        """The handle of a conditional node to be; kernels set its value, which begins as `first`
        at each launch."""
        assign = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        context = self._context.handle
        return int(call(driver.cuGraphConditionalHandleCreate, self._graph, context, first, assign))

    def add_while(self, handle: int, after: Any = None) -> tuple[Any, list[GraphDraft]]:
        """Add a node whose body repeats while the condition is not zero."""
        kinds = driver.CUgraphConditionalNodeType
        return self._add(kinds.CU_GRAPH_COND_TYPE_WHILE, handle, 1, after)

    def add_switch(
        self, handle: int, count: int, after: Any = None
    ) -> tuple[Any, list[GraphDraft]]:
        """Add a node that runs the body the condition counts to; none where there is no such."""
        kinds = driver.CUgraphConditionalNodeType
        return self._add(kinds.CU_GRAPH_COND_TYPE_SWITCH, handle, count, after)

    def _add(self, kind: Any, handle: int, count: int, after: Any) -> tuple[Any, list[GraphDraft]]:
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = kind
        params.conditional.size = count
        params.conditional.ctx = self._context.handle
        before = [after] if after is not None else []
        node = call(driver.cuGraphAddNode, self._graph, before, None, len(before), params)
        bodies = [params.conditional.phGraph_out[i] for i in range(count)]
        return node, [GraphDraft(self._context, body) for body in bodies]

    def last(self) -> Any:
        """The only node so far."""
        nodes, count = call(driver.cuGraphGetNodes, self._graph, 1)
        if count != 1:
            raise DeviceError(f"a graph that should have one node has {count}")
        return nodes[0]

    def capture(self, stream: Stream, enqueue: Callable[[], None], after: Any = None) -> None:
        """Add what `enqueue` puts on the stream, behind `after` if given."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        before = [after] if after is not None else []
        call(driver.cuStreamBeginCaptureToGraph, stream.handle, self._graph, before or None, None,
             len(before), mode)  # fmt: skip
        try:
            enqueue()
        finally:
            call(driver.cuStreamEndCapture, stream.handle)

    def finish(self) -> Graph:
        """Make the root graph ready to launch."""
        return Graph(self._graph)


class Event:
    """A point in a stream's time."""

    def __init__(self) -> None:
        self.handle = call(driver.cuEventCreate, 0)

    def record(self, stream: Stream) -> None:
        call(driver.cuEventRecord, self.handle, stream.handle)

    def wait(self) -> None:
        """Wait until the event has happened."""
        call(driver.cuEventSynchronize, self.handle)

    def happened(self, doing: str = "") -> bool:
        """Whether it has; raises `DeviceError` if the work before it failed."""
        error = driver.cuEventQuery(self.handle)[0]
        if error == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        call(lambda: (error,), doing=doing)
        return True

    def since(self, earlier: Event) -> float:
        """Seconds from `earlier` to this event, once both have happened."""
        call(driver.cuEventSynchronize, self.handle)
        return float(call(driver.cuEventElapsedTime, earlier.handle, self.handle)) / 1e3


@dataclass(frozen=True)
class LaunchShape:
    """Grid, block and dynamic shared memory of a launch."""

    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    early: bool


class Kernel:
    """One kernel with its arguments bound: launching it is one driver call."""

    def __init__(
        self, function: Any, name: str, shape: LaunchShape, pointers: Sequence[int]
    ) -> None:
        self.name, self.shape = name, shape
        self._function = function
        self._rows = np.zeros(1, np.int32)
        self._pointers = np.array(pointers, np.uint64)
        base = self._pointers.ctypes.data
        self._arguments = np.array(
            [self._rows.ctypes.data, *(base + 8 * i for i in range(len(pointers)))], np.uint64
        )
        self._config = driver.CUlaunchConfig()
        c = self._config
        c.gridDimX, c.gridDimY, c.gridDimZ = shape.grid
        c.blockDimX, c.blockDimY, c.blockDimZ = shape.block, 1, 1
        c.sharedMemBytes = shape.shared_bytes
        if shape.early:
            early = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            c.attrs, c.numAttrs = [early], 1

    def launch(self, stream: Stream, rows: int) -> None:
        """Queue the kernel for `rows` rows."""
        self._rows[0] = rows
        self._config.hStream = stream.handle
        doing = f"launching {self.name} with grid {self.shape.grid}, block {self.shape.block}"
        call(
            driver.cuLaunchKernelEx,
            self._config,
            self._function,
            self._arguments.ctypes.data,
            0,
            doing=doing,
        )


class Modules:
    """Loaded cubins, one a kernel."""

    def __init__(self) -> None:
        self._modules: list[Any] = []

    def function(self, cubin: bytes, symbol: str, shared_bytes: int) -> Any:
        """Load a cubin and return its kernel, allowed to use `shared_bytes`."""
        module = call(driver.cuModuleLoadData, cubin, doing=f"loading {symbol}")
        self._modules.append(module)
        function = call(driver.cuModuleGetFunction, module, symbol.encode())
        if shared_bytes > 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuFuncSetAttribute, function, attribute, shared_bytes)
        return function

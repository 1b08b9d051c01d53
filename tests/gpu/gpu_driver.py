"""Just enough of the CUDA driver for tests of single kernels: arrays in, launches, arrays out."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver
from scheduled_bundle import Bundled, rendered

from memra_compiler.codegen.cuda import compile_cuda
from memra_compiler.ops.cuda import ARCHS, AnyLaunch, CudaArch


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; its error as an exception."""
    error, *values = result
    if int(error):
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else values


def gpu_capability() -> tuple[int, int]:
    """Compute capability of the first GPU. Raises: RuntimeError where there is none."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    prefix = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"
    names = (getattr(driver.CUdevice_attribute, prefix + part) for part in ("MAJOR", "MINOR"))
    major, minor = (int(check(driver.cuDeviceGetAttribute(name, device))) for name in names)
    return major, minor


def arch_of(capability: tuple[int, int]) -> CudaArch:
    """The architecture to compile for: the GPU's own, or an older one of its family.

    Raises: LookupError for a GPU that none of ours runs on.
    """
    major, minor = capability
    for name, arch in reversed(ARCHS.items()):
        number = int(name.removeprefix("sm_").rstrip("a"))
        if number == 10 * major + minor:
            return arch
        if not name.endswith("a") and number // 10 == major and number % 10 < minor:
            return arch
    raise LookupError(f"no kernel is compiled for compute capability {major}.{minor}")


def found_arch() -> CudaArch:
    """The architecture of the first GPU; `sm_90a` where there is none, so that cases exist."""
    try:
        return arch_of(gpu_capability())
    except (LookupError, RuntimeError):  # an unknown GPU; no driver, or no device
        return ARCHS["sm_90a"]


#: What kernels of the tests are made for.
ARCH = found_arch()


@cache
def symbol_of(launch: AnyLaunch | Bundled, name: str) -> str:
    """The C symbol of a launch: rendering takes longer than launching."""
    return rendered(launch, name)[0]


class Gpu:
    """One context on the first GPU. Raises: RuntimeError where there is none."""

    def __init__(self) -> None:
        check(driver.cuInit(0))
        self.device = check(driver.cuDeviceGet(0))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.device))
        check(driver.cuCtxSetCurrent(self.context))
        count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.multiprocessors = check(driver.cuDeviceGetAttribute(count, self.device))
        arch_of(gpu_capability())  # a GPU that our kernels do not run on is an error, not a skip
        self.functions: dict[str, Any] = {}

    def upload(self, array: np.ndarray, guard: int = 256) -> int:
        """Copy an array to the device, with `guard` bytes of 0xAB behind it."""
        flat = np.ascontiguousarray(array)
        address = int(check(driver.cuMemAlloc(flat.nbytes + guard)))
        check(driver.cuMemsetD8(address, 0xAB, flat.nbytes + guard))
        check(driver.cuMemcpyHtoD(address, flat.ctypes.data, flat.nbytes))
        return address

    def download(self, address: int, like: np.ndarray, guard: int = 256) -> np.ndarray:
        """Copy back; the guard bytes must be untouched."""
        out = np.empty(like.nbytes + guard, np.uint8)
        check(driver.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
        assert (out[like.nbytes :] == 0xAB).all(), "a kernel wrote past the end of a buffer"
        return out[: like.nbytes].view(like.dtype).reshape(like.shape)

    def free(self, addresses: Iterable[int]) -> None:
        """Give buffers back."""
        for address in addresses:
            check(driver.cuMemFree(address))

    def prepare(self, named: Iterable[tuple[AnyLaunch | Bundled, str]], arch: CudaArch) -> None:
        """Compile launches that are not compiled yet, on all cores: most of a test's time."""
        wanted: dict[str, tuple[AnyLaunch | Bundled, str]] = {}
        for launch, name in named:
            symbol = symbol_of(launch, name)
            if symbol not in self.functions and symbol not in wanted:
                wanted[symbol] = launch, rendered(launch, name)[1]
        with ThreadPoolExecutor() as pool:
            made = {s: pool.submit(compile_cuda, text, s, arch) for s, (_, text) in wanted.items()}
        for symbol, cubin in made.items():
            module = check(driver.cuModuleLoadData(cubin.result()))
            function = check(driver.cuModuleGetFunction(module, symbol.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, wanted[symbol][0].shared_bytes))
            self.functions[symbol] = function

    def function(self, launch: AnyLaunch | Bundled, name: str, arch: CudaArch) -> Any:
        """The loaded kernel of a launch."""
        symbol = symbol_of(launch, name)
        if symbol not in self.functions:
            self.prepare([(launch, name)], arch)
        return self.functions[symbol]

    def run(self, launches: tuple[AnyLaunch | Bundled, ...], name: str, arch: CudaArch, rows: int,
            pointers: list[int]) -> None:  # fmt: skip
        """Run the launches of one op in order, outside of any graph, and wait."""
        count = np.array([rows], np.int32)
        for launch in launches:
            taken = np.array([*pointers, *[0] * launch.graph_handles], np.uint64)
            addresses = [taken.ctypes.data + 8 * i for i in range(len(taken))]
            arguments = np.array([count.ctypes.data, *addresses], np.uint64)
            grid = [self.multiprocessors if g == "sms" else int(g) for g in launch.grid]
            check(
                driver.cuLaunchKernel(
                    self.function(launch, name, arch), *grid, launch.block, 1, 1,
                    launch.shared_bytes, 0, arguments.ctypes.data, 0,
                )
            )  # fmt: skip
        check(driver.cuCtxSynchronize())

"""Just enough of the CUDA driver for tests of single kernels: arrays in, launches, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver

from memra_compiler.codegen.cuda import compile_cuda, render
from memra_compiler.ops.cuda import AnyLaunch, CudaArch


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; its error as an exception."""
    error, *values = result
    if int(error):
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else values


class Gpu:
    """One context on the first GPU."""

    def __init__(self) -> None:
        check(driver.cuInit(0))
        self.device = check(driver.cuDeviceGet(0))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.device))
        check(driver.cuCtxSetCurrent(self.context))
        count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.multiprocessors = check(driver.cuDeviceGetAttribute(count, self.device))
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

    def function(self, launch: AnyLaunch, name: str, arch: CudaArch) -> Any:
        symbol, source = render(launch, name)
        if symbol not in self.functions:
            cubin = compile_cuda(source, symbol, arch)
            module = check(driver.cuModuleLoadData(cubin))
            function = check(driver.cuModuleGetFunction(module, symbol.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, launch.shared_bytes))
            self.functions[symbol] = function
        return self.functions[symbol]

    def run(self, launches: tuple[AnyLaunch, ...], name: str, arch: CudaArch, rows: int,
            pointers: list[int]) -> None:  # fmt: skip
        """Run the launches of one op in order and wait."""
        values = np.array([rows], np.int32), np.array(pointers, np.uint64)
        addresses = [values[0].ctypes.data]
        addresses += [values[1].ctypes.data + 8 * i for i in range(len(pointers))]
        arguments = np.array(addresses, np.uint64)
        for launch in launches:
            grid = [self.multiprocessors if g == "sms" else int(g) for g in launch.grid]
            check(
                driver.cuLaunchKernel(
                    self.function(launch, name, arch), *grid, launch.block, 1, 1,
                    launch.shared_bytes, 0, arguments.ctypes.data, 0,
                )
            )  # fmt: skip
        check(driver.cuCtxSynchronize())

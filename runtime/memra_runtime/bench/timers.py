"""Who times programs, and with which clock: a call on the CPU, events around graphs on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from memra_runtime.device import Device

#: Programs of a round by the column they are reported under; the others are `rest`.
COLUMNS = {"draft": "draft", "verify": "verify", "plain_step": "verify"}


class Timer(Protocol):
    """Times parts of an artifact on one device."""

    #: What the device calls itself.
    name: str

    def parts(self, sequence: str, depth: int) -> dict[str, list[float]]:
        """Run a sequence program by program; seconds of each run, by program.

        The device block must say that `depth` drafts are next, and is left as after the sequence.
        """

    def kernels(self, program: str, at: Sequence[int], rows: int) -> float:
        """Seconds of those launches of a program alone, one after another (CUDA only)."""


class CallTimer:
    """The CPU: a program is one call."""

    def __init__(self, device: Device) -> None:
        from memra_runtime.bench.measure import cpu_name

        self._device = device
        self.name = cpu_name()

    def parts(self, sequence: str, depth: int) -> dict[str, list[float]]:
        spent: dict[str, list[float]] = {}
        for program, repeat in self._device.manifest.sequences[sequence]:
            for _ in range(depth if repeat else 1):
                start = time.perf_counter()
                self._device.launch(f"run_{program}")
                spent.setdefault(program, []).append(time.perf_counter() - start)
        return spent

    def kernels(self, program: str, at: Sequence[int], rows: int) -> float:
        raise NotImplementedError("a program for the CPU is one function")


def timer_for(device: Device) -> Timer:
    """The timer of a device."""
    if device.manifest.target == "cpu":
        return CallTimer(device)
    from memra_runtime.device.cuda import CudaDevice
    from memra_runtime.device.cuda_timing import GraphTimer

    if not isinstance(device, CudaDevice):
        raise TypeError(f"no timer for {type(device).__name__}")
    return GraphTimer(device)

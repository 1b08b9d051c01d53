"""Who times programs, and with which clock: a call on the CPU, events around graphs on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from memra_runtime.bench import measure
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

    def copy_gb_s(self) -> float:
        """Bandwidth of the memory that holds weights and caches: a large copy, reads + writes."""


@runtime_checkable
class KernelTimer(Timer, Protocol):
    """A timer on a device where a program is a list of launches."""

    def kernels(self, program: str, at: Sequence[int], rows: int) -> float:
        """Seconds of some launches of a program alone, one after another."""


class CallTimer:
    """The CPU: a program is one call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.name = measure.cpu_name()

    def parts(self, sequence: str, depth: int) -> dict[str, list[float]]:
        """Run a sequence program by program; seconds of each run, by program."""
        spent: dict[str, list[float]] = {}
        for program, repeat in self._device.manifest.sequences[sequence]:
            for _ in range(depth if repeat else 1):
                start = time.perf_counter()
                self._device.launch(f"run_{program}")
                spent.setdefault(program, []).append(time.perf_counter() - start)
        return spent

    def copy_gb_s(self) -> float:
        """Bandwidth of a copy of an array too large for the caches."""
        return measure.copy_gb_s(measure.large_copy_bytes())


def timer_for(device: Device) -> Timer:
    """The timer of a device."""
    if device.manifest.target == "cpu":
        return CallTimer(device)
    from memra_runtime.device.cuda import CudaDevice
    from memra_runtime.device.cuda_timing import GraphTimer

    if not isinstance(device, CudaDevice):
        raise TypeError(f"no timer for {type(device).__name__}")
    return GraphTimer(device)

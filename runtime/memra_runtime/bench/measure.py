"""How to time: one core, many repeats, medians; and the floor this machine sets."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memra_runtime.artifact import Manifest
from memra_runtime.device.memory import available_memory

_MIB = 1 << 20


@dataclass(frozen=True)
class Times:
    """Repeated timings of one thing."""

    median_ms: float
    min_ms: float
    max_ms: float
    repeat_count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        ms = [1e3 * s for s in seconds]
        return Times(statistics.median(ms), min(ms), max(ms), len(ms))


@dataclass(frozen=True)
class Floor:
    """What this machine can do at best; a program is measured against `basis_gb_s`.

    A copy of n bytes moves 2n: it reads and writes. `cached_gb_s` copies as many bytes as the
    weights have, over and over, so it shows the caches where the weights fit them. What is None is
    not measured: on a GPU, all but its memory.
    """

    memory_gb_s: float
    weights_bytes: int
    arena_bytes: int
    basis: str = "memory"
    cached_gb_s: float | None = None
    matmul_gflop_s: float | None = None
    cache_bytes: int | None = None

    @property
    def basis_gb_s(self) -> float:
        return (self.cached_gb_s if self.basis == "cached" else None) or self.memory_gb_s

    def ms(self, count: int) -> float:
        """Least time to move `count` bytes."""
        return count / self.basis_gb_s / 1e6


@contextmanager
def quiet_core(*, pin: bool = True) -> Iterator[int | None]:
    """Stay on one core, without garbage collection; both are restored. None: is not pinned.

    A GPU's driver has threads of its own, which should not share one core: there, do not pin.
    """
    allowed = os.sched_getaffinity(0) if pin and hasattr(os, "sched_setaffinity") else None
    core = max(allowed) if allowed else None
    collecting = gc.isenabled()
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        gc.disable()
        yield core
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
        if collecting:
            gc.enable()


def seconds(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_floor(manifest: Manifest, memory_gb_s: float) -> Floor:
    """The floor of a device whose memory copies at `memory_gb_s`."""
    if manifest.target == "cpu":
        return measure_cpu_floor(manifest, memory_gb_s)
    return Floor(memory_gb_s, manifest.weight_bytes, manifest.arena_bytes)


def large_copy_bytes() -> int:
    """Bytes of an array that the caches of this machine do not hold, and its memory does."""
    spare = max(_MIB, (available_memory() or 0) // 8)
    return min(512 * _MIB, max(64 * _MIB, largest_cache()), spare)


def measure_cpu_floor(manifest: Manifest, memory_gb_s: float) -> Floor:
    """Copy within the caches, and multiply, for a second."""
    weights, arena, cache = manifest.weight_bytes, manifest.arena_bytes, largest_cache()
    # both halves of the small copy together are as large as the weights
    small = max(_MIB, min(weights // 2, large_copy_bytes()))
    fits = bool(cache) and weights + arena <= cache
    return Floor(
        memory_gb_s, weights, arena, "cached" if fits else "memory", copy_gb_s(small),
        matmul_gflop_s(), cache,
    )  # fmt: skip


def copy_gb_s(size: int) -> float:
    """Bandwidth of a NumPy copy of `size` bytes; the best of several."""
    source, target = np.ones(size // 8), np.ones(size // 8)
    repeat = max(5, min(200, (1 << 29) // size))
    return 2 * source.nbytes / min(seconds(lambda: np.copyto(target, source))
                                   for _ in range(repeat)) / 1e9  # fmt: skip


def matmul_gflop_s(size: int = 512) -> float:
    """Speed of NumPy's matrix product in float32; the best of several."""
    a, b, c = (np.ones((size, size), np.float32) for _ in range(3))
    return 2 * size**3 / min(seconds(lambda: np.matmul(a, b, out=c)) for _ in range(10)) / 1e9


def largest_cache() -> int:
    """Bytes of the largest cache of core 0; 0 where it is not known."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    best = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text[:-1].isdigit() and text[-1:] in units:
            best = max(best, int(text[:-1]) * units[text[-1]])
    return best


def cpu_name() -> str:
    """The processor as it calls itself."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in lines.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"

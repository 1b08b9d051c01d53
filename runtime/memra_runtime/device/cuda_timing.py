"""Times on the GPU's own clock: events around graphs of programs, of kernels, and of copies.

An event is stamped when the GPU reaches it. On an idle GPU that is before the host has queued what
follows, and the host would be timed. So a few copies, which take longer than queueing, go first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from memra_runtime.device.cuda import CudaDevice
from memra_runtime.device.cuda_driver import Event, Graph, Memory, Stream

#: The largest copy whose bandwidth is measured, and the copies that keep the GPU busy.
COPY_BYTES = 1 << 30
BUSY_BYTES, BUSY_COPIES = 128 << 20, 6
_MIB = 1 << 20


class GraphTimer:
    """Programs and kernels of a device as graphs of their own, each captured once."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._stream = device, device.stream
        self.name = device.context.name
        self._graphs: dict[tuple[str, tuple[int, ...], int], Graph] = {}
        self._marks = [Event()]
        spare = device.context.free_memory() // 8 // _MIB * _MIB
        self._busy_bytes = max(_MIB, min(BUSY_BYTES, spare))
        self._busy = Memory(2 * self._busy_bytes, "allocating what keeps the GPU busy")

    def parts(self, sequence: str, depth: int) -> dict[str, list[float]]:
        """Run a sequence program by program; seconds of each run, by program."""
        manifest = self._device.manifest
        order = [
            (program, self._graph(program, (), depth + 1 if manifest.rows_from[program] else 1))
            for program, repeat in manifest.sequences[sequence]
            for _ in range(depth if repeat else 1)
        ]
        times = self._run([graph.launch for _, graph in order])
        self._device.refresh()
        spent: dict[str, list[float]] = {}
        for (program, _), seconds in zip(order, times, strict=True):
            spent.setdefault(program, []).append(seconds)
        return spent

    def kernels(self, program: str, at: Sequence[int], rows: int) -> float:
        """Seconds of those launches of a program alone, one after another as in the program.

        What comes before the first of them runs first: a kernel may read how far to go.
        """
        for kernel in self._device.kernels(program)[: at[0]]:
            kernel.launch(self._stream, rows)
        (seconds,) = self._run([self._graph(program, tuple(at), rows).launch])
        self._device.refresh()
        return seconds

    def copy_gb_s(self, repeat: int = 10) -> float:
        """Bandwidth of a copy on the GPU, of 1 GiB or a quarter of what is free; reads + writes."""
        size = min(COPY_BYTES, self._device.context.free_memory() // 4 // _MIB * _MIB)
        source, target = (Memory(size, "allocating a copy to measure") for _ in range(2))
        source.fill(1)

        def copy(stream: Stream) -> None:
            stream.copy(target.address, source.address, size)

        return 2 * size / min(self._run([copy])[0] for _ in range(repeat)) / 1e9

    def _graph(self, program: str, at: tuple[int, ...], rows: int) -> Graph:
        """A graph of launches of a program; of all, if none are chosen."""
        key = (program, at, rows)
        if key not in self._graphs:
            kernels = self._device.kernels(program)
            chosen = [kernels[i] for i in at] if at else kernels

            def enqueue() -> None:
                for kernel in chosen:
                    kernel.launch(self._stream, rows)

            self._graphs[key] = self._stream.capture(enqueue)
        return self._graphs[key]

    def _run(self, work: Sequence[Callable[[Stream], None]]) -> list[float]:
        """Seconds of each piece of work, queued one after another."""
        self._marks += [Event() for _ in range(len(work) + 1 - len(self._marks))]
        marks = self._marks[: len(work) + 1]
        for _ in range(BUSY_COPIES):
            ahead = self._busy.address + self._busy_bytes
            self._stream.copy(ahead, self._busy.address, self._busy_bytes)
        marks[0].record(self._stream)
        for enqueue, mark in zip(work, marks[1:], strict=True):
            enqueue(self._stream)
            mark.record(self._stream)
        return [end.since(start) for start, end in pairwise(marks)]

"""The CUDA device: one arena and one weight slab on the GPU, programs as launch lists, graphs.

Eager mode and captured graphs walk the same launch lists. The host sees the device through a mirror
of the first planes (counters, batch, ring) that the last node of a sequence refreshes: one launch
and one small read a round. A burst is one launch for many rounds (`cuda_loop`); the host then reads
the mirror as often as it likes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import LaunchEntry, Manifest, PlaneEntry, ValueEntry, slot
from memra_runtime.device import DTYPES, Progress
from memra_runtime.device.cuda_driver import (
    Context,
    Event,
    Graph,
    Kernel,
    LaunchShape,
    Memory,
    Modules,
    PinnedBuffer,
    Stream,
)
from memra_runtime.device.cuda_loop import CutRound, can_loop, capture_burst, capture_round
from memra_runtime.device.cuda_upload import RowWriter, upload_weights
from memra_runtime.device.memory import Kept, Spans, weights_fingerprint
from memra_runtime.errors import fail

#: Tokens of a burst at most: what an interrupted run has to wait for.
BURST_TOKENS = 64

#: Planes at the head of the arena that the host mirrors.
MIRRORED = ("state", "batch", "choice", "ring")


class DevicePlane:
    """A plane on the device that reads and writes like an array; every access is a copy."""

    def __init__(self, device: CudaDevice, place: PlaneEntry | ValueEntry) -> None:
        self._device, self._place = device, place
        self.shape = place.shape
        self.dtype = np.dtype(DTYPES[place.dtype])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._device.download(self._place)

    def __getitem__(self, at: Any) -> Any:
        return self._device.download(self._place)[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if at is Ellipsis:  # all of it is written, so nothing need be read
            whole = np.empty(self.shape, self.dtype)
        else:
            whole = self._device.download(self._place)
        whole[at] = value
        self._device.upload(self._place, whole)

    def __len__(self) -> int:
        return int(self.shape[0])

    def view(self, dtype: Any) -> npt.NDArray[Any]:
        return self._device.download(self._place).view(dtype)

    def copy(self) -> npt.NDArray[Any]:
        return self._device.download(self._place)

    def tolist(self) -> list[Any]:
        return list(self._device.download(self._place).tolist())


@dataclass(frozen=True)
class DeviceBytes:
    """Kept bytes that lie on the GPU."""

    memory: Memory

    def bytes(self) -> npt.NDArray[np.uint8]:
        """A copy of them on the host."""
        return self.memory.read(0, np.empty(self.memory.size, np.uint8))


class CudaDevice:
    """Runs an artifact's programs on a GPU. Planes read and write like those of the CPU device."""

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        weights: Sequence[npt.NDArray[np.uint8]],
        *,
        graphs: bool = True,
        context: Context | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.manifest = manifest
        self.context = context or Context()
        self._check_capability()
        self.stream = Stream()
        self.graphs = graphs
        self.loops = graphs and can_loop(self.context)
        self.burst_tokens = BURST_TOKENS if self.loops else 1
        self._modules = Modules()
        self._functions = self._load(folder)
        self._places = {p.id: p for p in manifest.planes}
        self.weights_id = weights_fingerprint(manifest, weights)
        # the arena first: should there be no room, it is known before gigabytes are uploaded
        self._arena = Memory(manifest.arena_bytes, "allocating the arena")
        self._weights, self._addresses = upload_weights(
            manifest, weights, self._functions, self.context, self.stream, progress
        )
        self._row_writer: RowWriter | None = None
        if manifest.head is not None:
            self._row_writer = RowWriter(
                manifest, self._addresses, self._functions, self.context, self.stream
            )
        self._use_arena(self._arena)

    def _use_arena(self, arena: Memory) -> None:
        """Bind programs, mirror and counts to an arena; graphs are captured as they are needed."""
        self._arena = arena
        arena.fill(0)
        self._programs = {
            name: [self._bind(entry) for entry in entries]
            for name, entries in self.manifest.launches.items()
        }
        self._graphs: dict[tuple[str, int], Graph] = {}
        last = self._places[MIRRORED[-1]]
        self._mirror_bytes = last.offset + int(np.prod(last.shape)) * 4
        self._mirror = PinnedBuffer(self._mirror_bytes)
        self.state = self._mirrored(self._places["state"])
        self._running = ""
        self._end = Event()
        #: Graph launches and host reads since loading: what a round costs the host.
        self.launches = self.reads = self.texts = 0

    def _check_capability(self) -> None:
        """Refuse a GPU of another architecture than the code was compiled for."""
        wanted = self.manifest.target.removeprefix("cuda:sm_")
        major, minor = self.context.capability
        exact = wanted.endswith("a")
        number = int(wanted.rstrip("a"))
        fits = number == 10 * major + minor if exact else (
            number // 10 == major and number % 10 <= minor)  # fmt: skip
        if not fits:
            fail(
                "target",
                f"the artifact was compiled for `{self.manifest.target}`; {self.context.name} has "
                f"compute capability {major}.{minor}",
                hints=("compile the spec for this GPU with --target",),
            )

    def _load(self, folder: Path) -> dict[str, Any]:
        shared: dict[str, int] = {}
        for entries in (*self.manifest.launches.values(), self.manifest.repacks):
            for entry in entries:
                shared[entry.symbol] = max(shared.get(entry.symbol, 0), entry.shared_bytes)
        return {
            symbol: self._modules.function(
                (folder / "kernels" / f"{symbol}.cubin").read_bytes(), symbol, size
            )
            for symbol, size in shared.items()
        }

    def _bind(self, entry: LaunchEntry, handles: tuple[int, int] = (0, 0)) -> Kernel:
        """A launch with its arguments: weights, arena, and handles of conditional nodes."""

        def argument(space: str, at: int) -> int:
            if space == "graph":
                return handles[at]
            return self._addresses[at] if space == "weight" else self._arena.address + at

        pointers = [argument(space, at) for space, at in entry.operands]
        sms = self.context.multiprocessors
        grid = tuple(sms if g == "sms" else int(g) for g in entry.grid)
        shape = LaunchShape(
            (grid[0], grid[1], grid[2]), entry.block, entry.shared_bytes, entry.early
        )
        return Kernel(self._functions[entry.symbol], entry.symbol, shape, pointers)

    # -- what the host sees ------------------------------------------------------------------------

    def _mirrored(self, place: PlaneEntry) -> npt.NDArray[np.int32]:
        size = int(np.prod(place.shape)) * 4
        return self._mirror.bytes[place.offset : place.offset + size].view(np.int32)

    def download(self, place: PlaneEntry | ValueEntry) -> npt.NDArray[Any]:
        """Copy a plane or value to the host; a mirrored one is there already."""
        if isinstance(place, PlaneEntry) and place.id in MIRRORED:
            return self._mirrored(place).reshape(place.shape).copy()
        self.stream.wait()
        return self._arena.read(place.offset, np.empty(place.shape, DTYPES[place.dtype]))

    def upload(self, place: PlaneEntry | ValueEntry, data: npt.NDArray[Any]) -> None:
        """Copy a plane to the device; only between launches."""
        self.stream.wait()
        self._arena.write(place.offset, data.astype(DTYPES[place.dtype], copy=False))
        if isinstance(place, PlaneEntry) and place.id in MIRRORED:
            self._mirrored(place)[:] = data.reshape(-1)

    def write_rows(self, weight: str, rows: npt.NDArray[np.uint8], first: int, last: int) -> None:
        """Replace rows of a trimmed head; only between launches."""
        if self._row_writer is None or self._row_writer.weight != weight:
            raise KeyError(f"{weight} is no trimmed head")
        self.stream.wait()
        self._row_writer.write(rows, first, last)

    def plane(self, name: str) -> DevicePlane:
        """A plane; reading and writing it copies."""
        return DevicePlane(self, self._places[name])

    def value(self, program: str, name: str) -> npt.NDArray[Any]:
        """A copy of a result that `program` left in the arena."""
        for place in self.manifest.values:
            if (place.program, place.id) == (program, name):
                return self.download(place)
        raise KeyError(f"{program} keeps no value {name}")

    def get(self, counter: str) -> int:
        """A counter, as of the end of the last launch."""
        return int(self.state[slot(counter)])

    def put(self, counters: Mapping[str, int]) -> None:
        """Write counters; only between launches."""
        for name, value in counters.items():
            self.state[slot(name)] = value
        self.upload(self._places["state"], self.state.copy())

    def memory(self) -> int:
        """Bytes held on the device."""
        return self._arena.size + self._weights.size

    def free(self) -> int | None:
        """What the GPU has left."""
        return self.context.free_memory()

    def another(self) -> CudaDevice:
        """A device with an arena of its own, over the same weights, kernels and stream.

        One stream: what two devices queue runs one after the other, as on one.
        """
        twin = copy.copy(self)
        twin._use_arena(Memory(self.manifest.arena_bytes, "allocating another arena"))
        return twin

    def keep(self, spans: Spans) -> DeviceBytes:
        """Copy parts of the arena aside, on the GPU."""
        kept = DeviceBytes(Memory(sum(size for _, size in spans), "keeping a text"))
        at = kept.memory.address
        for offset, size in spans:
            self.stream.copy(at, self._arena.address + offset, size)
            at += size
        self.stream.wait("keeping a text")
        return kept

    def put_back(self, spans: Spans, kept: Kept) -> None:
        """Write what was kept, on this GPU or elsewhere."""
        self.stream.wait()
        source = kept.memory.address if isinstance(kept, DeviceBytes) else kept.bytes()
        at = 0
        for offset, size in spans:
            if isinstance(source, int):
                self.stream.copy(self._arena.address + offset, source + at, size)
            else:
                self._arena.write(offset, source[at : at + size])
            at += size
        self.stream.wait("putting a text back")

    def kernels(self, program: str) -> list[Kernel]:
        """The bound kernels of a program, in launch order (for benches)."""
        return self._programs[program]

    def refresh(self) -> None:
        """Wait, and bring the mirror up to date, after kernels that were queued by hand."""
        self._finish("kernels queued by hand")

    @property
    def whole(self) -> bool:
        """Whether a round is one graph launch."""
        return self.graphs

    def runs(self, sequence: str) -> str:
        """How a sequence runs here."""
        cuts = self._cuts(sequence)
        if self.loops:
            doubt = ", chains ended by doubt" if cuts else ""
            return f"graph: {sequence}{doubt}, repeated on the GPU (one launch a burst)"
        if self.graphs:
            doubt = (", chains ended by doubt only after all their drafts are made: the driver is "
                     "older than CUDA 12.8" if cuts else "")  # fmt: skip
            return f"graph: {sequence}{doubt} (one launch and one host read)"
        doubt = ", a host read a draft," if cuts else ","
        return f"eager: kernel by kernel{doubt} graphs are off"

    def _cuts(self, sequence: str) -> bool:
        """Whether doubt may end the draft chains of a sequence."""
        drafts = any(repeat for _, repeat in self.manifest.sequences[sequence])
        return drafts and "in_round" in self.manifest.gates

    # -- launching ---------------------------------------------------------------------------------

    def launch(self, name: str) -> None:
        """Run a sequence (`round`), or one program as `run_NAME`, and refresh the mirror."""
        if name in self.manifest.loops:
            self.start(name)
            self._end.wait()
            self.done()
            return
        if name.startswith("run_"):
            program = name.removeprefix("run_")
            self._enqueue_program(program, self._rows(program, self.get("rows")))
            self._finish(name)
            return
        cuts, depth = self._cuts(name), self.get("depth")
        if not self.graphs or name == "prefill":
            if cuts:
                self._run_cut(name)
            else:
                self._enqueue(name, depth)
            self._finish(name)
            return
        key = (name, 0 if cuts and self.loops else depth)  # a cut round is one graph at any depth
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(*key, cuts=cuts and self.loops)
        graph.launch(self.stream)
        self.launches += 1
        self.stream.wait(f"running {name} at depth {depth}")
        self.reads += 1

    def start(self, name: str) -> None:
        """Begin a burst. Without a loop on the GPU, it runs here, round by round."""
        if not self.loops:
            self.launch(name.removesuffix("_burst"))
            while self._goes_on():
                self.launch(name.removesuffix("_burst"))
            self._end.record(self.stream)
            return
        graph = self._graphs.get((name, 0))
        if graph is None:
            graph = self._graphs[(name, 0)] = self._capture_burst(name)
        graph.launch(self.stream)
        self._end.record(self.stream)
        self.launches += 1
        self._running = name

    def done(self) -> bool:
        """Whether the burst has ended; until then the mirror is that of some finished round."""
        if not self._running:
            return True
        if not self._end.happened(f"running {self._running}"):
            return False
        self._running = ""
        self.reads += 1
        return True

    def _goes_on(self) -> bool:
        """What the op `again` decides on a device that repeats rounds itself."""
        wanted = self.get("ring_count") < self.get("burst_end") and not self.get("ended")
        return wanted and self.get("position") < self.get("capacity") and self.get("pending") >= 0

    def _capture_burst(self, name: str) -> Graph:
        """Record a burst: a round at every depth it may choose, in a loop."""
        calls = [call for call in self.manifest.sequences[name] if call[0] != "again"]
        repeats = any(repeat for _, repeat in calls)
        deepest = self._deepest if repeats else 0
        (again,) = self.manifest.launches["again"]
        ring = self._places["ring"].offset

        def mirror() -> None:
            size = self._mirror_bytes - ring
            self.stream.copy_out(self._mirror, self._arena.address + ring, size, ring)
            self.stream.copy_out(self._mirror, self._arena.address, ring)

        rounds: Sequence[Callable[[], None]] | CutRound
        if self._cuts(name):
            rounds = self._cut_round(calls)
        else:
            rounds = [partial(self._enqueue_calls, calls, depth) for depth in range(deepest + 1)]
        return capture_burst(
            self.context,
            self.stream,
            rounds,
            lambda loop, depths: self._bind(again, (loop, depths)),
            mirror,
        )

    @property
    def _deepest(self) -> int:
        """The most drafts that programs are compiled for."""
        return int(self.manifest.spec["round"]["depth"]["max"])

    def _capture(self, name: str, depth: int, *, cuts: bool) -> Graph:
        """Record a sequence: all its launches at one depth, and the copy of the mirror.

        Where it `cuts` its chain, the number of launches is decided on the device.
        """

        def enqueue() -> None:
            self._enqueue(name, depth)
            self._copy_mirror()

        if not cuts:
            return self.stream.capture(enqueue)
        parts = self._cut_round(self.manifest.sequences[name])
        return capture_round(self.context, self.stream, parts, self._copy_mirror)

    def _cut_round(self, calls: Sequence[tuple[str, str]]) -> CutRound:
        """The parts of a round whose chain may be cut."""
        (begin, _), (draft, _), *rest = calls

        def queue(program: str, *handles: int) -> None:
            for entry in self.manifest.launches[program]:
                self._bind(entry, (handles[0], handles[1])).launch(self.stream, 1)

        widths = range(self._deepest + 1)
        return CutRound(
            partial(queue, begin),
            partial(queue, draft),
            [partial(self._enqueue_calls, rest, drafts) for drafts in widths],
        )

    def _run_cut(self, name: str) -> None:
        """Run a round whose chain may be cut, kernel by kernel: the host looks after each draft."""
        (begin, _), (draft, repeat), *rest = self.manifest.sequences[name]
        self._enqueue_program(begin, 1)
        self._finish(name)
        steps = 0
        while steps < self.get(repeat):
            self._enqueue_program(draft, 1)
            self._finish(name)
            steps += 1
        self._enqueue_calls(rest, self.get(repeat))

    def _copy_mirror(self) -> None:
        self.stream.copy_out(self._mirror, self._arena.address, self._mirror_bytes)

    def _finish(self, name: str) -> None:
        self._copy_mirror()
        self.stream.wait(f"running {name}")
        self.reads += 1

    def _rows(self, program: str, rows: int) -> int:
        return rows if self.manifest.rows_from[program] else 1

    def _enqueue(self, sequence: str, depth: int) -> None:
        if sequence == "prefill":
            self._enqueue_program("prefill", self._rows("prefill", self.get("rows")))
            return
        self._enqueue_calls(self.manifest.sequences[sequence], depth)

    def _enqueue_calls(self, calls: Sequence[tuple[str, str]], depth: int) -> None:
        """Queue the programs of a round at a depth."""
        for program, repeat in calls:
            for _ in range(depth if repeat else 1):
                self._enqueue_program(program, self._rows(program, depth + 1))

    def _enqueue_program(self, program: str, rows: int) -> None:
        for kernel in self._programs[program]:
            kernel.launch(self.stream, rows)

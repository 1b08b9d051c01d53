"""Reading weights on their way to a GPU, on a machine that has none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from memra_runtime.device import cuda_upload
from memra_runtime.device.cuda_upload import CHUNK_BYTES, READ_BYTES, Uploader


class HostBuffer:
    """Stands in for pinned memory."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)


class LateStream:
    """Copies when an event is waited for, as late as a GPU may."""

    def __init__(self, size: int) -> None:
        self.device = np.zeros(size, np.uint8)
        self.queued: list[tuple[int, HostBuffer, int]] = []

    def copy_in(self, address: int, data: HostBuffer, size: int) -> None:
        self.queued.append((address, data, size))

    def finish(self) -> None:
        for address, data, size in self.queued:
            self.device[address : address + size] = data.bytes[:size]
        self.queued.clear()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    found = LateStream(3 * CHUNK_BYTES)

    class Event:
        def record(self, stream: LateStream) -> None:
            pass

        def wait(self) -> None:
            found.finish()

    monkeypatch.setattr(cuda_upload, "PinnedBuffer", HostBuffer)
    monkeypatch.setattr(cuda_upload, "Event", Event)
    return found


@pytest.mark.parametrize(
    "size",
    [1, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + READ_BYTES + 7],
)
def test_every_byte_arrives_in_its_place(stream: LateStream, size: int) -> None:
    """Also where a chunk is still on its way when its buffer's turn comes again."""
    data: npt.NDArray[np.uint8] = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    uploader = Uploader(stream, size)  # type: ignore[arg-type]
    uploader.send(5, data)
    uploader.send(0, data[:3])
    uploader.close()
    stream.finish()
    expected = np.zeros_like(stream.device)
    expected[5 : 5 + size] = data
    expected[: min(3, size)] = data[:3]
    assert np.array_equal(stream.device, expected)

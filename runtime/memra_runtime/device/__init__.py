"""Devices: what everything above them may ask of any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import Manifest
from memra_runtime.device.memory import Kept, Spans

#: Told bytes done and bytes in all, before the first weight is copied to a device and after each.
Progress = Callable[[int, int], None]

#: NumPy types of plane elements; bf16 is read as raw 16-bit words, rows of blocks as bytes.
DTYPES: Mapping[str, type[np.generic]] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "i32": np.int32,
    "q8_0_rows": np.uint8,
}


class Device(Protocol):
    """Runs an artifact's programs on one arena.

    The host touches planes and counters between launches only.
    """

    manifest: Manifest
    #: Tells the loaded target from others (`weights_fingerprint`).
    weights_id: str
    #: Texts begun since loading, by which a session knows whether the planes still hold its own.
    texts: int
    #: Tokens of a burst at most: where rounds cannot repeat on the device itself, one round's.
    burst_tokens: int
    #: The device block as the host sees it between launches.
    state: Any
    #: Counted since loading: foreign calls (CPU) or graph launches (CUDA).
    launches: int
    #: Counted since loading: copies of counters and tokens to the host, which the CPU needs not.
    reads: int

    def plane(self, name: str) -> Any:
        """A plane that indexes, and can be written, like an array."""

    def value(self, program: str, name: str) -> Any:
        """A result that `program` left in the arena."""

    def write_rows(self, weight: str, rows: npt.NDArray[np.uint8], first: int, last: int) -> None:
        """Replace rows `[first, last)` of a trimmed head, between launches and in place.

        `rows` [all rows, bytes of one] is all of the head, as stored.
        """

    def launch(self, name: str) -> None:
        """Run a sequence, or one program as `run_NAME`."""

    def start(self, name: str) -> None:
        """Begin a burst; until `done`, the host may only look at counters and at the ring."""

    def done(self) -> bool:
        """Whether the burst has ended. The device's errors surface here."""

    @property
    def whole(self) -> bool:
        """Whether a round, however deep, is one launch: what `--strict` demands."""

    def runs(self, sequence: str) -> str:
        """How a sequence (`round`, `plain`) runs here, in a few words for a reader."""

    def get(self, counter: str) -> int:
        """A counter of the device block."""

    def put(self, counters: Mapping[str, int]) -> None:
        """Write counters, and with them all of `state`, to the device block."""

    def memory(self) -> int:
        """Bytes held on the device."""

    def free(self) -> int | None:
        """Bytes that could still be allocated there; None where it is not known."""

    def another(self) -> Device:
        """A device with an arena of its own, over the same weights and code."""

    def keep(self, spans: Spans) -> Kept:
        """Copy parts of the arena aside, on the device; only between launches."""

    def put_back(self, spans: Spans, kept: Kept) -> None:
        """Write what was kept, here or on another device of the same artifact."""


def calls(device: Device, sequence: str) -> Iterator[str]:
    """The programs of a sequence in the order of a round, for a caller that launches each itself.

    A program may lower the counter that it is repeated by, so that is read before each run.
    """
    for program, repeat in device.manifest.sequences[sequence]:
        runs = 0
        while runs < (device.get(repeat) if repeat else 1):
            yield program
            runs += 1

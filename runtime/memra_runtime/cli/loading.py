"""Load a model for a command: progress on stderr, and what `--strict` demands of rounds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memra_runtime.cli.app import size, teller
from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_runtime.device import Device
    from memra_runtime.model import Model, Opened

#: Off a terminal, an upload that takes longer says so every so many seconds.
HEARTBEAT_S = 10.0


class Upload:
    """Reports weights on their way to a GPU: a bar on a terminal, else one line at the end."""

    def __init__(self, tell: Callable[[str, str], None], quiet: bool) -> None:
        self._tell = tell
        self._bar: Any = None
        self._task: Any = None
        self._wants_bar = sys.stderr.isatty() and not quiet
        self._start = self._spoke = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if not done:  # what was before the first byte is not the upload's time
            self._start = self._spoke = now
            if self._wants_bar:
                self._open_bar(total)
        speed = f"{done / max(now - self._start, 1e-9) / 1e9:.1f} GB/s"
        if self._bar is not None:
            progress = f"{size(done)} of {size(total)}, {speed}"
            self._bar.update(self._task, completed=done, progress=progress)
        elif now - self._spoke > HEARTBEAT_S and done < total:
            self._tell("upload", f"{size(done)} of {size(total)}, {speed} ...")
            self._spoke = now
        if done == total:
            self.close()
            self._tell("upload", f"{size(total)}, {speed}  {now - self._start:.1f} s")

    def close(self) -> None:
        """Remove the bar, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open_bar(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("upload "), BarColumn(), TextColumn("{task.fields[progress]}"))
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("upload", total=total, progress="")
        self._bar.start()


def load_reported(opened: Opened, quiet: bool, *, graphs: bool = True) -> Model:
    """Load a model and report its upload. Raises: MemraError."""
    from memra_runtime.model import load_opened

    upload = Upload(teller(quiet), quiet)
    try:
        return load_opened(opened, graphs=graphs, progress=upload)
    finally:
        upload.close()


def require_whole(device: Device) -> None:
    """Refuse a device whose rounds take more than one launch. Raises: MemraError."""
    if not device.whole:
        fail(
            "strict",
            f"a round is not one launch here: {device.runs('round')}",
            "--strict",
            hints=("run without `--strict` to accept that",),
        )

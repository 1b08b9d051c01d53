"""Progress of a compilation on stderr: a bar on a terminal, else one line a phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from memra_runtime.cli.app import amount

#: Off a terminal, a phase that takes longer says so every so many seconds.
HEARTBEAT_S = 10.0


class Phases:
    """Reports `plan`, `lower` and `link` of one compilation.

    The compiler calls it after each kernel; planning ends with the first such call, and linking
    begins with the last.
    """

    def __init__(self, tell: Callable[[str, str], None], quiet: bool) -> None:
        self.tell = tell
        self.cached = 0
        self.total = 0
        self._bar: Any = None
        self._task: Any = None
        self._wants_bar = sys.stderr.isatty() and not quiet
        self._start = self._spoke = time.perf_counter()

    def __call__(self, kernel: str, done: int, total: int, cached: bool) -> None:
        if not self.total:
            self.total = total
            self._phase("plan", "spec read, passes run")
            if self._wants_bar:
                self._open_bar()
        self.cached += cached
        now = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, kernel=kernel)
        elif now - self._spoke > HEARTBEAT_S and done < total:
            self.tell("lower", f"{done} of {amount(total, 'kernel')} ...")
            self._spoke = now
        if done == total:
            self._close_bar()
            self._phase("lower", f"{amount(total, 'kernel')}, {self.cached} cached")

    def linked(self, programs: int) -> None:
        """Report the last phase; call it when the artifact is written."""
        self._phase("link", amount(programs, "program"))

    def close(self) -> None:
        """Remove the bar, also after an error."""
        self._close_bar()

    def _phase(self, label: str, text: str) -> None:
        now = time.perf_counter()
        self.tell(label, f"{text}  {now - self._start:.1f} s")
        self._start = self._spoke = now

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("lower  "),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[kernel]}"),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("lower", total=self.total, kernel="")
        self._bar.start()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

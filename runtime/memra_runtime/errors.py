"""The one kind of error a user sees, and how it is printed.

Everything a user can get wrong ends in a `MemraError`: a code, what was found, where, and what to
do. The command line prints it and exits with 2. A compiler or runtime bug is any other exception.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn


@dataclass(frozen=True)
class Position:
    """A place in a text file; line and column count from 1, column 0 means the whole line."""

    file: str
    line: int
    column: int = 0

    def __str__(self) -> str:
        column = f":{self.column}" if self.column else ""
        return f"{self.file}:{self.line}{column}"


@dataclass(frozen=True)
class Diagnostic:
    """One problem, with its place and what to do about it.

    `place` is a `Position` (a line of a spec) or a plain string (a weight file, an argument).
    `label` is shown under the marked column of the source line `source`.
    """

    code: str
    message: str
    place: Position | str | None = None
    source: str | None = None
    label: str = ""
    width: int = 1
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    def render(self) -> str:
        lines = [f"error[{self.code}]: {self.message}"]
        if self.place is not None:
            lines.append(f"  --> {self.place}")
        if self.source is not None and isinstance(self.place, Position):
            gutter = " " * len(str(self.place.line))
            lines += [f"{gutter} |", f"{self.place.line} | {self.source}"]
            if self.place.column:
                marker = " " * (self.place.column - 1) + "^" * max(1, self.width)
                lines.append(f"{gutter} | {marker} {self.label}".rstrip())
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"hint: {hint}" for hint in self.hints]
        return "\n".join(lines)


@dataclass(eq=False)
class MemraError(Exception):
    """One or more diagnostics for the user; never a bug of ours."""

    diagnostics: tuple[Diagnostic, ...] = field(default=())

    def __str__(self) -> str:
        return "\n\n".join(d.render() for d in self.diagnostics)


def fail(
    code: str,
    message: str,
    place: Position | str | None = None,
    *,
    notes: tuple[str, ...] = (),
    hints: tuple[str, ...] = (),
) -> NoReturn:
    """Raise a `MemraError` of one diagnostic."""
    raise MemraError((Diagnostic(code, message, place, notes=notes, hints=hints),))


def run_guarded(command: Callable[[], None], *, verbose: bool = False) -> NoReturn:
    """Run a command line and leave the process: 0, or 2 for a user's error, 70 for a bug of ours.

    A broken pipe (`| head`) and an interrupt end quietly, with the codes shells use for them.
    """
    try:
        command()
    except MemraError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # the reader is gone: point stdout at nothing, so that the interpreter's flush is quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if verbose:
            raise
        print(
            f"bug: {type(error).__name__}: {error}\n"
            "hint: this is a mistake in memra; run again with -vv for the traceback and report it",
            file=sys.stderr,
        )
        sys.exit(70)
    sys.exit(0)

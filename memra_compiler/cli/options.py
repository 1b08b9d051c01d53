"""What the compiler's commands share: the spec argument, `--set`, and where output may go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from memra_runtime.errors import Diagnostic, MemraError, fail

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        show_default=False,
        help="Change a value of the spec, e.g. --set round.depth.max=3; may be repeated.",
    ),
]


def parse_overrides(given: Sequence[str] | None) -> dict[str, str]:
    """Read `a.b=c` options. Raises: MemraError with every one that is wrong."""
    problems, found = [], {}
    for text in given or ():
        path, equals, value = text.partition("=")
        if equals and path.strip():
            found[path.strip()] = value
        else:
            message = f"`{text}` does not say which value to change, and to what"
            hint = "for example `--set round.depth.max=3`"
            problems.append(Diagnostic("set", message, f"--set {text}", hints=(hint,)))
    if problems:
        raise MemraError(tuple(problems))
    return found


def check_spec_file(path: Path) -> None:
    """Refuse what cannot be a spec by its name or kind. Raises: MemraError."""
    if path.is_dir():
        fail(
            "spec",
            f"`{path}` is a folder, not a spec",
            str(path),
            hints=("give the .yaml file, such as model_specs/tiny/gemma4_tiny.yaml",),
        )
    if path.suffix in (".gguf", ".safetensors"):
        fail(
            "spec",
            f"`{path.name}` is a weight file, not a spec",
            str(path),
            hints=("give a spec (.yaml), and this file with `--weights` or `--draft`",),
        )


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Turn what the system says of files (no permission, disk full) into a `MemraError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        place = str(error.filename) if error.filename else None
        fail("io", f"cannot {what}: {error.strerror or error}", place,
             hints=("check permissions and free space, or choose another folder",))  # fmt: skip

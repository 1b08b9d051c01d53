"""What all memra commands share: options, logging, how a command ends, and where files come from.

Results go to stdout; progress, reports and errors go to stderr. Exit codes: 0, 2 for a user's
error, 70 for a mistake of ours, 130 after an interrupt, 141 when the reader of stdout is gone.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from memra_runtime.errors import fail, run_guarded

#: Where kernels, and the artifacts of `memra-run SPEC`, are kept.
DEFAULT_CACHE = Path.home() / ".cache" / "memra"

#: Width of the label that begins a line on stderr.
LABEL = 9

#: What the compiler needs beyond a run-time install, by import name.
_COMPILER_NEEDS = ("memra_compiler", "tvm", "yaml", "ml_dtypes")

WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="T",
        help="Weights of the target: a GGUF file or a Hugging Face folder. "
        "A spec may name them itself; an artifact does not store where they are.",
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option("--draft", metavar="D", help="Weights of the drafter, in the same way."),
]
CacheOption = Annotated[
    Path,
    typer.Option("--cache", metavar="DIR", help="Where compiled kernels and artifacts are kept."),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Tell more on stderr; -vv also shows the traceback of a mistake in memra.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Fail unless every round runs as one launch: a graph of the whole round on a GPU, "
        "one call on `cpu`.",
    ),
]
ArtifactArgument = Annotated[
    Path,
    typer.Argument(
        metavar="ARTIFACT_OR_SPEC",
        show_default=False,
        help="The folder that memra-compile wrote, or a spec (.yaml), which is compiled first.",
    ),
]


def command_line(
    function: Callable[..., None], *, name: str, example: str
) -> Callable[..., NoReturn]:
    """Make the entry point of a command.

    It is called as `main()`, which reads `sys.argv`, or `main(arguments)`; it leaves the process.

    `function` is the typer command; its docstring is the help text, `example` ends it. Raise
    `MemraError` for what the user can mend, and `SystemExit` to end with another code.
    """
    shown = "\n".join(f"  {line}" for line in example.strip().splitlines())
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    # \b keeps click from wrapping the lines of the example
    end = f"\b\nExample, from the root of the repository:\n{shown}"
    end += f"\n\n{name} --version prints the version."
    app.command(name=name, epilog=end)(function)

    def main(arguments: Sequence[str] | None = None) -> NoReturn:
        given = list(sys.argv[1:] if arguments is None else arguments)
        run_guarded(lambda: _invoke(app, name, given), verbose=_verbosity(given) > 1)

    return main


def _invoke(app: typer.Typer, name: str, arguments: list[str]) -> None:
    """Parse and run; unlike `app()`, leave interrupts and broken pipes to `run_guarded`."""
    if arguments == ["--version"]:
        print(name, version("memra"))
        return
    command = typer.main.get_command(app)
    set_up_logging(_verbosity(arguments))
    try:
        with command.make_context(name, list(arguments)) as context:  # it empties the list
            command.invoke(context)
        sys.stdout.flush()  # here, where a reader that is gone is met quietly
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        hints = (f"`{name} --help` shows every option, with an example",)
        place = _found(message, arguments) or name
        fail("usage", message[:1].lower() + message[1:], place, hints=hints)


def _found(message: str, arguments: Sequence[str]) -> str | None:
    """The option that an error names, with the value it was given."""
    named = re.findall(r"'(--?[\w-]+)'", message)
    for option, value in pairwise(arguments):
        if option in named:
            return f"{option} {value}"
    return None


def _verbosity(arguments: Sequence[str]) -> int:
    """How often `-v` is given; needed before the options are parsed."""
    flags = [a for a in arguments if re.fullmatch(r"-v+|--verbose", a)]
    return sum(1 if flag.startswith("--") else len(flag) - 1 for flag in flags)


def set_up_logging(verbose: int) -> None:
    """Send what is logged under `memra` to stderr: warnings, with -v info, with -vv all."""
    logger = logging.getLogger("memra")
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))
    logger.propagate = False
    logger.handlers.clear()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)


def teller(quiet: bool) -> Callable[[str, str], None]:
    """Return `tell(label, text)`, which writes one line to stderr unless `quiet`."""

    def tell(label: str, text: str) -> None:
        if not quiet:
            print(f"{label:<{LABEL}}{text}".rstrip(), file=sys.stderr, flush=True)

    return tell


def amount(count: int, noun: str) -> str:
    """`1 kernel`, `1,234 kernels`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes in the unit a person reads: `512 B`, `40 KiB`, `3.0 MiB`, `17.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit != "MiB" or count >= 100 else f"{count:.1f} MiB"
        count /= 1024
    return f"{count:,.2f} GiB"


def require_compiler() -> None:
    """Refuse where only the runtime is installed. Raises: MemraError."""
    missing = [name for name in _COMPILER_NEEDS if find_spec(name) is None]
    if missing:
        fail(
            "no-compiler",
            f"compiling needs the compiler, and {', '.join(f'`{m}`' for m in missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed",
            hints=(
                'install it: pip install "memra[compile]"',
                "or give an artifact (NAME.TARGET.memra) that was compiled elsewhere",
            ),
        )


def resolve_artifact(
    path: Path,
    weights: Path | None,
    draft: Path | None,
    cache: Path,
    quiet: bool,
    compiling: Sequence[str] = (),
) -> tuple[Path, Path, Path]:
    """Return the artifact's folder and the weights of target and drafter, compiling a spec first.

    `compiling` are more options for memra-compile. The compiler runs in a process of its own, so
    the runtime never imports it.
    Raises: MemraError; SystemExit where the compiler has already said what is wrong.
    """
    if path.suffix in (".yaml", ".yml") and not path.is_dir():
        return _compile(path, weights, draft, cache, quiet, compiling)
    _require_artifact(path)
    if weights is None or draft is None:
        options = {"--weights T": weights, "--draft D": draft}
        missing = [option for option, given in options.items() if given is None]
        fail(
            "weights",
            f"running an artifact needs {' and '.join(f'`{m}`' for m in missing)}: "
            "an artifact does not store where its weights are",
            str(path),
            hints=("or give the spec (.yaml) instead, if it names its weight files",),
        )
    return path, weights, draft


def resolve_folder(path: Path, cache: Path, quiet: bool, compiling: Sequence[str] = ()) -> Path:
    """The folder of an artifact that is used without weight files; a spec is compiled first.

    Raises: MemraError; SystemExit as `resolve_artifact`.
    """
    if path.suffix in (".yaml", ".yml") and not path.is_dir():
        answer = _compiled(path, {}, cache, quiet, compiling)
        return Path(answer["artifact"])
    _require_artifact(path)
    return path


def _require_artifact(path: Path) -> None:
    """Refuse a path that is no artifact."""
    if not path.exists():
        fail(
            "artifact",
            f"there is no `{path}`",
            str(path),
            hints=("give the folder that memra-compile wrote, or a spec (.yaml)",),
        )
    if not path.is_dir():
        fail(
            "artifact",
            f"`{path.name}` is neither an artifact (a folder NAME.TARGET.memra) nor a spec (.yaml)",
            str(path),
            hints=("weight files are given with `--weights` and `--draft`",),
        )
    if not (path / "manifest.json").is_file():
        what = f"the folder `{path}` is not an artifact: it has no manifest.json"
        hint = "give the folder that memra-compile wrote, NAME.TARGET.memra"
        fail("artifact", what, str(path), hints=(hint,))


def _compile(
    spec: Path,
    weights: Path | None,
    draft: Path | None,
    cache: Path,
    quiet: bool,
    more: Sequence[str],
) -> tuple[Path, Path, Path]:
    answer = _compiled(
        spec, {"--weights": weights, "--draft": draft}, cache, quiet, ("--need-weights", *more)
    )
    return Path(answer["artifact"]), Path(answer["weights"]), Path(answer["draft"])


def _compiled(
    spec: Path, given: Mapping[str, Path | None], cache: Path, quiet: bool, more: Sequence[str]
) -> dict[str, Any]:
    """What memra-compile answers to `--json`."""
    import hashlib
    import json
    import subprocess

    require_compiler()
    # one folder a combination of spec, weights and options: two that take turns do not undo each
    # other
    identity = "\n".join([*(str(p and p.resolve()) for p in (spec, *given.values())), *more])
    key = hashlib.sha256(identity.encode()).hexdigest()[:8]
    folder = cache / "artifacts" / f"{spec.stem}-{key}.memra"
    command: list[str] = [sys.executable, "-m", "memra_compiler.cli.compile", str(spec)]
    command += ["-o", str(folder), "--cache", str(cache), "--json", *more]
    for option, file in given.items():
        command += [option, str(file)] if file is not None else []
    command += ["--quiet"] if quiet else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()  # it had the interrupt, too, and says so
            sys.exit(130)
    if process.returncode:
        sys.exit(process.returncode)  # the compiler has reported why
    answer: dict[str, Any] = json.loads(output)
    return answer

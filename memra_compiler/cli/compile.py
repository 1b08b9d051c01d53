"""`memra-compile`: from a spec to an artifact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memra_compiler.cli.options import (
    SetOption,
    check_spec_file,
    file_errors,
    parse_overrides,
)
from memra_compiler.cli.pages import flops
from memra_compiler.cli.progress import Phases
from memra_runtime.cli.app import (
    DEFAULT_CACHE,
    CacheOption,
    DraftOption,
    JsonOption,
    QuietOption,
    VerboseOption,
    WeightsOption,
    amount,
    command_line,
    require_compiler,
    size,
    teller,
)
from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_compiler.compile import Compiled

SpecArgument = Annotated[
    Path, typer.Argument(metavar="SPEC", show_default=False, help="The spec to compile (.yaml).")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        show_default="NAME.TARGET.memra in the current folder",
        help="The artifact's folder; an artifact that is there is replaced.",
    ),
]
NeedWeightsOption = Annotated[
    bool,
    typer.Option("--need-weights", hidden=True, help="For memra-run: fail without weight files."),
]

EXAMPLE = """
memra-compile model_specs/tiny/gemma4_tiny.yaml -o gemma4_tiny.cpu.memra
"""


def compile_command(
    spec: SpecArgument,
    output: OutputOption = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="NAME",
            help="`cpu`, or `cuda:` and an architecture: sm_90a is Hopper.",
        ),
    ] = "cpu",
    weights: WeightsOption = None,
    draft: DraftOption = None,
    set_: SetOption = None,
    cache: CacheOption = DEFAULT_CACHE,
    as_json: JsonOption = False,
    need_weights: NeedWeightsOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = 0,
) -> None:
    """Compile a spec to an artifact, the folder that memra-run takes.

    The path of the artifact is printed on stdout, everything else on stderr. Weight files decide
    the storage formats and fill in what the spec leaves `auto`; without them the formats that the
    spec states are used. Kernels are kept in the cache by content, so it is safe, and quick, to
    run this again.
    """
    overrides = parse_overrides(set_)
    check_spec_file(spec)
    require_compiler()
    from memra_compiler.compile import CompileOptions, compile_spec

    if need_weights:
        check_weights(spec, overrides, weights, draft)
    tell = teller(quiet)
    phases = Phases(tell, quiet)
    options = CompileOptions(target, weights, draft, overrides, cache)
    try:
        with file_errors("write the artifact or the cache"):
            done = compile_spec(spec, output, options, phases)
    finally:
        phases.close()
    if done.fresh:
        phases.linked(len(done.manifest.programs))
    if need_weights:  # memra-run, which says the rest itself
        tell("artifact", f"{done.folder}{'' if done.fresh else ', up to date'}")
    else:
        for label, text in summary(done, phases.cached).items():
            tell(label, text)
    if as_json:
        named = named_weights(spec, overrides, weights, draft)
        print(json.dumps({"artifact": str(done.folder), "fresh": done.fresh, **named}))
    else:
        print(done.folder)


def summary(done: Compiled, cached: int) -> Mapping[str, str]:
    """What a compilation gave, by label."""
    manifest = done.manifest
    count = len(manifest.kernels)
    made = f"{count - cached} compiled, {cached} cached" if done.fresh else "up to date"
    largest = max((p for p in manifest.programs if not p.fault), key=lambda p: p.bytes)
    return {
        "target": f"{manifest.target} ({manifest.cpu})" if manifest.cpu else manifest.target,
        "kernels": f"{count}: {made}",
        "arena": size(manifest.arena_bytes),
        "weights": f"{size(manifest.weight_bytes)} in {amount(len(manifest.weights), 'tensor')}",
        "largest": f"{largest.name}, {amount(largest.rows, 'row')}: moves {size(largest.bytes)}, "
        f"{flops(largest.flops)}",
    }


def named_weights(
    spec: Path, overrides: Mapping[str, str], weights: Path | None, draft: Path | None
) -> dict[str, str | None]:
    """The weight files in force: those given, else those the spec names."""
    from memra_compiler.spec import weight_files

    named = weight_files(spec, overrides=overrides)
    files = {
        "weights": weights or named.get("target"),
        "draft": draft or named.get("drafter"),
    }
    return {name: None if path is None else str(path) for name, path in files.items()}


def check_weights(
    spec: Path, overrides: Mapping[str, str], weights: Path | None, draft: Path | None
) -> None:
    """Refuse, before anything is compiled, a spec whose weight files are not at hand."""
    files = named_weights(spec, overrides, weights, draft)
    options = {"weights": "--weights T", "draft": "--draft D"}
    missing = [name for name, path in files.items() if path is None]
    if missing:
        whose = " and ".join({"weights": "target", "draft": "drafter"}[m] for m in missing)
        fail(
            "weights",
            f"the spec names no weights for {whose}, and none are given",
            str(spec),
            hints=(f"add {' '.join(f'`{options[m]}`' for m in missing)}",),
        )
    for name, path in files.items():
        if not Path(str(path)).exists():
            fail(
                "weights-missing",
                f"the weight file `{path}` is not there",
                str(spec),
                hints=(f"fetch it, or give another with `{options[name]}`",),
            )


main = command_line(compile_command, name="memra-compile", example=EXAMPLE)

if __name__ == "__main__":
    main()

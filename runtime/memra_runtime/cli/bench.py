"""memra-bench: where the time of a round goes, beside what this machine allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memra_runtime.cli.app import (
    DEFAULT_CACHE,
    ArtifactArgument,
    CacheOption,
    DraftOption,
    JsonOption,
    QuietOption,
    VerboseOption,
    WeightsOption,
    command_line,
    resolve_artifact,
    resolve_folder,
    teller,
)
from memra_runtime.cli.prompts import Prompt, read_prompt
from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_runtime.artifact import Manifest
    from memra_runtime.device import Device
    from memra_runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Defaults:
    """What is measured unless an option says otherwise."""

    prompt_tokens: int
    max_new: int
    repeat: int
    stream_repeat: int


#: By kind of target. A GPU's times vary little, and its models are large: fewer repeats do.
DEFAULTS = {"cpu": Defaults(128, 128, 50, 7), "cuda": Defaults(512, 64, 20, 2)}

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="T",
        show_default=False,
        help="What to compile a spec for: `cpu` (the default) or `cuda:sm_90a`. An artifact has "
        "its target.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        show_default=False,
        help="Change a value of the spec before it is compiled; may be repeated.",
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="64,16384",
        show_default=False,
        help="Also time plain steps and rounds with these numbers of tokens in the caches.",
    ),
]
SyntheticOption = Annotated[
    bool,
    typer.Option(
        "--synthetic",
        help="Measure with made-up weights of the formats that the spec states: no files needed.",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        show_default=False,
        help="The text to continue. Default: a built-in one of 128 tokens (GPU: 512).",
    ),
]
IdsOption = Annotated[
    str | None,
    typer.Option(
        "--ids",
        metavar="1,2,3",
        show_default=False,
        help="The prompt as token ids, or a JSON file that holds a list of them.",
    ),
]
MaxNewOption = Annotated[
    int | None,
    typer.Option(
        "--max-new",
        min=2,
        metavar="N",
        show_default="128, on a GPU 64",
        help="Tokens of each generation.",
    ),
]
DepthsOption = Annotated[
    str | None,
    typer.Option(
        "--depths",
        metavar="0,1,3,5",
        show_default=False,
        help="Draft depths to report. Default: 0, 1, 3, 5 and the largest compiled one.",
    ),
]
RepeatOption = Annotated[
    int | None,
    typer.Option(
        "--repeat",
        min=1,
        metavar="N",
        show_default="50, on a GPU 20",
        help="Times each round is measured.",
    ),
]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=1, metavar="N", help="Threads; programs for `cpu` use 1.")
]
CsvOption = Annotated[
    Path | None,
    typer.Option("--csv", metavar="F", show_default=False, help="Also write every number to F."),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="F.png",
        show_default=False,
        help='Also draw a figure, with F.csv beside it; needs `pip install "memra[bench]"`.',
    ),
]


def bench(
    artifact: ArtifactArgument,
    weights: WeightsOption = None,
    draft: DraftOption = None,
    target: TargetOption = None,
    overrides: SetOption = None,
    prompt: PromptOption = None,
    ids: IdsOption = None,
    max_new: MaxNewOption = None,
    depths: DepthsOption = None,
    context: ContextOption = None,
    synthetic: SyntheticOption = False,
    repeat: RepeatOption = None,
    threads: ThreadsOption = 1,
    csv: CsvOption = None,
    plot: PlotOption = None,
    cache: CacheOption = DEFAULT_CACHE,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = 0,
) -> None:
    """Measure where the time of a round goes, beside what this machine allows.

    Times every program (draft step, verify at each row count, plain step, a chunk of the prompt)
    with the bytes it must move; on a GPU also every kernel; every round as draft, verify, rest and
    gaps, with the acceptance at which it breaks even; rounds with forced acceptance; and whole
    generations, plain and speculative. The meaning of each number is printed below the tables. A
    generation that gives another text than plain decoding ends the bench with an error.

    On the CPU everything runs on one core. A ratio of two numbers of one run is worth more than
    either.
    """
    if threads != 1:
        fail("threads", f"programs for `cpu` run on one thread, not {threads}", "--threads")
    chosen = _numbers(depths, "draft depth", "--depths", "0,1,3,5")
    contexts = _numbers(context, "number of tokens", "--context", "64,16384")
    given = None if prompt is None and ids is None else read_prompt(prompt, None, None, ids)
    from memra_runtime.bench import Options, run_bench
    from memra_runtime.bench.files import require_plot, write_csv, write_plot
    from memra_runtime.bench.report import render

    if plot is not None:
        require_plot()
    compiling = ["--target", target or "cpu"]
    compiling += [word for pair in overrides or () for word in ("--set", pair)]
    tell = teller(quiet)
    load, manifest, tokenizer = (
        _synthetic(artifact, weights, draft, prompt, cache, quiet, compiling)
        if synthetic
        else _from_files(artifact, weights, draft, cache, quiet, compiling)
    )
    _check_target(manifest, target, overrides, artifact)
    defaults = DEFAULTS[manifest.target.partition(":")[0]]
    options = Options(
        _prompt_ids(manifest, tokenizer, given, defaults.prompt_tokens),
        max_new or defaults.max_new, chosen, repeat or defaults.repeat, defaults.stream_repeat,
        threads, contexts,
    )  # fmt: skip
    result = run_bench(load(), options, tell)
    print(json.dumps(result.to_json(), indent=1) if as_json else render(result))
    if csv is not None:
        write_csv(result, csv)
    if plot is not None:
        write_plot(result, plot)


Loading = tuple[Callable[[], "Device"], "Manifest", "Tokenizer | None"]


def _from_files(
    artifact: Path, weights: Path | None, draft: Path | None, cache: Path, quiet: bool,
    compiling: list[str],
) -> Loading:  # fmt: skip
    """How to load the model of two weight files, which need not make sense together."""
    from memra_runtime.cli.loading import load_reported
    from memra_runtime.model import open_model

    tell = teller(quiet)
    opened = open_model(
        *resolve_artifact(artifact, weights, draft, cache, quiet, compiling),
        odd=lambda error: tell("odd", f"{error.diagnostics[0].message}; only speed is measured"),
    )
    return lambda: load_reported(opened, quiet).device, opened.manifest, opened.tokenizer


def _synthetic(
    artifact: Path, weights: Path | None, draft: Path | None, prompt: str | None, cache: Path,
    quiet: bool, compiling: list[str],
) -> Loading:  # fmt: skip
    """How to load an artifact with made-up weights; there is no tokenizer."""
    from memra_runtime.artifact import load_manifest
    from memra_runtime.bench.synthetic import synthetic_device
    from memra_runtime.cli.loading import Upload

    given = {"--weights": weights, "--draft": draft, "--prompt": prompt}
    if unused := [option for option, value in given.items() if value is not None]:
        fail("usage", f"`--synthetic` makes its own weights and has no tokenizer: `{unused[0]}` "
             "would be ignored", unused[0], hints=("give token ids with --ids",))  # fmt: skip
    tell = teller(quiet)
    tell("odd", "the weights are made up; only speed is measured")
    folder = resolve_folder(artifact, cache, quiet, compiling)
    upload = Upload(tell, quiet)

    def load() -> Device:
        try:
            return synthetic_device(folder, upload)
        finally:
            upload.close()

    return load, load_manifest(folder), None


def _check_target(
    manifest: Manifest, target: str | None, overrides: list[str] | None, artifact: Path
) -> None:
    """Refuse options for compiling that contradict what is compiled already."""
    has = manifest.target
    if target not in (None, has):
        fail("target", f"the artifact was compiled for `{has}`, not for `{target}`",
             f"--target {target}", hints=("give the spec, to compile it for another",))  # fmt: skip
    if overrides and artifact.is_dir():
        fail("set", "an artifact is compiled: its spec can no longer be changed",
             f"--set {overrides[0]}", hints=("give the spec instead",))  # fmt: skip


def _prompt_ids(
    manifest: Manifest, tokenizer: Tokenizer | None, prompt: Prompt | None, tokens: int
) -> tuple[int, ...]:
    from memra_runtime.check.prompts import long_ids

    if prompt is not None:
        return prompt.ids if tokenizer is None else tuple(prompt.encode(tokenizer))
    count = min(tokens, max(1, int(manifest.spec["runtime"]["max_context"]) // 4))
    if tokenizer is None:  # any ids will do
        return tuple(range(min(count, int(manifest.spec["target"]["vocab"]))))
    return long_ids(tokenizer, count)


def _numbers(given: str | None, what: str, option: str, example: str) -> tuple[int, ...]:
    if given is None:
        return ()
    parts = [part.strip() for part in given.split(",")]
    bad = [part for part in parts if not part.isdecimal()]
    if bad:
        fail(option.removeprefix("--").rstrip("s"), f"`{bad[0]}` is not a {what}",
             f"{option} {given}", hints=(f"write `{option} {example}`",))  # fmt: skip
    return tuple(map(int, parts))


main: Callable[..., Any] = command_line(
    bench,
    name="memra-bench",
    example="""
memra-bench model_specs/tiny/gemma4_tiny.yaml
memra-bench model_specs/tiny/gemma4_tiny.yaml --depths 0,2,5 --repeat 20 --csv bench.csv
memra-bench model_specs/tiny/gemma4_tiny.yaml --target cuda:sm_90a
memra-bench model_specs/tiny/gemma4_tiny.yaml --context 64,1500 --json
memra-bench model_specs/gemma4_31b.yaml --target cuda:sm_90a --synthetic
""",
)

if __name__ == "__main__":
    main()

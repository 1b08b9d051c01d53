"""memra-bench: where the time of a round goes, beside what this machine allows."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    teller,
)
from memra_runtime.cli.prompts import Prompt, read_prompt
from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_runtime.model import Model

#: Tokens of the built-in prompt.
_PROMPT_TOKENS = 128

TargetOption = Annotated[
    str, typer.Option("--target", metavar="T", help="The device to measure; `cpu`.")
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        show_default=False,
        help="The text to continue. Default: a built-in one of 128 tokens.",
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
    int, typer.Option("--max-new", min=2, metavar="N", help="Tokens of each generation.")
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
    int, typer.Option("--repeat", min=1, metavar="N", help="Times each round is measured.")
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
    target: TargetOption = "cpu",
    prompt: PromptOption = None,
    ids: IdsOption = None,
    max_new: MaxNewOption = 128,
    depths: DepthsOption = None,
    repeat: RepeatOption = 50,
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
    with the bytes it must move; every round as draft, verify, rest and gaps, with the acceptance
    at which it breaks even; rounds with forced acceptance; and whole generations, plain and
    speculative. The meaning of each number is printed below the tables. A generation that gives
    another text than plain decoding ends the bench with an error.

    Everything runs on one core. A ratio of two numbers of one run is worth more than either.
    """
    if target != "cpu":
        fail("target", f"`{target}` is not a target of this memra", "--target",
             hints=("targets: cpu",))  # fmt: skip
    if threads != 1:
        fail("threads", f"programs for `cpu` run on one thread, not {threads}", "--threads")
    chosen = _depths(depths)
    given = None if prompt is None and ids is None else read_prompt(prompt, None, None, ids)
    from memra_runtime.bench import Options, run_bench
    from memra_runtime.bench.files import require_plot, write_csv, write_plot
    from memra_runtime.bench.report import render
    from memra_runtime.model import load_model

    if plot is not None:
        require_plot()
    model = load_model(*resolve_artifact(artifact, weights, draft, cache, quiet))
    options = Options(_prompt_ids(model, given), max_new, chosen, repeat, threads=threads)
    result = run_bench(model, options, teller(quiet))
    print(json.dumps(result.to_json(), indent=1) if as_json else render(result))
    if csv is not None:
        write_csv(result, csv)
    if plot is not None:
        write_plot(result, plot)


def _prompt_ids(model: Model, prompt: Prompt | None) -> tuple[int, ...]:
    from memra_runtime.check.prompts import long_ids

    if prompt is not None:
        return tuple(prompt.encode(model.tokenizer))
    context = int(model.manifest.spec["runtime"]["max_context"])
    return long_ids(model.tokenizer, min(_PROMPT_TOKENS, max(1, context // 4)))


def _depths(given: str | None) -> tuple[int, ...]:
    if given is None:
        return ()
    parts = [part.strip() for part in given.split(",")]
    bad = [part for part in parts if not part.isdecimal()]
    if bad:
        fail("depth", f"`{bad[0]}` is not a draft depth", f"--depths {given}",
             hints=("write `--depths 0,1,3,5`",))  # fmt: skip
    return tuple(map(int, parts))


main: Callable[..., Any] = command_line(
    bench,
    name="memra-bench",
    example="""
memra-bench model_specs/tiny/gemma4_tiny.yaml
memra-bench model_specs/tiny/gemma4_tiny.yaml --depths 0,2,5 --repeat 20 --csv bench.csv
memra-bench model_specs/tiny/gemma4_tiny.yaml --prompt "def main():" --json
""",
)

if __name__ == "__main__":
    main()

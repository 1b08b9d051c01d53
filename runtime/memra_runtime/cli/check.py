"""memra-check: prove on this machine that speculation changes nothing but speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from memra_runtime.cli.app import (
    DEFAULT_CACHE,
    ArtifactArgument,
    CacheOption,
    DraftOption,
    JsonOption,
    QuietOption,
    StrictOption,
    VerboseOption,
    WeightsOption,
    command_line,
    resolve_artifact,
    teller,
)
from memra_runtime.errors import fail

PromptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        show_default=False,
        help="A prompt to check on; may be given several times. Default: six built-in ones.",
    ),
]
PromptFileOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        show_default=False,
        help="A text file that is one prompt; may be given several times.",
    ),
]
MaxNewOption = Annotated[
    int, typer.Option("--max-new", min=1, metavar="N", help="Tokens to generate a prompt.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Fewer prompts, depths and lengths: about a third of it.")
]


def check(
    artifact: ArtifactArgument,
    weights: WeightsOption = None,
    draft: DraftOption = None,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_new: MaxNewOption = 96,
    quick: QuickOption = False,
    strict: StrictOption = False,
    cache: CacheOption = DEFAULT_CACHE,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = 0,
) -> None:
    """Prove on this machine that speculation changes nothing but speed.

    Compares speculative with plain decoding token for token and row for row, bit for bit: at every
    depth, under forced drafts, around windows, at the ends of context, text and budget. Then it
    runs rounds that are broken on purpose ("red arms") and demands that the checks notice, and
    weighs the drafter's wiring against wrong ones, since a badly wired drafter is slow but exact.

    Exit code: 0 if all checks passed and all red arms were caught, 1 if not, 2 for a usage error.
    A failed check reports its first difference: prompt, position, both tokens, the logit margin
    there, and the first row whose bits part.
    """
    texts = [*(prompt or ()), *(_read(file) for file in prompt_file or ())]
    if not all(texts):
        fail("prompt", "a prompt is empty", "--prompt", hints=("give at least one character",))
    folder, target, drafter = resolve_artifact(artifact, weights, draft, cache, quiet)
    from memra_runtime.check import Options, run_checks
    from memra_runtime.cli.loading import load_reported, require_whole
    from memra_runtime.model import open_model

    model = load_reported(open_model(folder, target, drafter), quiet)
    if strict:
        require_whole(model.device)
    report = run_checks(model, Options(tuple(texts), max_new, quick), teller(quiet))
    print(json.dumps(report.to_json(), indent=1) if as_json else report.render())
    if not report.passed:
        sys.exit(1)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail("prompt-file", f"cannot read the prompt: {error}", str(file))


main: Callable[..., Any] = command_line(
    check,
    name="memra-check",
    example="""
memra-check model_specs/tiny/gemma4_tiny.yaml --quick
memra-check model_specs/tiny/gemma4_tiny.yaml --prompt "def main():" --max-new 64 --json
""",
)

if __name__ == "__main__":
    main()

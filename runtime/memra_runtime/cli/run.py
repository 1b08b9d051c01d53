"""`memra-run`: continue a prompt with an artifact, or with a spec that is compiled first."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
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
    StrictOption,
    VerboseOption,
    WeightsOption,
    command_line,
    resolve_artifact,
    teller,
)
from memra_runtime.cli.prompts import DEFAULT_NEW, Prompt, read_prompt
from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_runtime.cli.run_report import RunStats
    from memra_runtime.model import MemoryPlan, Model, Opened
    from memra_runtime.session import Session
    from memra_runtime.trim import TrimStats

PromptOption = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT", show_default=False, help="Text to continue."),
]
PromptFileOption = Annotated[
    str | None,
    typer.Option(
        "--prompt-file",
        metavar="F",
        show_default=False,
        help="File with the text to continue (UTF-8); `-` is stdin.",
    ),
]
ChatOption = Annotated[
    str | None,
    typer.Option(
        "--chat",
        metavar="TEXT",
        show_default=False,
        help="A user's message, put into the model's chat template.",
    ),
]
IdsOption = Annotated[
    str | None,
    typer.Option(
        "--ids",
        metavar="1,2,3",
        show_default=False,
        help="Token ids to continue, or a JSON file with a list of them.",
    ),
]
MaxNewOption = Annotated[
    int | None,
    typer.Option(
        "--max-new",
        "-n",
        metavar="N",
        show_default=f"{DEFAULT_NEW}, or what the context has room for",
        help="Tokens to produce; fewer only if the text ends.",
    ),
]
DepthOption = Annotated[
    int | None,
    typer.Option(
        "--depth",
        metavar="K",
        show_default="the spec's policy",
        help="Draft K tokens in every round; 0 decodes plainly, through rounds.",
    ),
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="Decode without the drafter. The text is the same.")
]
StatsOption = Annotated[
    bool,
    typer.Option(
        "--stats", help="Afterwards, tell acceptance, where the time goes, and the break-even."
    ),
]

EagerOption = Annotated[
    bool,
    typer.Option(
        "--eager", help="On a GPU, launch kernel by kernel instead of whole graphs, to debug."
    ),
]

SessionOption = Annotated[
    Path | None,
    typer.Option(
        "--session",
        metavar="F",
        show_default=False,
        help="Go on with a saved text: the prompt is put behind it; without one, it just goes on.",
    ),
]
SaveSessionOption = Annotated[
    Path | None,
    typer.Option(
        "--save-session",
        metavar="F",
        show_default=False,
        help="Afterwards, save the text with its caches, for `--session`. Fits this artifact and "
        "these weights only.",
    ),
]

EXAMPLE = """
memra-run model_specs/tiny/gemma4_tiny.yaml --prompt "The quick brown fox" --max-new 40 --stats
"""


@dataclass(frozen=True)
class Request:
    """What is asked of a model, checked as far as it can be before one is loaded."""

    prompt: Prompt
    max_new: int | None
    depth: int | None
    plain: bool
    stats: bool
    strict: bool
    eager: bool
    session: Path | None
    save_session: Path | None

    def __post_init__(self) -> None:
        if self.max_new is not None and self.max_new < 1:
            fail("max-new", f"cannot produce {self.max_new} tokens", f"--max-new {self.max_new}",
                 hints=("ask for at least 1",))  # fmt: skip
        if self.plain and self.depth is not None:
            fail("usage", "`--plain` has no drafts, so `--depth` says nothing", "--plain --depth",
                 hints=("give one of the two",))  # fmt: skip
        if self.eager and self.strict:
            fail("usage", "`--eager` launches kernel by kernel, which `--strict` forbids",
                 "--eager --strict", hints=("give one of the two",))  # fmt: skip
        if self.save_session is not None and not self.save_session.parent.is_dir():
            fail("save-session", f"there is no folder `{self.save_session.parent}`",
                 f"--save-session {self.save_session}", hints=("make it first",))  # fmt: skip
        if self.save_session is not None and self.save_session.is_dir():
            fail("save-session", "the session would be written over a folder",
                 f"--save-session {self.save_session}",
                 hints=("give the name of a file",))  # fmt: skip

    @property
    def sequence(self) -> str:
        return "plain" if self.plain else "round"


def run_command(
    path: ArtifactArgument,
    weights: WeightsOption = None,
    draft: DraftOption = None,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    chat: ChatOption = None,
    ids: IdsOption = None,
    max_new: MaxNewOption = None,
    depth: DepthOption = None,
    plain: PlainOption = False,
    stats: StatsOption = False,
    strict: StrictOption = False,
    eager: EagerOption = False,
    session: SessionOption = None,
    save_session: SaveSessionOption = None,
    as_json: JsonOption = False,
    cache: CacheOption = DEFAULT_CACHE,
    quiet: QuietOption = False,
    verbose: VerboseOption = 0,
) -> None:
    """Continue a prompt, greedily; the text streams to stdout, everything else goes to stderr.

    A spec is compiled first, for the weight files that it names or that are given; the artifact
    is kept in the cache. An artifact needs both `--weights` and `--draft`.
    """
    given = read_prompt(prompt, prompt_file, chat, ids, needed=session is None)
    request = Request(given, max_new, depth, plain, stats, strict, eager, session, save_session)
    tell = teller(quiet)
    folder, target_file, draft_file = resolve_artifact(path, weights, draft, cache, quiet)
    from memra_runtime.cli.asked import ask_for, save
    from memra_runtime.cli.loading import load_reported, require_whole
    from memra_runtime.cli.run_report import finish_line, memory_line, rounds_line
    from memra_runtime.model import open_model, plan_memory
    from memra_runtime.session import Policy, Session

    opened = open_model(folder, target_file, draft_file)
    if eager and opened.manifest.target == "cpu":
        fail("eager", "an artifact for `cpu` has no graphs to do without", "--eager",
             hints=("run without `--eager`",))  # fmt: skip
    policy = Policy.of(opened.manifest)
    if request.depth is not None:
        policy = policy.fixed(request.depth)
    ask = ask_for(
        opened, request.prompt, request.max_new, request.session
    )  # before gigabytes are read
    wanted = ask.max_new
    memory = plan_memory(opened.manifest)
    tell("memory", memory_line(memory))
    for binding in opened.bindings.values():
        report = binding.report()
        tell("weights", report if verbose else report.splitlines()[0])
    model = load_reported(opened, quiet, graphs=not eager)
    how = model.device.runs(request.sequence) + (" (--eager)" if eager else "")
    tell("rounds", rounds_line(how, policy, request.plain, request.depth))
    if strict:
        require_whole(model.device)
    trim = None if request.plain or policy.cap == 0 else model.trim  # nobody drafts: no learning
    if trim is not None:
        tell("trim", trim.stats.line())
    text = Session(model.device, policy, model.tokenizer.eos_ids, trim)
    if request.plain:
        text.demote()
    if ask.saved is None:
        text.prime(ask.tokens, wanted)
    else:
        text.restore(ask.saved, ask.tokens, wanted)
        tell("session", f"{request.session}: {text.stats.kept_tokens:,} tokens kept, "
                        f"{text.stats.prompt_tokens:,} run")  # fmt: skip
    before = (model.device.launches, model.device.reads)
    said, produced = generate(model, text, wanted, request, stream=not as_json)
    learned = replace(trim.stats) if trim is not None else None  # before more rounds are timed
    if trim is not None and trim.sidecar is not None:
        tell("sidecar", trim.save())
    if request.save_session is not None:
        tell("saved", save(text, request.save_session))
    measured = measure(text, request, memory, before)
    if as_json:
        print(json.dumps(answer(opened, text, said, produced, measured, learned), indent=1))
    if request.stats:
        say = teller(quiet=False)  # asked for, so said even with --quiet
        for label, line in measured.lines():
            say(label, line)
        if learned is not None:
            say("trim", learned.line())
        say("finish", finish_line(text.stats.finish, wanted))
    if strict:
        measured.require_whole()


def generate(
    model: Model, session: Session, max_new: int, request: Request, *, stream: bool
) -> tuple[str, list[int]]:
    """Produce the text; `stream` writes each piece to stdout as soon as it is certain."""
    out = sys.stdout
    if stream and hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # a terminal that cannot show a character shows `?`
    decoder = model.tokenizer.stream()
    pieces, produced = [], []
    for token in session.generate(max_new):
        produced.append(token)
        pieces.append(decoder.push(token))
        if stream and pieces[-1]:
            out.write(pieces[-1])
            out.flush()
    pieces.append(decoder.flush())
    if stream:
        out.write(f"{pieces[-1]}\n")
        out.flush()
    return "".join(pieces), produced


def measure(
    session: Session, request: Request, memory: MemoryPlan, before: tuple[int, int]
) -> RunStats:
    """Collect the statistics; for `--stats`, time a few more rounds and plain steps.

    `before` are the device's counts of launches and reads when the text began.
    """
    from memra_runtime.cli.run_report import Ran, run_stats, split_rounds, time_plain_steps
    from memra_runtime.model import held_memory

    device = session.device
    ran = Ran(device.runs(request.sequence), device.launches - before[0], device.reads - before[1])
    # what is launched kernel by kernel is not what the split would time
    split = split_rounds(session, request.sequence) if request.stats and device.whole else None
    plain_ms = time_plain_steps(session) if request.stats else None
    return run_stats(session.stats, ran, split, plain_ms, held_memory(memory), memory.peak)


def answer(
    opened: Opened,
    session: Session,
    text: str,
    produced: list[int],
    measured: RunStats,
    learned: TrimStats | None,
) -> dict[str, Any]:
    """The object that `--json` prints."""
    manifest = opened.manifest
    return {
        "text": text,
        "ids": produced,
        "finish": session.stats.finish,
        "stats": measured.as_json(),
        "trim": learned.as_json() if learned is not None else None,
        "versions": {"memra": version("memra"), "compiled_with": dict(manifest.versions)},
        "artifact": {
            "name": manifest.name,
            "target": manifest.target,
            "digest": manifest.build_key,
            "spec_digest": manifest.spec_digest,
        },
    }


main = command_line(run_command, name="memra-run", example=EXAMPLE)

if __name__ == "__main__":
    main()

"""`memra-inspect`: what a spec or an artifact says, and what the compiler makes of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memra_compiler.cli.options import SetOption, file_errors, parse_overrides
from memra_runtime.cli.app import (
    DraftOption,
    VerboseOption,
    WeightsOption,
    command_line,
    require_compiler,
)
from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_compiler.cli.sources import Inspected


def pass_names() -> tuple[str, ...]:
    """Names of the passes in order, read off the page that lists them: --help loads no compiler."""
    import memra_compiler

    page = Path(memra_compiler.__file__).parent / "passes" / "pipeline.py"
    for node in ast.parse(page.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PASSES":
            assert isinstance(node.value, ast.Tuple)
            return tuple(ast.unparse(item) for item in node.value.elts)
    raise LookupError(f"{page} has no PASSES")


PASSES = pass_names()

PathArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="SPEC|ARTIFACT", show_default=False, help="A spec (.yaml) or an artifact's folder."
    ),
]
AfterOption = Annotated[
    str | None,
    typer.Option(
        "--after",
        metavar="PASS",
        show_default=False,
        help=f"Print the IR after a pass: build, {', '.join(PASSES)}.",
    ),
]
PlanOption = Annotated[bool, typer.Option("--plan", help="Print the memory and launch plan.")]
SpecOption = Annotated[
    bool, typer.Option("--spec", help="Print the resolved spec: defaults and `auto` filled in.")
]
WeightsListOption = Annotated[
    bool, typer.Option("--weights-list", help="Print every weight and its names, with totals.")
]
SchemaOption = Annotated[
    bool, typer.Option("--schema", help="Print the JSON Schema of the spec language.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
DumpOption = Annotated[
    Path | None,
    typer.Option(
        "--dump-ir",
        metavar="DIR",
        show_default=False,
        help="Write the IR after every pass: 00-build.mir, 01-resolve_kv_targets.mir, ...",
    ),
]
TimeOption = Annotated[bool, typer.Option("--time", help="Print how long each pass takes.")]

EXAMPLE = """
memra-inspect model_specs/tiny/gemma4_tiny.yaml
memra-inspect model_specs/gemma4_31b.yaml --plan
memra-inspect model_specs/tiny/gemma4_tiny.yaml --after fuse
"""


def inspect_command(
    path: PathArgument = None,
    after: AfterOption = None,
    plan: PlanOption = False,
    show_spec: SpecOption = False,
    weights_list: WeightsListOption = False,
    schema: SchemaOption = False,
    as_json: JsonOption = False,
    dump_ir: DumpOption = None,
    times: TimeOption = False,
    weights: WeightsOption = None,
    draft: DraftOption = None,
    set_: SetOption = None,
    verbose: VerboseOption = 0,
) -> None:
    """Show a pipeline: without an option, a one-page summary; no weights are needed for it.

    Several options print several parts, one after another.
    """
    overrides = parse_overrides(set_)
    require_compiler()
    if schema:
        print(json.dumps(spec_schema(), indent=2))
        return
    if path is None:
        fail("usage", "give a spec (.yaml) or an artifact", "memra-inspect",
             hints=("for example model_specs/tiny/gemma4_tiny.yaml",))  # fmt: skip
    from memra_compiler.cli.sources import check_stage, inspect_artifact, inspect_spec
    from memra_compiler.compile import CompileOptions

    if after is not None:
        check_stage(after)
    if (path / "manifest.json").is_file():
        _refuse_for_artifact(path, [
            ("--set", set_), ("--weights", weights), ("--draft", draft), ("--time", times),
            ("--dump-ir", dump_ir), ("--after", after and after != PASSES[-1]),
        ])  # fmt: skip
        found = inspect_artifact(path)
    else:
        options = CompileOptions(weights=weights, draft=draft, overrides=overrides)
        found = inspect_spec(path, options)
    if dump_ir is not None:
        with file_errors("write the IR"):
            dump(found, dump_ir)
    wanted = {
        "ir": after is not None,
        "plan": plan,
        "spec": show_spec,
        "weights": weights_list,
        "time": times,
    }
    if not any(wanted.values()):
        if dump_ir is not None:
            return
        wanted["summary"] = True
    parts = [name for name, is_wanted in wanted.items() if is_wanted]
    show(found, parts, after or PASSES[-1], as_json)


def spec_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, for editors."""
    from memra_compiler.spec.schema import Root

    return Root.model_json_schema()


def _refuse_for_artifact(path: Path, given: list[tuple[str, object]]) -> None:
    for option, value in given:
        if value:
            fail(
                "usage",
                f"`{option}` needs a spec: an artifact keeps only the IR after `{PASSES[-1]}`",
                str(path),
                hints=("give the spec (.yaml) that it was compiled from",),
            )


def dump(found: Inspected, folder: Path) -> None:
    """Write `NN-PASS.mir` for every stage."""
    texts = {f"{i:02}-{name}.mir": found.text(name) for i, name in enumerate(found.stages)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def show(found: Inspected, parts: list[str], stage: str, as_json: bool) -> None:
    """Print the wanted parts."""
    from memra_compiler.cli.facts import plan_facts, summary_facts, weight_facts
    from memra_compiler.cli.pages import summary_page
    from memra_compiler.cli.tables import plan_page, times_page, weights_page

    pipeline, module = found.pipeline, found.pipeline.module
    facts: dict[str, Callable[[], Any]] = {
        "summary": lambda: summary_facts(pipeline),
        "ir": lambda: found.text(stage),
        "plan": lambda: plan_facts(module),
        "spec": lambda: dict(pipeline.spec),
        "weights": lambda: weight_facts(module),
        "time": lambda: {f"{name}_ms": 1e3 * spent for name, spent in found.seconds.items()},
    }
    if as_json:
        print(json.dumps({name: facts[name]() for name in parts}, indent=1))
        return
    pages: dict[str, Callable[[], str]] = {
        "summary": lambda: summary_page(facts["summary"]()),
        "ir": lambda: found.text(stage),
        "plan": lambda: plan_page(facts["plan"]()),
        "spec": lambda: _yaml(facts["spec"]()),
        "weights": lambda: weights_page(facts["weights"]()),
        "time": lambda: times_page(found.seconds),
    }
    print("\n\n".join(pages[name]().rstrip("\n") for name in parts))


def _yaml(data: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
    return text


main = command_line(inspect_command, name="memra-inspect", example=EXAMPLE)

if __name__ == "__main__":
    main()

"""memra-inspect: every view of a spec and of an artifact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_tools import DRAFT, ROOT, SPEC, TARGET, call

from memra_compiler.cli.inspect import PASSES
from memra_compiler.ir.text import parse_module, print_module
from memra_compiler.ops.base import discover
from memra_compiler.passes.pipeline import NAMES
from memra_runtime.artifact import load_manifest


def text(*typed: str | Path) -> str:
    ended = call("memra-inspect", *typed)
    assert (ended.code, ended.err) == (0, ""), ended.err
    return ended.out


def test_help_names_the_passes_of_the_pipeline() -> None:
    assert PASSES == NAMES
    help_text = " ".join(text("--help").split())
    assert ", ".join(("build", *NAMES)) in help_text


def test_summary_tells_the_wiring_in_words() -> None:
    page = text(SPEC)
    assert "drafter layers 0-2 (swa) read target layer 4 (swa)\n" in page
    assert "drafter layer 3 (full) reads target layer 5 (full)\n" in page
    assert len(page.splitlines()) <= 50
    assert max(map(len, page.splitlines())) <= 100


def test_summary_of_the_31b_needs_no_weights() -> None:
    page = text(ROOT / "model_specs/gemma4_31b.yaml")
    assert "10 x (5 swa, 1 full)" in page
    assert "30.70 B parameters" in page
    assert "drafter layers 0-2 (swa) read target layer 58 (swa)\n" in page


def test_summary_of_the_26b_tells_its_experts() -> None:
    page = " ".join(text(ROOT / "model_specs/gemma4_26b_a4b.yaml").split())
    assert "25.23 B parameters, of which a token meets 3.82 B" in page
    assert "moe ffn (experts 128, active 8, expert_width 704, dense_width 2112" in page


BILLIONS = (("gemma4_31b", 30.70), ("gemma4_12b", 11.91), ("gemma4_26b_a4b", 25.23))


@pytest.mark.parametrize(("name", "billions"), BILLIONS)
def test_weights_list_totals_agree_with_the_published_count(name: str, billions: float) -> None:
    facts = json.loads(text(ROOT / f"model_specs/{name}.yaml", "--weights-list", "--json"))
    assert round(facts["weights"]["totals"]["target"]["parameters"] / 1e9, 2) == billions
    embed = next(w for w in facts["weights"]["weights"] if w["id"] == "target.embed")
    assert embed["names"][0] == "token_embd.weight"


@pytest.mark.parametrize("after", ["build", *NAMES])
def test_after_prints_ir_that_parses_back(after: str) -> None:
    printed = text(SPEC, "--after", after)
    assert print_module(parse_module(printed, discover())) == printed


def test_dump_writes_the_ir_after_every_pass(tmp_path: Path) -> None:
    assert text(SPEC, "--dump-ir", tmp_path / "ir") == ""
    names = [path.name for path in sorted((tmp_path / "ir").iterdir())]
    assert names == [f"{i:02}-{name}.mir" for i, name in enumerate(("build", *NAMES))]
    last = (tmp_path / "ir" / names[-1]).read_text()
    assert last == text(SPEC, "--after", NAMES[-1])


def test_plan_agrees_with_the_manifest(tiny_artifact: Path) -> None:
    manifest = load_manifest(tiny_artifact)
    facts = json.loads(text(tiny_artifact, "--plan", "--json"))["plan"]
    assert facts["memory"]["arena_bytes"] == manifest.arena_bytes
    assert facts["memory"]["weight_bytes"] == manifest.weight_bytes
    assert facts["distinct_kernels"] == len(manifest.kernels)
    cost = {p.name: (p.rows, p.launches, p.bytes, p.flops) for p in manifest.programs}
    for p in facts["programs"]:
        assert (p["rows"], p["launches"], p["bytes"], p["flops"]) == cost[p["program"]]
    assert [p["plane"] for p in facts["planes"]] == [p.id for p in manifest.planes]


def test_artifact_and_its_spec_have_one_summary(tiny_artifact: Path) -> None:
    assert json.loads(text(tiny_artifact, "--json")) == json.loads(text(SPEC, "--json"))
    assert text(tiny_artifact, "--plan") == text(SPEC, "--plan")


def test_resolved_spec_is_a_spec_of_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_text(text(SPEC, "--spec"))
    again = (path, "--weights", TARGET, "--draft", DRAFT, "--json")
    ours, theirs = json.loads(text(*again)), json.loads(text(SPEC, "--json"))
    assert ours["summary"]["spec_digest"] == theirs["summary"]["spec_digest"]


def test_several_views_are_printed_one_after_another() -> None:
    facts = json.loads(text(SPEC, "--plan", "--spec", "--time", "--set", "round.depth.max=2",
                            "--json"))  # fmt: skip
    assert list(facts) == ["plan", "spec", "time"]
    assert facts["spec"]["round"]["depth"]["max"] == 2
    assert list(facts["time"]) == [f"{name}_ms" for name in ("build", *NAMES)]
    assert "pass" in text(SPEC, "--plan", "--time").splitlines()[-len(NAMES) - 3]


def test_schema_is_a_json_schema_of_the_root() -> None:
    schema = json.loads(text("--schema"))
    assert {"target", "drafter", "round", "runtime"} <= set(schema["properties"])

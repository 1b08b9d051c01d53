"""memra-run with a trimmed head: what it tells, and the sidecar it keeps when asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_tools import SPEC, WEIGHTS, call

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.artifact import LEARNED_FILE

TYPED = ("-p", "The quick brown fox", "-n", "60")


@pytest.fixture
def artifact(poor_ranks: Path, kernel_cache: Path, tmp_path: Path) -> Path:
    trim = f"{{ranks: {poor_ranks}, spare: 100, sidecar: true}}"
    options = CompileOptions(overrides={"drafter.head.trim": trim}, cache=kernel_cache)
    return compile_spec(SPEC, tmp_path / "tiny.cpu.memra", options).folder


def test_what_is_learned_is_told_and_kept(artifact: Path, tiny_artifact: Path) -> None:
    first = call("memra-run", artifact, *WEIGHTS, *TYPED, "--stats")
    assert first.code == 0, first.err
    assert first.out == call("memra-run", tiny_artifact, *WEIGHTS, *TYPED).out
    assert "trim     256 rows of frequent tokens, 0 of 100 spare ones used" in first.err
    assert "learned ids added, " in first.err
    assert str(artifact / LEARNED_FILE) in first.err
    kept = (artifact / LEARNED_FILE).read_text().splitlines()[1:]
    assert f"{len(kept)} of 100 spare ones used" in first.err
    second = call("memra-run", artifact, *WEIGHTS, *TYPED, "--json", "--stats")
    found = json.loads(second.out)["trim"]
    assert found["from_sidecar"] == len(kept) > 0
    assert found["from_prompts"] == 0, "the same prompt again"
    assert found["used"] == len(kept) + found["from_verify"]
    assert f"({len(kept)} from sidecar" in second.err


@pytest.mark.parametrize("how", [("--plain",), ("--depth", "0")])
def test_nothing_is_learned_where_nobody_drafts(artifact: Path, how: tuple[str, ...]) -> None:
    ended = call("memra-run", artifact, *WEIGHTS, *TYPED, *how, "--json")
    assert json.loads(ended.out)["trim"] is None
    assert not (artifact / LEARNED_FILE).exists()


def test_nothing_is_kept_unless_the_spec_asks(trimmed_artifact: Path) -> None:
    ended = call("memra-run", trimmed_artifact, *WEIGHTS, *TYPED)
    assert ended.code == 0
    assert "sidecar" not in ended.err
    assert not (trimmed_artifact / LEARNED_FILE).exists()


def test_a_damaged_sidecar_is_refused(artifact: Path) -> None:
    (artifact / LEARNED_FILE).write_text("5\n6\n")
    ended = call("memra-run", artifact, *WEIGHTS, *TYPED)
    assert ended.code == 2
    assert "error[sidecar-corrupt]" in ended.err
    assert "hint: delete it" in ended.err


def test_compiling_again_keeps_what_was_learned_for_the_same_ranks(
    artifact: Path, poor_ranks: Path, kernel_cache: Path
) -> None:
    call("memra-run", artifact, *WEIGHTS, *TYPED)
    learned = (artifact / LEARNED_FILE).read_text()

    def compiled(ranks: Path) -> None:
        trim = f"{{ranks: {ranks}, spare: 150, sidecar: true}}"
        options = CompileOptions(overrides={"drafter.head.trim": trim}, cache=kernel_cache)
        assert compile_spec(SPEC, artifact, options).fresh

    compiled(poor_ranks)
    assert (artifact / LEARNED_FILE).read_text() == learned
    other = artifact.parent / "other.txt"
    other.write_text("".join(f"{i}\n" for i in range(300, 200, -1)))
    compiled(other)
    assert not (artifact / LEARNED_FILE).exists(), "it would be refused as foreign"

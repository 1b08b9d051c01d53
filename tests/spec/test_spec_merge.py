"""`extends` and `--set`: what merges, what is replaced, and whose positions are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_specs import GOOD, ROOT

from memra_compiler.spec import load_spec, weight_files
from memra_compiler.spec.merge import read_document
from memra_runtime.errors import MemraError, Position

BASE = "memra: 1\na: {x: 1, y: [1, 2], z: {p: 1}}\nb: 2\n"


def files(tmp_path: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_mappings_merge_lists_replace_null_deletes(tmp_path: Path) -> None:
    child = "memra: 1\nextends: base.yaml\na: {y: [3], z: {q: 2}, x: null}\nc: null\n"
    folder = files(tmp_path, base=BASE, child=child)

    document = read_document(folder / "child.yaml")

    assert document.data == {
        "memra": 1, "a": {"y": [3], "z": {"p": 1, "q": 2}}, "b": 2, "c": None
    }  # fmt: skip
    assert ("a", "y", 1) not in document.values


def test_positions_stay_with_the_file_that_writes_a_value(tmp_path: Path) -> None:
    folder = files(tmp_path, base=BASE, child="memra: 1\nextends: base.yaml\na: {x: 5}\n")

    document = read_document(folder / "child.yaml")

    assert document.mark(("a", "x")).place == Position(str(folder / "child.yaml"), 3, 8)
    assert document.mark(("a", "z", "p")).place == Position(str(folder / "base.yaml"), 2, 29)


def test_base_path_is_relative_to_the_child(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "child.yaml").write_text("memra: 1\nextends: ../base.yaml\n")
    files(tmp_path, base=BASE)

    assert read_document(inner / "child.yaml").data["b"] == 2


def test_override_replaces_one_value() -> None:
    spec = load_spec(
        ROOT / "model_specs" / "tiny" / "gemma4_tiny.yaml",
        overrides={"round.depth.max": "3", "target.layers": "[swa, full]", "runtime.kv": "bf16"},
    )

    assert (spec.round.depth.max, spec.round.depth.initial) == (3, 3)
    assert spec.target.layer_sequence() == [(0, "swa"), (1, "full")]
    assert spec.runtime.kv == "bf16"
    assert spec.place(("round", "depth", "max")) == "--set round.depth.max"
    assert spec.position(("round", "depth", "max")).line == 91  # the mapping around it


def test_override_with_null_restores_a_default() -> None:
    path = ROOT / "model_specs" / "tiny" / "gemma4_tiny.yaml"

    assert load_spec(path, overrides={"runtime.kv": "null"}).runtime.kv == "f16"


def test_override_makes_the_mappings_on_its_way(tmp_path: Path) -> None:
    path = files(tmp_path, spec=GOOD.replace("accept: greedy", "")) / "spec.yaml"

    assert load_spec(path, overrides={"round.accept": "greedy"}).round.accept == "greedy"
    with pytest.raises(MemraError, match="`nothing` is not a field of `round`"):
        load_spec(path, overrides={"round.nothing.at.all": "1"})


def test_weights_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    base = ROOT / "model_specs" / "tiny" / "gemma4_tiny.yaml"
    child = f"memra: 1\nextends: {base}\ndrafter: {{weights: my.gguf}}\n"
    path = files(tmp_path, child=child) / "child.yaml"

    assert weight_files(path) == {
        "target": base.parent / "gemma4-tiny-q8_0.gguf",
        "drafter": tmp_path / "my.gguf",
    }
    spec = load_spec(path, overrides={"target.weights": "here.gguf"})
    assert spec.weights("target") == Path("here.gguf")

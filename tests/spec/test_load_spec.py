"""The shipped specs, the resolved form, kinds found by themselves, and random damage."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bad_specs import GOOD, ROOT

from memra_compiler.drafters.chained import ChainedParams
from memra_compiler.layers.attention import AttentionParams
from memra_compiler.layers.base import FfnParams
from memra_compiler.layers.params import param
from memra_compiler.layers.query_attention import QueryAttentionParams
from memra_compiler.spec import Spec, load_spec
from memra_compiler.spec.yaml_source import read_yaml
from memra_runtime.errors import MemraError

SPECS = ROOT / "model_specs"


def load(name: str) -> Spec:
    return load_spec(SPECS / f"{name}.yaml")


def test_31b_has_the_published_numbers() -> None:
    spec = load("gemma4_31b")
    full = spec.target.layer_kinds["full"].mixer
    reader = spec.drafter.layer_kinds["swa"].mixer

    assert [i for i, kind in spec.target.layer_sequence() if kind == "full"] == [*range(5, 60, 6)]
    assert isinstance(full, AttentionParams)
    assert (full.heads, full.kv_heads, full.head_dim, full.window) == (32, 4, 512, None)
    assert isinstance(reader, QueryAttentionParams)
    assert (reader.kv_kind, reader.visible("drafter")) == ("swa", 1023)
    assert spec.target.embed.factor(spec.target.width) == 5376**0.5


def test_12b_changes_only_numbers_of_the_31b() -> None:
    spec, base = load("gemma4_12b"), load("gemma4_31b")

    assert (spec.name, spec.target.width, len(spec.target.layers)) == ("gemma4_12b", 3840, 48)
    assert spec.target.head.suppress_tokens == (258882, 258883)
    assert spec.round == base.round
    assert spec.drafter.width == base.drafter.width


def test_drafter_is_typed_by_its_kind() -> None:
    drafter = load("tiny/gemma4_tiny").drafter

    assert isinstance(drafter, ChainedParams)
    assert drafter.carry.source == "target.hidden_post_norm"
    assert drafter.layer_sequence() == [(0, "swa"), (1, "swa"), (2, "swa"), (3, "full")]


def test_resolved_spec_is_plain_json_and_loads_again(tmp_path: Path) -> None:
    spec = load("gemma4_12b")
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(spec.resolved()))

    assert json.loads(json.dumps(spec.resolved())) == spec.resolved()
    assert load_spec(path).digest == spec.digest
    assert spec.resolved()["round"]["depth"]["initial"] == 5


def test_digest_depends_on_meaning_not_on_writing(tmp_path: Path) -> None:
    spec = load("tiny/gemma4_tiny")
    path = tmp_path / "spec.yaml"
    path.write_text(
        GOOD.replace("[swa, swa, swa, swa, swa, full]", "{repeat: [swa, full]}")
        .replace("{repeat: [swa, full]}", "[swa, swa, swa, swa, swa, full]  # a comment")
        .replace("1e-6", "0.000001")
        .replace("weights: gemma4-tiny-q8_0.gguf", "weights: elsewhere/tiny.gguf")
    )

    assert load_spec(path).digest == spec.digest
    assert load_spec(path, overrides={"round.depth.max": "4"}).digest != spec.digest


def test_positions_for_the_compiler() -> None:
    spec = load("gemma4_31b")
    kind = ("target", "layer_kinds", "full")

    assert str(spec.position(kind)).endswith("gemma4_31b.yaml:31:5")
    assert spec.position((*kind, "mixer", "attention", "heads")).line == 35
    # a value that is not written belongs to what encloses it
    assert spec.position((*kind, "mixer", "attention", "window")).line == 34
    # layer 59 of a period of six is its last entry
    assert spec.position(("target", "layers", 59)) == spec.position(("target", "layers", 5))


def test_a_new_kind_is_a_key_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FfnParams, "registry", dict(FfnParams.registry))

    class Doubled(FfnParams):
        """Twice the input."""

        kind: ClassVar[str] = "doubled"
        times: int = param(2, ge=2, doc="How often.")

    path = tmp_path / "spec.yaml"
    gated = "ffn: {gated: {width: 1024, act: gelu_tanh}}"
    path.write_text(GOOD.replace(gated, "ffn: {doubled: {times: 3}}"))

    assert load_spec(path).target.layer_kinds["full"].ffn == Doubled(times=3)
    path.write_text(GOOD.replace(gated, "ffn: {doubled: {times: 1}}"))
    with pytest.raises(MemraError, match=r"doubled\.times` cannot be 1"):
        load_spec(path)


WORDS = (
    "null", "auto", "-1", "0", "[]", "{}", "1e400", "off", "'", "*a", "&a", "- x", "<<: 1", "true",
    "{a: {b: [c]}}", "\t", "swa", "0.5", "99999999999999999999", "last_own(x)", "!x", "? ", "|",
    "{swa: 1}", "[[swa]]", "é", ": ",
)  # fmt: skip
VALUES = (None, "auto", -1, 0, 2**70, 1e300, "x", "swa", True, [], {}, ["swa"], {"swa": 1}, [[1]])


def damaged_text(rng: random.Random) -> str:
    """Return the tiny spec with a few lines damaged."""
    lines = GOOD.splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        key, colon, _ = lines[at].partition(": ")
        lines[at] = rng.choice(
            [
                f"{key}: {rng.choice(WORDS)}" if colon else rng.choice(WORDS),
                lines[at] + rng.choice(WORDS),
                lines[rng.randrange(len(lines))],
                lines[at].replace("swa", rng.choice(WORDS)),
                "  " + lines[at],
                lines[at][: rng.randrange(len(lines[at]) + 1)],
            ]
        )
    return "\n".join(lines)


def damaged_data(rng: random.Random) -> str:
    """Return the tiny spec as JSON, with a few values replaced, removed or renamed."""
    data = read_yaml(ROOT / "model_specs" / "tiny" / "gemma4_tiny.yaml").data
    for _ in range(rng.randint(1, 3)):
        node: Any = data
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
            if rng.random() < 0.3 or not isinstance(node[key], dict | list):
                break
            node = node[key]
        if not node:
            continue
        value = node.pop(key) if rng.random() < 0.5 else rng.choice(VALUES)
        if isinstance(node, dict):
            node[key if rng.random() < 0.6 else f"{key}x"] = value
        else:
            node.append(value)
    return json.dumps(data)


@pytest.mark.parametrize("damage", [damaged_text, damaged_data])
def test_damaged_specs_never_end_in_anything_but_our_error(
    tmp_path: Path, damage: Callable[[random.Random], str]
) -> None:
    path, rng, reports = tmp_path / "spec.yaml", random.Random(7), []
    for _ in range(200):
        path.write_text(damage(rng), encoding="utf-8")
        try:
            load_spec(path)
        except MemraError as error:
            reports.append(str(error))

    assert len(reports) > 100
    assert [text for text in reports if "pydantic" in text or "Input should" in text] == []

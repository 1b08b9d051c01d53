"""The exported JSON Schema and the reference page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from bad_specs import BAD, GOOD, ROOT

from memra_compiler.drafters.base import DrafterParams
from memra_compiler.layers.base import FfnParams, LayerKind, MixerParams
from memra_compiler.spec.document import json_schema, spec_markdown
from memra_compiler.spec.yaml_source import read_value

SHIPPED = sorted((ROOT / "model_specs").rglob("*.yaml"))
SCHEMA = json_schema()
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)
}  # fmt: skip


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Validate the part of JSON Schema that we export; unknown keywords are a bug of the test."""
    return all(_holds(schema, word, rule, value) for word, rule in schema.items())


def _holds(schema: dict[str, Any], word: str, rule: Any, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if word == "$ref":
        return accepts(SCHEMA["$defs"][rule.removeprefix("#/$defs/")], value)
    if word == "type":
        if rule in ("integer", "number"):
            return number and (rule == "number" or isinstance(value, int))
        return isinstance(value, TYPES[rule])
    if word == "anyOf":
        return any(accepts(option, value) for option in rule)
    if word == "const":
        return bool(value == rule and type(value) is type(rule))
    if word == "enum":
        return value in rule
    if word == "if":
        return accepts(schema["then" if accepts(rule, value) else "else"], value)
    if word == "required":
        return not isinstance(value, dict) or all(name in value for name in rule)
    if word == "properties":
        return not isinstance(value, dict) or all(
            accepts(rule[name], item) for name, item in value.items() if name in rule
        )
    if word == "additionalProperties":
        if not isinstance(value, dict):
            return True
        extra = [v for k, v in value.items() if k not in schema.get("properties", {})]
        return not extra if rule is False else all(accepts(rule, item) for item in extra)
    if word in ("minProperties", "minItems", "minLength"):
        return not hasattr(value, "__len__") or len(value) >= rule
    if word == "maxProperties":
        return not isinstance(value, dict) or len(value) <= rule
    if word == "items":
        return not isinstance(value, list) or all(accepts(rule, item) for item in value)
    if word == "pattern":
        return not isinstance(value, str) or re.search(rule, value) is not None
    bounds = {"minimum": "__ge__", "maximum": "__le__", "exclusiveMinimum": "__gt__"}
    if word in bounds:
        return not number or bool(getattr(float(value), bounds[word])(float(rule)))
    if word == "multipleOf":
        return not number or value % rule == 0
    assert word in ("$schema", "$defs", "title", "description", "default", "then", "else"), word
    return True


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_schema_accepts_the_shipped_specs(path: Any) -> None:
    assert accepts(SCHEMA, read_value(path.read_text(encoding="utf-8"), str(path)))


def test_schema_accepts_auto_only_where_it_is_allowed() -> None:
    assert accepts(SCHEMA, read_value(GOOD.replace("heads: 4", "heads: auto"), ""))
    assert accepts(SCHEMA, read_value(GOOD.replace("layers: [", "layers: auto #"), ""))
    assert not accepts(SCHEMA, read_value(GOOD.replace("anchored", "auto"), ""))


@pytest.mark.parametrize(
    "name", ["unknown_field", "missing_fields", "unknown_mixer", "unknown_drafter", "no_ffn",
             "depth_too_large", "near_value", "odd_head_dim", "kv_target_form", "no_periods"]
)  # fmt: skip
def test_schema_refuses_what_it_can_see(name: str) -> None:
    spec = next(bad for bad in BAD if bad.name == name).spec()

    assert not accepts(SCHEMA, read_value(spec, name))


def test_schema_is_plain_json_with_a_description_for_every_field() -> None:
    definitions = json.loads(json.dumps(SCHEMA))["$defs"]
    bare = [
        f"{name}.{field}"
        for name, part in definitions.items()
        for field, rule in part.get("properties", {}).items()
        if not name.endswith("Changes") and "description" not in rule and "$ref" not in rule
    ]

    assert bare == []
    assert "x-memra" not in json.dumps(SCHEMA)


def test_reference_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")

    assert written == spec_markdown(), "run `python -m memra_compiler.spec.document docs/spec.md`"


def test_examples_of_kinds_are_valid() -> None:
    for family in (MixerParams, FfnParams):
        for name, kind in family.kinds().items():
            example = read_value(kind.example, name)
            assert kind.model_validate(example[family.noun][name])
    for kind in read_value(LayerKind.example, "")["layer_kinds"].values():
        assert LayerKind.model_validate(kind)


def test_every_kind_has_a_section() -> None:
    page = spec_markdown()

    for family in (MixerParams, FfnParams):
        for name in family.kinds():
            assert f"### `{family.noun}: {name}`" in page
    for name in DrafterParams.kinds():
        assert f"## `drafter`, kind `{name}`" in page

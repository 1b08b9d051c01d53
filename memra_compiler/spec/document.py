"""Export the schema: JSON Schema for editors, and the reference page `docs/spec.md`.

Both come from the field declarations, so neither can lag behind what is accepted. Write the page
with `python -m memra_compiler.spec.document docs/spec.md`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from memra_compiler.drafters.base import DrafterParams
from memra_compiler.drafters.chained import (
    CentroidHead,
    ChainedCarry,
    ChainedHead,
    ChainedInput,
)
from memra_compiler.drafters.head import HeadMap, HeadTrim
from memra_compiler.layers.attention import RopeParams
from memra_compiler.layers.base import (
    FfnParams,
    Formats,
    LayerKind,
    LayerRepeat,
    MixerParams,
)
from memra_compiler.layers.params import Params, summary
from memra_compiler.layers.per_layer_input import PerLayerInput
from memra_compiler.rounds.policy import Confidence, Depth, DepthFloor, InRound, RoundPolicy
from memra_compiler.spec.archs import known_archs
from memra_compiler.spec.fields import Slot, describe, field_slots, or_list
from memra_compiler.spec.schema import Embed, PerLayerEmbed, Root, Runtime, Target, TargetHead

AUTO = {"const": "auto", "description": "read it from the weight file"}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a spec file.

    A spec with `extends` may leave anything out and may write `null` to delete a key; any other
    spec must be complete.
    """
    whole = _with_auto(Root.model_json_schema(by_alias=True))
    definitions = whole.pop("$defs")
    whole.pop("title", None)
    parts = {"Spec": whole, **definitions}
    changes = {f"{name}Changes": _as_changes(part) for name, part in parts.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Memra spec",
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": "#/$defs/SpecChanges"},
        "else": {"$ref": "#/$defs/Spec"},
        "$defs": {**parts, **changes},
    }


def _with_auto(node: Any) -> Any:
    """Allow `auto` where a field is marked so, and drop our own marks and invented titles."""
    if isinstance(node, list):
        return [_with_auto(item) for item in node]
    if not isinstance(node, dict):
        return node
    named = isinstance(node.get("title"), str) and ("type" in node or "anyOf" in node)
    kept = {k: v for k, v in node.items() if k != "x-memra" and not (named and k == "title")}
    result = {key: _with_auto(value) for key, value in kept.items()}
    extra = node.get("x-memra")
    if not isinstance(extra, dict):
        return result
    if "unit" in extra and "description" in result:
        result["description"] += f" Unit: {extra['unit']}."
    if extra.get("auto"):
        outer = {k: result.pop(k) for k in ("description", "default") if k in result}
        result = {**outer, "anyOf": [result, AUTO]}
    return result


def _as_changes(node: Any) -> Any:
    """Return the schema of a partial mapping: nothing is required, `null` is allowed anywhere."""
    node = copy.deepcopy(node)
    # a change may delete one kind of a layer's part (`gated: null`) and name another
    whole = ("required", "minProperties", "maxProperties")

    def relax(part: Any) -> Any:
        if isinstance(part, list):
            return [relax(item) for item in part]
        if not isinstance(part, dict):
            return part
        result = {k: relax(v) for k, v in part.items() if k not in whole}
        if isinstance(part.get("$ref"), str):
            result["$ref"] = f"{part['$ref']}Changes"
        properties = result.get("properties")
        if isinstance(properties, dict):
            result["properties"] = {
                key: {"anyOf": [value, {"type": "null"}]} for key, value in properties.items()
            }
        return result

    return relax(node)


INTRO = """\
# The spec language

A spec is one YAML file that declares a pipeline: the target model, the drafter and how it reads
the target's caches, and the round policy. This page is generated from the schema.

```
memra-compile model_specs/tiny/gemma4_tiny.yaml -o build
```

That file is a complete example with every value written out.

**YAML rules.** Scalars follow YAML 1.2: `1e-6` is a number, `off` and `yes` are text, `010` is ten.
Unknown fields and repeated keys are errors. Anchors and aliases work; merge keys (`<<`) do not,
`extends` takes their place. Every error names the file, line and column, what was found and what
is allowed, and all errors of a spec are reported at once.

**`auto`.** A field marked *auto* may be written `auto`: its value is then read from the weight
file. A value that is written out is checked against the weight file instead, and a contradiction
is an error.

**`extends`.** `extends: other.yaml` starts from another spec. Mappings merge key by key, lists and
single values replace, and `null` deletes a key:

```yaml
memra: 1
extends: gemma4_31b.yaml
name: gemma4_31b_fixed
round: {depth: {policy: fixed, floor: null}}
```

**Command line.** `--set round.depth.max=3` replaces one value, by the same rules.
"""


def spec_markdown() -> str:
    """Return the reference page as Markdown."""
    parts = [INTRO, *_section("A spec", Root), *_section("`target`", Target)]
    parts += _section("`formats`", Formats, 3)
    parts += _section("`target.embed`", Embed, 3)
    parts += _section("`target.per_layer_embed`", PerLayerEmbed, 3)
    parts += _section("`target.head`", TargetHead, 3)
    parts += _section("Layer kinds", LayerKind)
    parts += _section("`per_layer_input`", PerLayerInput, 3)
    parts += _section("`layers` as a period", LayerRepeat, 3)
    for family in (MixerParams, FfnParams):
        for name, kind in family.kinds().items():
            parts += _section(f"`{family.noun}: {name}`", kind, 3)
    parts += _section("`rope`", RopeParams, 3)
    for name, kind in DrafterParams.kinds().items():
        parts += _section(f"`drafter`, kind `{name}`", kind)
    parts += _section("`drafter.input`", ChainedInput, 3)
    parts += _section("`drafter.carry`", ChainedCarry, 3)
    parts += _section("`drafter.head`", ChainedHead, 3)
    parts += _section("`drafter.head.centroids`", CentroidHead, 3)
    parts += _section("`drafter.head.trim`", HeadTrim, 3)
    parts += _section("`drafter.head.map`", HeadMap, 3)
    parts += _section("`round`", RoundPolicy)
    parts += _section("`round.depth`", Depth, 3)
    parts += _section("`round.depth.floor`", DepthFloor, 3)
    parts += _section("`round.confidence`", Confidence, 3)
    parts += _section("`round.confidence.in_round`", InRound, 3)
    parts += _section("`runtime`", Runtime)
    return "\n".join(parts)


def _section(title: str, model: type[Params], level: int = 2) -> Iterator[str]:
    yield f"{'#' * level} {title}\n"
    yield f"{_prose(model)}\n"
    yield "| field | value | default | meaning |\n|---|---|---|---|"
    for name, slot in field_slots(model).items():
        yield f"| `{name}` | {_value(name, slot, model)} | {_default(slot)} | {_meaning(slot)} |"
    yield ""
    if model.example:
        yield f"```yaml\n{model.example}```\n"


def _prose(model: type[BaseModel]) -> str:
    paragraphs = [" ".join(p.split()) for p in (model.__doc__ or "").split("\n\n")]
    return "\n\n".join(p for p in paragraphs if not p.startswith("Source:")) or summary(model)


def _value(name: str, slot: Slot, model: type[BaseModel]) -> str:
    words = describe(slot).removeprefix("a ")
    if name == "arch":  # the schema takes any text; the architecture tables decide
        section = "drafter" if issubclass(model, DrafterParams) else "target"
        words = or_list([f"`{arch}`" for arch in known_archs(section)])
    unit = slot.extra.get("unit")
    words = f"{words} ({unit})" if unit else words
    return f"{words}; *auto*" if slot.auto else words


def _default(slot: Slot) -> str:
    if slot.extra.get("default_words"):
        return str(slot.extra["default_words"])
    value = slot.field.default if slot.field else None
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "`[]`" if value == () else f"`{value}`"


def _meaning(slot: Slot) -> str:
    return (slot.field.description if slot.field else "") or ""


def main() -> None:
    """Write the reference page to the path given as the only argument."""
    FilePath(sys.argv[1]).write_text(spec_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()

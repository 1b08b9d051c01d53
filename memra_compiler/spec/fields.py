"""Walk from a path of a spec to the declared field, and say in words what the field accepts."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from memra_compiler.drafters.base import TaggedChoice
from memra_compiler.layers.base import LayerOrder, LayerRepeat
from memra_compiler.layers.params import KeyedChoice, Path
from memra_compiler.spec.marks import lookup
from memra_compiler.spec.schema import SQRT_WIDTH, EmbedScale, Root


@dataclass(frozen=True)
class Slot:
    """The declared type of one place in a spec, with the field it belongs to."""

    annotation: Any
    metadata: tuple[Any, ...] = ()
    field: FieldInfo | None = None

    @property
    def extra(self) -> dict[str, Any]:
        declared = self.field.json_schema_extra if self.field else None
        found = declared.get("x-memra", {}) if isinstance(declared, dict) else {}
        return found if isinstance(found, dict) else {}

    @property
    def auto(self) -> bool:
        return bool(self.extra.get("auto"))

    def choice(self, kind: type) -> Any:
        return next((m for m in self.metadata if isinstance(m, kind)), None)


def make_slot(annotation: Any, metadata: tuple[Any, ...], field: FieldInfo | None) -> Slot:
    """Peel `Annotated` and the `None` of an optional off a type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *inner = get_args(annotation)
            metadata = (*metadata, *inner)
        elif get_origin(annotation) in (Union, UnionType):
            options = [a for a in get_args(annotation) if a is not NoneType]
            if len(options) != 1:
                return Slot(annotation, metadata, field)
            annotation = options[0]
        else:
            return Slot(annotation, metadata, field)


ROOT = Slot(Root)


def field_slots(model: type[BaseModel]) -> dict[str, Slot]:
    """Map the YAML name of every field of a model to its slot, in the order of a good spec."""
    slots = {
        info.alias or name: make_slot(info.annotation, tuple(info.metadata), info)
        for name, info in model.model_fields.items()
    }
    order = {"kind": 0, "layer_kinds": 2, "layers": 3}
    return dict(sorted(slots.items(), key=lambda item: order.get(item[0], 1)))


def children(slot: Slot, value: Any) -> dict[str, Slot] | None:
    """Return the named places below a slot; None if any name is fine or there are no names."""
    keyed = slot.choice(KeyedChoice)
    if keyed:
        return {name: Slot(cls) for name, cls in keyed.family.kinds().items()}
    tagged = slot.choice(TaggedChoice)
    if tagged:
        member = tagged.member(value)
        return field_slots(member) if member else None
    if slot.choice(LayerOrder):
        return field_slots(LayerRepeat)
    if isinstance(slot.annotation, type) and issubclass(slot.annotation, BaseModel):
        return field_slots(slot.annotation)
    return None


def step(slot: Slot, key: str | int, value: Any) -> Slot | None:
    """Return the slot of `value[key]`, None if the schema has no such place."""
    if isinstance(key, int):
        if slot.choice(LayerOrder):
            return Slot(str)
        if get_origin(slot.annotation) is tuple:
            return make_slot(get_args(slot.annotation)[0], (), None)
        return None
    if get_origin(slot.annotation) is dict:
        return make_slot(get_args(slot.annotation)[1], (), None)
    return (children(slot, value) or {}).get(key)


def locate(data: Any, path: Path) -> Slot | None:
    """Return the slot at a path; `data` decides where a kind decides the fields."""
    slot: Slot | None = ROOT
    value = data
    for key in path:
        if slot is None:
            return None
        slot = step(slot, key, value)
        value = lookup(value, (key,), None)
    return slot


def dotted(path: Path) -> str:
    """Write a path as users write it: `target.layers[3]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.lstrip(".")


def or_list(words: list[str]) -> str:
    """Join alternatives: `a`, `b` or `c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def and_list(words: list[str]) -> str:
    """Join items: `a`, `b` and `c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def allowed_values(slot: Slot) -> list[str]:
    """Return the fixed words a slot accepts; empty if it is not a choice of words."""
    if slot.choice(EmbedScale):
        return [SQRT_WIDTH]
    if get_origin(slot.annotation) is Literal:
        return [str(value) for value in get_args(slot.annotation)]
    return []


def describe(slot: Slot) -> str:
    """Say what a slot accepts, so that it reads on after "must be"."""
    words = str(slot.extra.get("words") or "") or _by_type(slot)
    optional = slot.field is not None and NoneType in get_args(slot.field.annotation)
    return f"{words}, or `null`" if optional else words


def _by_type(slot: Slot) -> str:
    kind = slot.annotation
    if keyed := slot.choice(KeyedChoice):
        return f"one key: {or_list([f'`{name}`' for name in keyed.family.kinds()])}"
    if slot.choice(LayerOrder):
        return "a list of layer kinds, or a mapping with `repeat` and `times`"
    if slot.choice(EmbedScale):
        return EmbedScale.words
    if values := allowed_values(slot):
        return or_list([f"`{value}`" for value in values])
    if get_origin(kind) is tuple:
        item = make_slot(get_args(kind)[0], (), None)
        names = {int: "whole numbers", str: "names"}
        return f"a list of {names.get(item.annotation) or describe(item)}"
    if get_origin(kind) is dict or slot.choice(TaggedChoice):
        return "a mapping"
    simple = {bool: "`true` or `false`", str: "text", int: "a whole number", float: "a number"}
    if kind in simple:
        return simple[kind] + _bounds(slot.metadata)
    return "a mapping of fields"


def _bounds(metadata: tuple[Any, ...]) -> str:
    low = high = above = multiple = None
    for limit in metadata:
        if isinstance(limit, annotated_types.Ge):
            low = limit.ge
        elif isinstance(limit, annotated_types.Gt):
            above = limit.gt
        elif isinstance(limit, annotated_types.Le):
            high = limit.le
        elif isinstance(limit, annotated_types.MultipleOf):
            multiple = limit.multiple_of
    text = ""
    if low is not None:
        text = f" from {low} to {high}" if high is not None else f", {low} or more"
    elif above is not None:
        text = f" above {above}" + (f", at most {high}" if high is not None else "")
    return text + (f", a multiple of {multiple}" if multiple is not None else "")

"""The drafter as a spec declares it; one file in this folder is one kind, found by its `kind`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from memra_compiler.layers.base import Stack
from memra_compiler.layers.build import LayerBuild, ProgramBuilder
from memra_compiler.layers.params import Family, param


class DrafterParams(Family, Stack):
    """What every drafter declares; its kind adds how it is wired to the target."""

    package: ClassVar[str] = "memra_compiler.drafters"
    noun: ClassVar[str] = "drafter"
    registry: ClassVar[dict[str, type[Family]]] = {}

    kind: str = param(doc="The drafter kind, which decides the other fields.")

    def build(self, b: ProgramBuilder, place: DraftPlace) -> None:
        """Emit the draft program: one step of the round's chain."""
        raise NotImplementedError

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        for kind in get_args(cls.model_fields["kind"].annotation):
            DrafterParams.registry[kind] = cls


class TaggedChoice:
    """Annotation: a mapping whose `kind` decides its fields."""

    def __init__(self, family: type[Family]) -> None:
        self.family = family

    def member(self, value: object) -> type[Family] | None:
        """Return the params class that the mapping's `kind` names, None if there is none."""
        kind = value.get("kind") if isinstance(value, dict) else None
        return self.family.kinds().get(kind) if isinstance(kind, str) else None

    def pick(self, value: object) -> Family:
        if isinstance(value, self.family):
            return value
        if isinstance(value, dict) and "kind" not in value:
            raise PydanticCustomError("no_kind", "kind is missing")
        member = self.member(value)
        if member is None:
            raise PydanticCustomError("bad_kind", "no such kind")
        return member.model_validate(value)

    @staticmethod
    def dump(value: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = value.model_dump(mode="json", by_alias=True)
        return dumped

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(self.dump)
        return core_schema.no_info_plain_validator_function(self.pick, serialization=serialization)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        members = self.family.kinds().values()
        return {"anyOf": [handler(member.__pydantic_core_schema__) for member in members]}


DraftPositions = Literal["anchored", "advancing"]


@dataclass(frozen=True)
class DraftPlace:
    """What a drafter is wired to: the target's shape and the planes of the round."""

    target_width: int
    vocab: int
    embed_scale: float
    state: str
    batch: str
    forced: str
    carry: str
    #: Whether a gate reads how sure the drafter is of each draft.
    weighs: bool
    #: layer(program, section, index, kind, positions, ends)
    layer: Callable[[ProgramBuilder, str, int, str, str, str], LayerBuild]
    #: Whether the target's head is its embedding table.
    target_head_tied: bool = True
    #: Token ids of the ranks file, for a head that is trimmed.
    ranked: int = 0

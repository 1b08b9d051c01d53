"""What every section of a spec is made of: typed fields with their documentation.

A `Params` class is read three times: to validate YAML, to write the reference page, and to word an
error. So a field says everything about itself once, through `param`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

Path = tuple[str | int, ...]
"""Where a value sits in a spec: `("target", "layers", 3)`."""


@dataclass(frozen=True)
class Problem:
    """A rule that a well-typed spec breaks; paths are relative to the object that found it.

    `because` names the other values the rule looked at, as (path, what it says). `at_key` marks
    the key instead of the value.
    """

    path: Path
    message: str
    label: str = ""
    because: tuple[tuple[Path, str], ...] = ()
    hint: str = ""
    code: str = "conflict"
    at_key: bool = False


PROBLEMS = "memra_problems"


def raise_problems(*problems: Problem) -> None:
    """Hand problems to the validation in progress; it adds the path of the current object."""
    if problems:
        raise PydanticCustomError(PROBLEMS, "see the problems", {"problems": problems})


class Params(BaseModel):
    """Fields of one mapping of a spec: no unknown keys, no silent conversions, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    example: ClassVar[str] = ""
    """A YAML example for the reference page."""

    def check(self) -> Iterator[Problem]:
        """Yield what the fields cannot say each for itself; runs once they are all valid."""
        yield from ()

    @model_validator(mode="after")
    def _run_check(self) -> Params:
        raise_problems(*self.check())
        return self


def param(
    default: Any = ...,
    *,
    doc: str,
    unit: str = "",
    auto: bool = False,
    words: str = "",
    default_words: str = "",
    factory: Callable[..., Any] | None = None,
    **limits: Any,
) -> Any:
    """Declare a field.

    `auto`: a checkpoint may know the value, so YAML may say `auto`. `words`: how to describe the
    accepted values where the type does not say it well. `limits`: pydantic's own (`gt`, `le`, ...).
    """
    extra = {"unit": unit, "auto": auto, "words": words, "default_words": default_words}
    facts: Any = {"x-memra": {name: value for name, value in extra.items() if value}}
    if factory is not None:
        return Field(default_factory=factory, description=doc, json_schema_extra=facts, **limits)
    return Field(default, description=doc, json_schema_extra=facts, **limits)


_Item = TypeVar("_Item")


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Seq = Annotated[tuple[_Item, ...], BeforeValidator(_as_tuple)]
"""A YAML list, kept as a tuple because specs are immutable."""


class Family(Params):
    """Base of a set of interchangeable kinds, found by importing every module of `package`."""

    package: ClassVar[str] = ""
    noun: ClassVar[str] = ""
    registry: ClassVar[dict[str, type[Family]]] = {}

    @classmethod
    def kinds(cls) -> dict[str, type[Family]]:
        """Map the name of every kind of this family to its params class, sorted by name."""
        package = importlib.import_module(cls.package)
        for module in pkgutil.iter_modules(package.__path__, f"{cls.package}."):
            importlib.import_module(module.name)
        return dict(sorted(cls.registry.items()))


class KeyedChoice:
    """Annotation: `{KIND: {fields}}` in YAML, the params object of that kind in Python."""

    def __init__(self, family: type[Family]) -> None:
        self.family = family

    def model(self) -> type[Params]:
        """Build the model with one field per kind, so that error paths equal YAML paths."""
        fields: dict[str, Any] = {
            name: (cls, Field(default=None, description=summary(cls)))
            for name, cls in self.family.kinds().items()
        }
        return create_model(self.family.noun, __base__=Params, **fields)

    def pick(self, value: object) -> Family:
        if isinstance(value, self.family):
            return value
        choice = self.model().model_validate(value)
        chosen = sorted(choice.model_fields_set)
        if len(chosen) != 1:
            found = " and ".join(f"`{name}`" for name in chosen) or "none"
            known = ", ".join(self.family.kinds())
            message = f"a layer has exactly one {self.family.noun}, found {found}"
            raise_problems(Problem((), message, code="kind", hint=f"choose one of: {known}"))
        picked = getattr(choice, chosen[0])
        assert isinstance(picked, self.family)
        return picked

    @staticmethod
    def dump(value: Any) -> dict[str, Any]:
        return {value.kind: value.model_dump(mode="json", by_alias=True)}

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(self.dump)
        return core_schema.no_info_plain_validator_function(self.pick, serialization=serialization)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(self.model().__pydantic_core_schema__)
        resolved = handler.resolve_ref_schema(found)
        resolved.update(minProperties=1, maxProperties=1)
        for entry in resolved["properties"].values():
            entry.pop("default", None)
        return found


def summary(cls: type[BaseModel]) -> str:
    """First paragraph of a class's docstring, on one line."""
    text = (cls.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(text.split())

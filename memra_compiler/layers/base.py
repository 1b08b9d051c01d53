"""The layer as a spec declares it: its kinds, their order, and what both models of a pair share.

A layer kind is one file in this folder with a subclass of `MixerParams` or `FfnParams`; nothing
else lists it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import core_schema

from memra_compiler.layers.build import LayerBuild
from memra_compiler.layers.params import (
    Family,
    KeyedChoice,
    Params,
    Path,
    Problem,
    Seq,
    param,
    raise_problems,
)
from memra_compiler.layers.per_layer_input import PerLayerInput
from memra_compiler.ops.activation import Add, Scale

Format = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k"]

MAX_LAYERS = 1024


class MixerParams(Family):
    """The part of a layer that looks at other positions."""

    package: ClassVar[str] = "memra_compiler.layers"
    noun: ClassVar[str] = "mixer"
    registry: ClassVar[dict[str, type[Family]]] = {}
    kind: ClassVar[str]
    owns_kv: ClassVar[bool] = False
    """Whether a layer of this kind appends its own keys and values."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:
            MixerParams.registry[cls.kind] = cls

    def row_lengths(self) -> Iterator[tuple[Path, int]]:
        """Yield the row length (elements) of every matrix whose input is not the hidden width."""
        yield from ()

    def build(self, b: LayerBuild, x: str) -> str:
        """Emit this part for the normed rows `x [T, width]`; returns its output, `[T, width]`."""
        raise NotImplementedError


class FfnParams(Family):
    """The part of a layer that looks at one position."""

    package: ClassVar[str] = "memra_compiler.layers"
    noun: ClassVar[str] = "ffn"
    registry: ClassVar[dict[str, type[Family]]] = {}
    kind: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:
            FfnParams.registry[cls.kind] = cls

    def row_lengths(self) -> Iterator[tuple[Path, int]]:
        """Yield the row length (elements) of every matrix whose input is not the hidden width."""
        yield from ()

    def build(self, b: LayerBuild, x: str, residual: str) -> str:
        """Emit this part for the normed rows `x [T, width]`; returns its output, `[T, width]`.

        `residual [T, width]` is what `x` is the norm of.
        """
        raise NotImplementedError


class LayerKind(Params):
    """One kind of layer: where it is normalised, its mixer and its feed-forward part.

    With `norms: sandwich` a layer computes `u = x + norm(mixer(norm(x)))` and
    `y = u + norm(ffn(norm(u)))`; with `norms: pre` the two outer norms are left out.
    """

    example: ClassVar[str] = (
        "layer_kinds:\n"
        "  full:\n"
        "    norms: sandwich\n"
        "    mixer:\n"
        "      attention:\n"
        "        {heads: 32, kv_heads: 4, head_dim: 512, scale: 1.0, qk_norm: rms, v_norm: unit,\n"
        "         value_from: key, rope: {base: 1e6, fraction: 0.25, factors: rope_freqs}}\n"
        "    ffn: {gated: {width: 21504, act: gelu_tanh}}\n"
        "    out_scale: true\n"
        "layers: [full]\n"
    )

    norms: Literal["sandwich", "pre"] = param(
        auto=True, doc="Where RMS norms sit: around both halves of a layer, or before them only."
    )
    mixer: Annotated[MixerParams, KeyedChoice(MixerParams)] = param(
        doc="The mixer, as one key: its kind, with the fields of that kind."
    )
    ffn: Annotated[FfnParams, KeyedChoice(FfnParams)] = param(
        doc="The feed-forward part, as one key: its kind, with the fields of that kind."
    )
    per_layer_input: PerLayerInput | None = param(
        None,
        default_words="absent: none",
        doc="The last part of a layer of a target with `per_layer_embed`, which reads its slice.",
    )
    out_scale: bool = param(
        False, auto=True, doc="Whether the layer's output is multiplied by a learned scalar."
    )

    def build(self, b: LayerBuild, x: str) -> str:
        """Emit one layer for the residual `x [T, width]`; returns the next residual."""
        a = b.norm(x, "attn_norm", at=("norms",))
        x = self._join(b, x, self.mixer.build(b, a), "post_attention_norm")
        z = b.norm(x, "ffn_norm", at=("norms",))
        x = self._join(b, x, self.ffn.build(b, z, x), "post_ffw_norm")
        if self.per_layer_input is not None:
            x = self.per_layer_input.build(b, x)
        if self.out_scale:
            x = b.run(Scale(), x, b.weight("out_scale", 1, use="norm"), part="out_scale")
        return x

    def _join(self, b: LayerBuild, x: str, y: str, role: str) -> str:
        """Add a half's output to the residual, after its outer norm if there is one."""
        if self.norms == "sandwich":
            y = b.norm(y, role, at=("norms",))
        return b.run(Add(), x, y, part=f"{role}.add", at=("norms",))


class LayerRepeat(Params):
    """Layers as a period and how often it occurs."""

    example: ClassVar[str] = "layers: {repeat: [swa, swa, swa, swa, swa, full], times: 10}\n"

    repeat: Seq[str] = param(doc="Names of layer kinds, in order.", min_length=1)
    times: int = param(1, doc="How often the period occurs.", ge=1, le=MAX_LAYERS)


class LayerOrder:
    """Annotation: a list of kind names or `{repeat, times}` in YAML, all names in Python."""

    @staticmethod
    def expand(value: object) -> tuple[str, ...]:
        if isinstance(value, dict):
            period = LayerRepeat.model_validate(value)
            names = period.repeat * period.times
        else:
            names = _NAMES.validate_python(value)
        if len(names) > MAX_LAYERS:
            raise_problems(Problem((), f"{len(names)} layers; at most {MAX_LAYERS} are possible"))
        return names

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(list)
        return core_schema.no_info_plain_validator_function(
            self.expand, serialization=serialization
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        forms = (LayerRepeat.__pydantic_core_schema__, _NAMES.core_schema)
        return {"anyOf": [handler(form) for form in forms]}


_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(
    Annotated[Seq[str], param(doc="names", min_length=1)]
)

Layers = Annotated[tuple[str, ...], LayerOrder()]


class Formats(Params):
    """Storage formats assumed where no weight file is at hand; a file at hand says its own."""

    example: ClassVar[str] = "formats: {matrix: q4_0, embed: q6_k, norm: f32}\n"

    matrix: Format = param("bf16", doc="Format of all matrices but the embedding table.")
    embed: Format = param("bf16", doc="Format of the embedding table, and of a tied head.")
    norm: Format = param("f32", doc="Format of norm weights, scalars and routers.")


class DraftHead(Params):
    """From the last hidden state of a drafter to logits."""

    example: ClassVar[str] = "head: {tied: true}\n"

    tied: bool = param(
        auto=True, doc="Whether the head is the model's own embedding table (not the target's)."
    )
    softcap: float | None = param(
        None, auto=True, gt=0, doc="Logits become `softcap * tanh(logits / softcap)`."
    )


def stack_problems(layer_kinds: Collection[str], layers: Collection[str]) -> Iterator[Problem]:
    """Yield what is wrong between the declared kinds and the order of layers."""
    reported = set()
    for index, name in enumerate(layers):
        if name not in layer_kinds and name not in reported:
            reported.add(name)
            yield Problem(
                ("layers", index),
                f"`layers` uses the layer kind `{name}`, which `layer_kinds` does not declare",
                label="not declared",
                hint=f"declared kinds: {', '.join(layer_kinds)}",
                code="unknown-kind",
            )
    for name in layer_kinds:
        if not (name[:1].isalpha() and name.replace("_", "a").isalnum() and name.isascii()):
            yield Problem(
                ("layer_kinds", name),
                f"`{name}` is not a name for a layer kind",
                label="use letters, digits and `_`",
                at_key=True,
            )
        elif name not in layers:
            yield Problem(
                ("layer_kinds", name),
                f"the layer kind `{name}` is declared but `layers` never uses it",
                label="never used",
                at_key=True,
            )


class Stack(Params):
    """What a target and a drafter have in common: weights, width, layer kinds and their order."""

    arch: str = param(
        words="an architecture Memra has a table for",
        doc="Architecture of the weights (`general.architecture`, `model_type`).",
    )
    weights: str | None = param(
        None, min_length=1, doc="Weight file or folder, relative to the spec that names it."
    )
    formats: Formats = param(
        factory=Formats,
        default_words="bf16, norms f32",
        doc="Storage formats where no weight file is at hand.",
    )
    width: int = param(auto=True, ge=1, unit="elements", doc="Hidden width.")
    norm_eps: float = param(
        auto=True, gt=0, le=0.1, doc="Added to the mean square in every RMS norm."
    )
    layer_kinds: dict[str, LayerKind] = param(
        doc="The layer kinds by a name of your choice.", min_length=1
    )
    layers: Layers = param(
        auto=True,
        doc="The order of layers, first to last: a list of kind names, or a period with "
        "`repeat` and `times`.",
    )

    def layer_sequence(self) -> list[tuple[int, str]]:
        """Return (index, kind name) of every layer, first to last."""
        return list(enumerate(self.layers))

    def check(self) -> Iterator[Problem]:
        yield from stack_problems(self.layer_kinds, self.layers)

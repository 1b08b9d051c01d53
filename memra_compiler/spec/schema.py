"""The sections of a spec that belong to no layer, drafter or round kind, and the root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from memra_compiler.drafters.base import DrafterParams, TaggedChoice
from memra_compiler.layers.base import DraftHead, Stack
from memra_compiler.layers.params import Params, Problem, Seq, param, raise_problems
from memra_compiler.rounds.policy import RoundPolicy

SQRT_WIDTH = "sqrt_width"


class EmbedScale:
    """Annotation: `sqrt_width` or a number above 0."""

    words = f"`{SQRT_WIDTH}` or a number above 0"

    def pick(self, value: object) -> float | str:
        if value == SQRT_WIDTH:
            return SQRT_WIDTH
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and 0 < float(value) < float("inf"):  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
        raise_problems(Problem((), "", code="value"))
        raise AssertionError

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.pick)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"const": SQRT_WIDTH}, {"type": "number", "exclusiveMinimum": 0}]}


class Embed(Params):
    """From token ids to the first hidden state."""

    example: ClassVar[str] = "embed: {scale: sqrt_width}\n"

    scale: Annotated[float | str, EmbedScale()] = param(
        1.0,
        auto=True,
        words=EmbedScale.words,
        doc="Factor on the embedding row, in f32; `sqrt_width` is the square root of `width`.",
    )

    def factor(self, width: int) -> float:
        """Return the factor for a model of this hidden width."""
        return float(width) ** 0.5 if isinstance(self.scale, str) else self.scale


class PerLayerEmbed(Params):
    """A second, narrow embedding of each token, of which every layer reads its own slice.

    For layer l of L: `(norm(slice l of (project(x) / sqrt(width of x))) + sqrt(P) * table[id][l])
    / sqrt(2)`, x being the embedding after its scale and P the width of a slice.
    """

    example: ClassVar[str] = "per_layer_embed: {width: 256}\n"

    width: int = param(
        auto=True,
        ge=16,
        multiple_of=16,
        unit="elements",
        doc="Width P of a layer's slice; the table has `layers * width` columns.",
    )


class TargetHead(DraftHead):
    """From the last hidden state of the target to logits."""

    example: ClassVar[str] = "head: {tied: true, softcap: 30.0, suppress_tokens: []}\n"

    tied: bool = param(auto=True, doc="Whether the head is the embedding table.")
    suppress_tokens: Seq[int] = param(
        (),
        auto=True,
        doc="Token ids that are never produced; they are masked in every verified row.",
    )

    def check(self) -> Iterator[Problem]:
        for index, token in enumerate(self.suppress_tokens):
            first = self.suppress_tokens.index(token)
            if first < index:
                yield Problem(
                    ("suppress_tokens", index),
                    f"`suppress_tokens` lists token {token} twice",
                    label="second time",
                    because=((("suppress_tokens", first), f"token {token}"),),
                )


class Target(Stack):
    """The model whose text is produced."""

    vocab: int = param(auto=True, ge=2, unit="tokens", doc="Rows of the embedding table.")
    max_positions: int = param(
        auto=True, ge=1, unit="tokens", doc="Positions the model was trained for."
    )
    embed: Embed = param(
        factory=Embed, default_words="scale 1", doc="From token ids to the first hidden state."
    )
    per_layer_embed: PerLayerEmbed | None = param(
        None,
        default_words="absent: none",
        doc="Per-layer embeddings, which layer kinds with `per_layer_input` read.",
    )
    head: TargetHead = param(doc="From the last hidden state to logits.")

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        for index, token in enumerate(self.head.suppress_tokens):
            if not 0 <= token < self.vocab:
                yield Problem(
                    ("head", "suppress_tokens", index),
                    f"token {token} is outside the vocabulary",
                    label=f"must be 0 to {self.vocab - 1}",
                    because=((("vocab",), "`vocab`"),),
                )


class Runtime(Params):
    """What the compiled program keeps in memory."""

    example: ClassVar[str] = (
        "runtime: {max_context: 32768, kv: f16, weights: as_stored, activations: auto}\n"
    )

    max_context: int = param(
        ge=1, unit="tokens", doc="Rows of the key/value cache: prompt plus produced text."
    )
    kv: Literal["f32", "f16", "bf16", "q8_0"] = param(
        "f16",
        doc="Format of cached keys and values. `q8_0` is int8 with a scale per 32 values of a "
        "head, a little over half the bytes of `f16`; heads must be multiples of 32 wide.",
    )
    weights: Literal["as_stored"] = param(
        "as_stored", doc="Weights stay in the format of their file."
    )
    activations: Literal["auto", "f32", "bf16", "int8"] = param(
        "auto",
        doc="Format of the rows that meet quantised and 16-bit matrices; f32 matrices take f32 "
        "rows. `f32`; `bf16`, rounded to nearest even; `int8` with a scale per 32 inputs, which "
        "is fastest and rounds as llama.cpp does (16-bit matrices then take bf16 rows). `auto` is "
        "`f32` on a CPU and `int8` on CUDA. Part of the numeric class.",
    )

    def activations_on(self, target: str) -> str:
        """Return the activations that `auto` stands for on a target."""
        if self.activations != "auto":
            return self.activations
        return "int8" if target.startswith("cuda") else "f32"


class Root(Params):
    """A whole spec."""

    memra: Literal[1] = param(doc="Version of the spec language.")
    name: str = param(
        pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$",
        words="a name of letters, digits, `_`, `-` and `.`",
        doc="Name of the pipeline; the artifact's folder begins with it.",
    )
    extends: str | None = param(
        None,
        doc="Another spec that this one changes, relative to this file. Mappings merge, lists and "
        "values replace, `null` deletes a key.",
    )
    target: Target = param(doc="The model whose text is produced.")
    drafter: Annotated[DrafterParams, TaggedChoice(DrafterParams)] = param(
        doc="The model that proposes tokens; `kind` decides its fields."
    )
    round: RoundPolicy = param(doc="How deep to draft and what to accept.")
    runtime: Runtime = param(doc="What the compiled program keeps in memory.")

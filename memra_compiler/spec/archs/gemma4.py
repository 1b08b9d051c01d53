"""gemma4 text models: how their checkpoints spell what a spec says.

One architecture string serves dense, mixture-of-experts and per-layer-embedding variants; what a
file is must be read from its keys and tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memra_compiler.layers.attention import AttentionParams
from memra_compiler.layers.base import MixerParams
from memra_compiler.layers.params import Path, Problem
from memra_compiler.layers.query_attention import QueryAttentionParams
from memra_compiler.spec.archs.gemma_family import LayerFacts, Reader, activation, stack_facts
from memra_compiler.spec.archs.gemma_ffn import (
    experts_expected,
    ffn_facts,
    widths_expected,
    wrong_ffns,
)
from memra_compiler.spec.archs.gemma_names import (
    EXPERT_NAMES,
    LAYER_NAMES,
    NAMES,
    PER_LAYER_NAMES,
    spell,
    spelled,
)
from memra_compiler.spec.archs.table import CheckpointLike, Expected, Fact, Facts, names_for

if TYPE_CHECKING:
    from memra_compiler.spec.model import Spec
    from memra_compiler.spec.schema import Target

_PER_LAYER = ("embedding_length_per_layer_input", "hidden_size_per_layer_input")

#: Parts of a multimodal checkpoint beside its text model.
_ENCODERS = ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")


class Gemma4:
    """The table of `gemma4`."""

    name = "gemma4"
    names = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    section = "target"
    roles = (*NAMES, *PER_LAYER_NAMES)
    layer_roles = (*LAYER_NAMES, *EXPERT_NAMES)

    def __init__(self) -> None:
        self._names = spelled(self.layer_roles, PER_LAYER_NAMES)

    def weight_names(self, role: str, layer: int | None = None) -> tuple[str, ...]:
        """Return the accepted names of a weight, GGUF first. Raises: KeyError."""
        return names_for(self._names, role, layer)

    def layer_names(self, names: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Return the accepted names of a weight that a layer kind spells itself."""
        return tuple(name.replace("{i}", str(layer)) for name in spell(names, layer=True))

    def facts(self, checkpoint: CheckpointLike, data: Mapping[str, Any]) -> Facts:
        """Read a target checkpoint. `data` is the raw spec, which names the layer kinds."""
        found = Facts()
        reader = Reader(checkpoint, self._names)
        section = data.get("target")
        if not isinstance(section, dict):
            return found
        self._model_facts(found, reader)
        found.problems += _per_layer_problems(reader, section)

        def per_layer(index: int, layer: LayerFacts) -> Mapping[Path, Fact | None]:
            return self._layer_facts(reader, index, layer)

        mixers = {AttentionParams.kind: True, QueryAttentionParams.kind: False}
        stack_facts(found, "target", section, mixers, reader.layers(), per_layer)
        found.problems += wrong_ffns(section, found)
        return found

    def _model_facts(self, found: Facts, reader: Reader) -> None:
        arch = Fact("sqrt_width", f"the architecture {self.name}")
        rows = reader.tensor("embed")
        table = f"the rows of the embedding table of {reader.file}"
        values = {
            ("vocab",): Fact(rows[0], table) if rows else reader.key("vocab_size", "vocab_size"),
            ("width",): reader.key("embedding_length", "hidden_size"),
            ("max_positions",): reader.key("context_length", "max_position_embeddings"),
            ("norm_eps",): reader.key("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            ("embed", "scale"): arch,
            ("per_layer_embed", "width"): reader.key(*_PER_LAYER),
            ("head", "tied"): tied_head(reader),
            ("head", "softcap"): softcap(reader),
            ("head", "suppress_tokens"): _suppressed(reader, rows[0] if rows else None),
        }
        for path, fact in values.items():
            if fact is not None:
                found.values[("target", *path)] = fact

    def _layer_facts(
        self, reader: Reader, index: int, layer: LayerFacts
    ) -> Mapping[Path, Fact | None]:
        arch = f"the architecture {self.name}"
        both: dict[Path, Fact | None] = {
            ("norms",): Fact("sandwich", arch),
            ("per_layer_input", "act"): activation(reader, self.name),
            ("out_scale",): reader.has("out_scale", index),
            **ffn_facts(reader, index, layer, activation(reader, self.name)),
        }
        q_norm = reader.has("q_norm", index)
        normed = q_norm and Fact("rms" if q_norm.value else "none", q_norm.origin)
        owns = bool(layer.own_kv.value)
        mixer = ("mixer", (AttentionParams if owns else QueryAttentionParams).kind)
        queries: dict[Path, Fact | None] = {
            (*mixer, "heads"): layer.heads,
            (*mixer, "head_dim"): layer.head_dim,
            (*mixer, "window"): layer.window,
            (*mixer, "scale"): Fact(1.0, arch),
            (*mixer, "qk_norm" if owns else "q_norm"): normed,
            **rope_facts((*mixer, "rope"), reader, layer, arch),
        }
        if not owns:
            return {**both, **queries}
        own_v = reader.has("v", index)
        if own_v is None and (shared := reader.key("", "attention_k_eq_v")):
            own_v = Fact(not shared.value or bool(layer.windowed.value), shared.origin)
        return {
            **both,
            **queries,
            (*mixer, "kv_heads"): layer.kv_heads,
            (*mixer, "v_norm"): Fact("unit", arch),
            (*mixer, "value_from"): own_v and Fact("own" if own_v.value else "key", own_v.origin),
        }

    def expected(self, spec: Spec) -> list[Expected]:
        """Return what another target file must say to be used with this spec."""
        target = spec.target
        head = target.head
        found = [
            Expected(("vocab_size",), target.vocab, ("target", "vocab")),
            *model_expected("gemma4.", "target", target.width, target.norm_eps, spec),
            Expected(
                ("gemma4.context_length", "max_position_embeddings"),
                target.max_positions,
                ("target", "max_positions"),
            ),
            Expected(
                ("gemma4.final_logit_softcapping", "final_logit_softcapping"),
                head.softcap,
                ("target", "head", "softcap"),
            ),
            Expected(
                ("tokenizer.ggml.suppress_tokens",),
                list(head.suppress_tokens),
                ("target", "head", "suppress_tokens"),
            ),
            Expected(
                ("gemma4.attention.shared_kv_layers", "num_kv_shared_layers"),
                sum(not target.layer_kinds[kind].mixer.owns_kv for kind in target.layers),
                ("target", "layers"),
            ),
            Expected(
                (f"gemma4.{_PER_LAYER[0]}", _PER_LAYER[1]),
                target.per_layer_embed.width if target.per_layer_embed else 0,
                ("target", "per_layer_embed", "width"),
            ),
            *layer_expected("gemma4.", "target", spec),
            *experts_expected(spec),
        ]
        mixers = [target.layer_kinds[kind].mixer for kind in target.layers]
        kv = [
            owner.kv_heads
            for mixer in mixers
            if isinstance(owner := _owner(target, mixer), AttentionParams)
        ]
        path = ("target", "layer_kinds")
        return [*found, Expected(("gemma4.attention.head_count_kv",), kv, path)]

    def ignored(self, spec: Spec) -> Mapping[str, str]:
        """Return what the text model does not read: encoders, and keys of sharing layers."""
        found = {f"{name}.*": "not a part of the text model" for name in _ENCODERS}
        for index, kind in spec.target.layer_sequence():
            if not spec.target.layer_kinds[kind].mixer.owns_kv:
                why = f"layer {index} reads the keys and values of an earlier layer"
                for role in ("k", "v", "k_norm"):
                    found |= dict.fromkeys(self.weight_names(role, index), why)
        return found


def _owner(target: Target, mixer: MixerParams) -> MixerParams:
    """The mixer whose keys and values a layer attends."""
    if isinstance(mixer, QueryAttentionParams):
        return target.layer_kinds[mixer.kv_kind].mixer
    return mixer


def _per_layer_problems(reader: Reader, section: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if the file has per-layer embeddings and the spec none, or the reverse."""
    found = reader.key(*_PER_LAYER)
    width = found.value if found else 0
    declared = section.get("per_layer_embed") is not None
    if width and found and not declared:
        yield Problem(
            ("target",),
            f"this checkpoint has per-layer embeddings {width} wide, the spec has none",
            label="`per_layer_embed` is missing",
            hint=f"write `per_layer_embed: {{width: {width}}}`, and `per_layer_input` in each "
            f"layer kind; see {found.origin}",
            code="weights-mismatch",
            at_key=True,
        )
    elif declared and not width:
        origin = found.origin if found else f"the absence of `{_PER_LAYER[1]}` in {reader.file}"
        yield Problem(
            ("target", "per_layer_embed"),
            "the spec has per-layer embeddings, this checkpoint has none",
            label="not in the weights",
            hint=f"see {origin}",
            code="weights-mismatch",
            at_key=True,
        )


def softcap(reader: Reader) -> Fact:
    """Return the cap on the logits; a file without the key has none."""
    key = "final_logit_softcapping"
    return reader.key(key, key) or Fact(None, f"the absence of `{key}` in {reader.file}")


def tied_head(reader: Reader) -> Fact | None:
    """Return whether the head is the embedding table; a head tensor of its own decides."""
    own = reader.has("head")
    if own is not None:
        return Fact(not own.value, own.origin)
    return reader.key("", "tie_word_embeddings")


def _suppressed(reader: Reader, vocab: int | None) -> Fact | None:
    key = "tokenizer.ggml.suppress_tokens" if reader.gguf else "suppress_tokens"
    value = reader.checkpoint.metadata.get(key)
    if value is None:
        # a GGUF file without the key suppresses nothing; a config.json just does not say
        return Fact([], f"the absence of `{key}` in {reader.file}") if reader.gguf else None
    tokens = [int(token) for token in value] if isinstance(value, list | tuple) else None
    if tokens is None:
        tolist = getattr(value, "tolist", None)
        tokens = [int(token) for token in tolist()] if tolist else []
    inside = [t for t in dict.fromkeys(tokens) if t >= 0 and (vocab is None or t < vocab)]
    return Fact(inside, f"`{key}` of {reader.file}")


def rope_facts(path: Path, reader: Reader, layer: LayerFacts, arch: str) -> dict[Path, Fact | None]:
    """Return rotary facts; only global layers divide their angles by `rope_freqs`."""
    factors: Fact | None = Fact(None, layer.windowed.origin)
    if not layer.windowed.value:
        stored = reader.has("rope_freqs") if reader.gguf else None
        missing = stored is not None and not stored.value
        factors = Fact(None if missing else "rope_freqs", stored.origin if stored else arch)
    return {
        (*path, "base"): layer.base,
        (*path, "fraction"): layer.fraction,
        (*path, "factors"): factors,
    }


def model_expected(prefix: str, section: str, width: int, eps: float, spec: Spec) -> list[Expected]:
    """Return the expectations that a target and its drafter word alike."""
    layers = getattr(spec, section).layers
    return [
        Expected((f"{prefix}block_count", "num_hidden_layers"), len(layers), (section, "layers")),
        Expected((f"{prefix}embedding_length", "hidden_size"), width, (section, "width")),
        Expected(
            (f"{prefix}attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            eps,
            (section, "norm_eps"),
        ),
    ]


def layer_expected(prefix: str, section: str, spec: Spec) -> list[Expected]:
    """Return the per-layer expectations: pattern, heads, widths, windows and rotary bases."""
    stack = getattr(spec, section)
    kinds = [stack.layer_kinds[name] for _, name in stack.layer_sequence()]
    windowed = [kind.mixer.window is not None for kind in kinds]
    layers, declared = (section, "layers"), (section, "layer_kinds")
    types = ["sliding_attention" if w else "full_attention" for w in windowed]
    found = [
        Expected((f"{prefix}attention.sliding_window_pattern",), windowed, layers),
        Expected(("layer_types",), types, layers),
        Expected(
            (f"{prefix}attention.head_count", "num_attention_heads"),
            [kind.mixer.heads for kind in kinds],
            declared,
        ),
        *widths_expected(prefix, declared, kinds),
    ]
    seen = set()
    for (_, name), kind in zip(stack.layer_sequence(), kinds, strict=True):
        if name in seen:
            continue
        seen.add(name)
        mixer, path = kind.mixer, (section, "layer_kinds", name, "mixer", kind.mixer.kind)
        local = mixer.window is not None
        swa, hf_type = ("_swa", "sliding_attention") if local else ("", "full_attention")
        hf_dim = "head_dim" if local else "global_head_dim"
        found += [
            Expected(
                (f"{prefix}attention.key_length{swa}", hf_dim), mixer.head_dim, (*path, "head_dim")
            ),
            Expected(
                (f"{prefix}rope.freq_base{swa}", f"rope_parameters.{hf_type}.rope_theta"),
                mixer.rope.base,
                (*path, "rope", "base"),
            ),
        ]
        if local:
            keys = (f"{prefix}attention.sliding_window", "sliding_window")
            found.append(Expected(keys, mixer.window, (*path, "window")))
    return found


TABLE = Gemma4()

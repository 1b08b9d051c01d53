"""gemma4 text models: how their checkpoints spell what a spec says.

One architecture string serves dense, mixture-of-experts and per-layer-embedding variants; what a
file is must be read from its keys and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memra_compiler.layers.attention import AttentionParams
from memra_compiler.layers.params import Path, Problem
from memra_compiler.spec.archs.gemma_family import LayerFacts, Reader, activation, stack_facts
from memra_compiler.spec.archs.gemma_ffn import (
    dense_width,
    experts_expected,
    ffn_facts,
    wrong_ffns,
)
from memra_compiler.spec.archs.gemma_names import (
    EXPERT_NAMES,
    LAYER_NAMES,
    NAMES,
    spell,
    spelled,
)
from memra_compiler.spec.archs.table import CheckpointLike, Expected, Fact, Facts, names_for

if TYPE_CHECKING:
    from memra_compiler.spec.model import Spec

_UNSUPPORTED = (
    ("embedding_length_per_layer_input", "hidden_size_per_layer_input", "per-layer embeddings"),
    ("attention.shared_kv_layers", "num_kv_shared_layers", "layers that share keys and values"),
)


class Gemma4:
    """The table of `gemma4`."""

    name = "gemma4"
    names = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    section = "target"
    roles = tuple(NAMES)
    layer_roles = (*LAYER_NAMES, *EXPERT_NAMES)

    def __init__(self) -> None:
        self._names = spelled(self.layer_roles)

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
        for gguf, config, what in _UNSUPPORTED:
            fact = reader.key(gguf, config)
            if fact and isinstance(fact.value, int) and fact.value > 0:
                found.problems.append(
                    Problem(
                        ("target", "arch"),
                        f"this checkpoint has {what}, which are not supported yet",
                        label="this variant is not supported yet",
                        hint=f"see {fact.origin}, which is {fact.value}",
                        code="not-supported",
                    )
                )
        self._model_facts(found, reader)

        def per_layer(index: int, layer: LayerFacts) -> Mapping[Path, Fact | None]:
            return self._layer_facts(reader, index, layer)

        stack_facts(found, "target", section, AttentionParams.kind, reader.layers(), per_layer)
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
        own_v, q_norm = reader.has("v", index), reader.has("q_norm", index)
        if own_v is None and (shared := reader.key("", "attention_k_eq_v")):
            own_v = Fact(not shared.value or bool(layer.windowed.value), shared.origin)
        arch = f"the architecture {self.name}"
        mixer = ("mixer", AttentionParams.kind)
        return {
            ("norms",): Fact("sandwich", arch),
            ("out_scale",): reader.has("out_scale", index),
            (*mixer, "heads"): layer.heads,
            (*mixer, "kv_heads"): layer.kv_heads,
            (*mixer, "head_dim"): layer.head_dim,
            (*mixer, "window"): layer.window,
            (*mixer, "scale"): Fact(1.0, arch),
            (*mixer, "qk_norm"): q_norm and Fact("rms" if q_norm.value else "none", q_norm.origin),
            (*mixer, "v_norm"): Fact("unit", arch),
            (*mixer, "value_from"): own_v and Fact("own" if own_v.value else "key", own_v.origin),
            **rope_facts((*mixer, "rope"), reader, layer, arch),
            **ffn_facts(reader, index, layer, activation(reader, self.name)),
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
                0,
                ("target", "layers"),
            ),
            *layer_expected("gemma4.", "target", spec),
            *experts_expected(spec),
        ]
        kv = [
            mixer.kv_heads
            for _, kind in target.layer_sequence()
            if isinstance(mixer := target.layer_kinds[kind].mixer, AttentionParams)
        ]
        path = ("target", "layer_kinds")
        return [*found, Expected(("gemma4.attention.head_count_kv",), kv, path)]


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
        Expected(
            (f"{prefix}feed_forward_length", "intermediate_size"),
            [width for kind in kinds if (width := dense_width(kind.ffn)) is not None],
            declared,
        ),
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

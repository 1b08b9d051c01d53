"""Read a gemma4 model or drafter: the same keys mean the same in both.

Sources: llama.cpp `conversion/gemma.py` (GGUF keys), transformers `models/gemma4` (config keys).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memra_compiler.layers.params import Path, Problem
from memra_compiler.spec.archs.table import CheckpointLike, Fact, Facts
from memra_compiler.spec.marks import written_layers

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


@dataclass(frozen=True)
class LayerFacts:
    """What a checkpoint says about one layer; None where it does not say."""

    windowed: Fact
    own_kv: Fact
    heads: Fact | None
    kv_heads: Fact | None
    head_dim: Fact | None
    window: Fact | None
    base: Fact | None
    fraction: Fact | None
    ffn_width: Fact | None


class Reader:
    """Typed access to a checkpoint's metadata and tensors, remembering origins."""

    def __init__(self, checkpoint: CheckpointLike, names: Mapping[str, tuple[str, ...]]) -> None:
        self.checkpoint = checkpoint
        self.gguf = checkpoint.kind == "gguf"
        self.names = names
        self.file = checkpoint.path.name

    @property
    def prefix(self) -> str:
        """The metadata prefix as this file spells it, whatever its architecture string says."""
        for key in self.checkpoint.metadata:
            if key.endswith(".block_count"):
                return key.removesuffix("block_count")
        return f"{self.checkpoint.arch}."

    def key(self, gguf: str | tuple[str, ...], *config: str) -> Fact | None:
        """Return the first key that is present, in the spelling of this kind of checkpoint."""
        ours = (gguf,) if isinstance(gguf, str) else gguf
        candidates = tuple(f"{self.prefix}{key}" for key in ours if key) if self.gguf else config
        for key in candidates:
            value = self.checkpoint.metadata.get(key)
            if value is not None:
                return Fact(_plain(value), f"`{key}` of {self.file}")
        return None

    def tensor(self, role: str, layer: int | None = None) -> tuple[int, ...] | None:
        """Return the shape of the first spelling of a role that is present."""
        for name in self.names[role]:
            info = self.checkpoint.tensors.get(name.replace("{i}", str(layer)))
            if info is not None:
                return tuple(info.shape)
        return None

    def has(self, role: str, layer: int | None = None) -> Fact | None:
        """Return whether a weight is present; None if the checkpoint lists no tensors."""
        if not self.checkpoint.tensors:
            return None
        gguf, *rest = self.names[role]
        name = (gguf if self.gguf or not rest else rest[0]).replace("{i}", str(layer))
        found = self.tensor(role, layer) is not None
        what = "the tensor" if found else "the absence of the tensor"
        return Fact(found, f"{what} `{name}` in {self.file}")

    def layers(self, *, own_kv: bool = True) -> list[LayerFacts]:
        """Return the facts of every layer, first to last; empty if the pattern is unknown.

        `own_kv` False: no layer of such a model has keys and values, whatever the file says.
        """
        found = list(_gguf_layers(self) if self.gguf else _config_layers(self))
        for index, layer in enumerate(found):
            owns = self._own_kv(index, len(found)) if own_kv else Fact(False, "the architecture")
            width = layer.ffn_width
            if gate := self.tensor("gate", index):  # metadata may give one width for all
                rows = f"the {gate[0]} gate rows of layer {index} of {self.file}"
                width = Fact(gate[0], rows)
            elif not self.gguf and width and not owns.value:
                double = self.key("", "use_double_wide_mlp")
                if double and double.value:
                    width = Fact(2 * width.value, double.origin)
            found[index] = replace(layer, own_kv=owns, ffn_width=width)
        return found

    def _own_kv(self, index: int, count: int) -> Fact:
        """Whether a layer has keys and values of its own: those of the last ones are shared."""
        shared = self.key("attention.shared_kv_layers", "num_kv_shared_layers")
        if shared is None or not isinstance(shared.value, int):
            return Fact(True, f"the absence of shared key/value layers in {self.file}")
        return Fact(index < count - shared.value, shared.origin)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):  # GGUF stores f32: 9.99999997e-07 was 1e-6
        return float(f"{value:.7g}")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _at(fact: Fact | None, layer: int) -> Fact | None:
    """Return the entry of one layer; a single value stands for all layers."""
    if fact is None or not isinstance(fact.value, list):
        return fact
    if layer >= len(fact.value):
        return None
    return Fact(fact.value[layer], fact.origin.replace("` of", f"[{layer}]` of", 1))


def _gguf_layers(reader: Reader) -> Iterator[LayerFacts]:
    count = reader.key("block_count")
    pattern = reader.key("attention.sliding_window_pattern")
    if count is None or pattern is None or not isinstance(pattern.value, list):
        return
    if not isinstance(count.value, int):
        return
    for layer in range(count.value):
        windowed = _at(pattern, layer)
        if windowed is None:
            return
        swa = "_swa" if windowed.value else ""
        factors = reader.has("rope_freqs") if not windowed.value else None
        whole = Fact(1.0, factors.origin) if factors and not factors.value else None
        yield LayerFacts(
            windowed=windowed,
            own_kv=windowed,
            heads=_at(reader.key("attention.head_count"), layer),
            kv_heads=_at(reader.key("attention.head_count_kv"), layer),
            head_dim=reader.key(f"attention.key_length{swa}"),
            window=reader.key("attention.sliding_window") if swa else Fact(None, windowed.origin),
            base=reader.key(f"rope.freq_base{swa}"),
            fraction=Fact(1.0, windowed.origin) if windowed.value else whole,
            ffn_width=_at(reader.key("feed_forward_length"), layer),
        )


def _config_layers(reader: Reader) -> Iterator[LayerFacts]:
    types = reader.key("", "layer_types")
    if types is None or not isinstance(types.value, list):
        return
    per_layer = reader.key("", "per_layer_config")
    overrides = per_layer.value if per_layer and isinstance(per_layer.value, dict) else {}
    shares_k = reader.key("", "attention_k_eq_v")
    for layer, layer_type in enumerate(types.value):
        windowed = layer_type == "sliding_attention"
        own = overrides.get(str(layer), overrides.get(layer, {}))

        def read(
            key: str, whole: str = "", own: Any = own, layer: int = layer, windowed: bool = windowed
        ) -> Fact | None:
            if isinstance(own, dict) and own.get(key) is not None:
                return Fact(own[key], f"`per_layer_config.{layer}.{key}` of {reader.file}")
            return reader.key("", *((whole,) if whole and not windowed else ()), key)

        origin = Fact(windowed, f"`layer_types[{layer}]` of {reader.file}").origin
        global_kv = "num_global_key_value_heads" if shares_k and shares_k.value else ""
        yield LayerFacts(
            windowed=Fact(windowed, origin),
            own_kv=Fact(True, origin),
            heads=read("num_attention_heads"),
            kv_heads=read("num_key_value_heads", global_kv),
            head_dim=read("head_dim", "global_head_dim"),
            window=read("sliding_window") if windowed else Fact(None, origin),
            base=_rope(reader, layer_type, "rope_theta"),
            fraction=_rope(reader, layer_type, "partial_rotary_factor", 1.0),
            ffn_width=read("intermediate_size"),
        )


def _rope(reader: Reader, layer_type: str, key: str, default: Any = None) -> Fact | None:
    found = reader.key("", "rope_parameters")
    types: Any = found.value if found else None
    entry = types.get(layer_type) if isinstance(types, dict) else None
    value = entry.get(key, default) if isinstance(entry, dict) else None
    if value is None:
        return None
    return Fact(value, f"`rope_parameters.{layer_type}.{key}` of {reader.file}")


def activation(reader: Reader, arch: str) -> Fact:
    """Return the feed-forward activation; GGUF does not store it, the architecture implies it."""
    found = reader.key("", "hidden_activation", "hidden_act")
    if found is None:
        return Fact("gelu_tanh", f"the architecture {arch}")
    return Fact(_ACTIVATIONS.get(str(found.value), found.value), found.origin)


#: How a layer works, as far as its kind is told by it: is it windowed, has it its own keys?
Traits = tuple[bool, bool]


def kind_traits(section: Mapping[str, Any], mixers: Mapping[str, bool]) -> dict[str, Traits]:
    """Map each declared kind that has one of these mixers (name -> own keys) to its traits."""
    kinds = section.get("layer_kinds")
    found = {}
    for name, kind in kinds.items() if isinstance(kinds, dict) else ():
        choice = kind.get("mixer") if isinstance(kind, dict) else None
        for mixer, owns in mixers.items():
            fields = choice.get(mixer) if isinstance(choice, dict) else None
            if isinstance(fields, dict):
                found[str(name)] = (fields.get("window") is not None, owns)
    return found


PerLayer = Callable[[int, LayerFacts], Mapping[Path, Fact | None]]


def stack_facts(
    facts: Facts,
    name: str,
    section: Mapping[str, Any],
    mixers: Mapping[str, bool],
    layers: list[LayerFacts],
    per_layer: PerLayer,
) -> None:
    """Put the order of layers and, for every kind, what all of its layers agree on.

    A layer's kind is told by its traits. Where that is ambiguous (two windowed kinds) the written
    order decides, and `layers` itself cannot be `auto`.
    """
    kinds = kind_traits(section, mixers)
    traits = [(bool(layer.windowed.value), bool(layer.own_kv.value)) for layer in layers]
    wanted = [[kind for kind, has in kinds.items() if has == own] for own in traits]
    written = written_layers(section)
    if layers and all(len(names) == 1 for names in wanted):
        order = [names[0] for names in wanted]
        origin = layers[0].windowed.origin.replace("[0]", "")
        facts.put((name, "layers"), order, origin)
    elif written and len(written) == len(layers):
        order = written
        for index, (kind, names) in enumerate(zip(order, wanted, strict=True)):
            if kind in kinds and kind not in names:
                facts.problems.append(_wrong_kind(name, index, kind, kinds[kind], layers[index]))
                return
    else:
        return
    for kind in kinds:
        members = [i for i, k in enumerate(order) if k == kind]
        _kind_facts(facts, (name, "layer_kinds", kind), members, layers, per_layer)


def _wrong_kind(section: str, index: int, kind: str, has: Traits, layer: LayerFacts) -> Problem:
    """The first trait in which a layer is not what its written kind is."""
    what, origin = "windowed" if layer.windowed.value else "global", layer.windowed.origin
    if bool(layer.windowed.value) is has[0]:
        owns = "has its own keys and values"
        what = owns if layer.own_kv.value else "reads the keys and values of an earlier layer"
        origin = layer.own_kv.origin
    verb = "" if " " in what else "is "
    return Problem(
        (section, "layers", index),
        f"layer {index} is `{kind}`, but in the weights it {verb}{what}",
        label=f"layer {index} {verb}{what}",
        hint=f"see {origin}",
        code="weights-mismatch",
    )


def _kind_facts(
    facts: Facts, kind: Path, members: list[int], layers: list[LayerFacts], per_layer: PerLayer
) -> None:
    seen: dict[Path, tuple[int, Fact]] = {}
    for index in members:
        for path, fact in per_layer(index, layers[index]).items():
            if fact is None:
                continue
            first_index, first = seen.setdefault(path, (index, fact))
            if first.value != fact.value:
                facts.problems.append(
                    Problem(
                        kind,
                        f"layers {first_index} and {index} are both `{kind[-1]}`, but their "
                        f"`{path[-1]}` differs in the weights: {first.value} and {fact.value}",
                        label="declare two kinds",
                        hint=f"see {fact.origin}",
                        code="weights-mismatch",
                        at_key=True,
                    )
                )
                return
    for path, (_, fact) in seen.items():
        facts.values[(*kind, *path)] = fact

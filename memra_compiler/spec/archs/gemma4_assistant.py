"""gemma4 assistants: the query-only drafters, in both spellings that files have.

Architecture string, target-width key and projection prefix are probed each for itself; files mix
the two spellings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memra_compiler.drafters.chained import ChainedHead
from memra_compiler.layers.gated_ffn import GatedFfnParams
from memra_compiler.layers.params import Path
from memra_compiler.layers.query_attention import QueryAttentionParams
from memra_compiler.spec.archs.gemma4 import (
    layer_expected,
    model_expected,
    rope_facts,
    softcap,
    tied_head,
)
from memra_compiler.spec.archs.gemma_family import LayerFacts, Reader, activation, stack_facts
from memra_compiler.spec.archs.gemma_names import LAYER_NAMES, NAMES, spell, spelled
from memra_compiler.spec.archs.table import CheckpointLike, Expected, Fact, Facts, names_for

if TYPE_CHECKING:
    from memra_compiler.spec.model import Spec

_TARGET_WIDTH = ("embedding_length_out", "n_embd_backbone")
_PREFIXES = ("gemma4-assistant.", "gemma4_assistant.")
_PROJECTIONS = {
    role: (f"nextn.{role}.weight", f"mtp.{role}.weight", f"{role}.weight")
    for role in ("pre_projection", "post_projection")
}
#: The map of a head that is trimmed in the file.
_MAP = {"d2t": ("d2t", "nextn.d2t", "model.d2t")}
_CENTROIDS = {
    "centroids": (
        "masked_embd_centroids.weight",
        "mtp.centroids.weight",
        "masked_embedding.centroids.weight",
    ),
    "ordering": (
        "masked_embd_ordering",
        "mtp.token_ordering.weight",
        "masked_embedding.token_ordering",
    ),
}


class Gemma4Assistant:
    """The table of `gemma4-assistant`."""

    name = "gemma4-assistant"
    names = (
        "gemma4-assistant",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "gemma4-unified-assistant",
    )
    section = "drafter"
    roles = (*NAMES, *_PROJECTIONS, *_CENTROIDS, *_MAP)
    layer_roles = tuple(
        role
        for role in LAYER_NAMES
        if role not in ("k", "v", "k_norm") and not role.startswith("per_layer")
    )

    def __init__(self) -> None:
        self._names = {**spelled(self.layer_roles), **_PROJECTIONS, **_CENTROIDS, **_MAP}

    def weight_names(self, role: str, layer: int | None = None) -> tuple[str, ...]:
        """Return the accepted names of a weight, GGUF first. Raises: KeyError."""
        return names_for(self._names, role, layer)

    def layer_names(self, names: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Return the accepted names of a weight that a layer kind spells itself."""
        return tuple(name.replace("{i}", str(layer)) for name in spell(names, layer=True))

    def facts(self, checkpoint: CheckpointLike, data: Mapping[str, Any]) -> Facts:
        """Read a drafter checkpoint; it also knows the target's width and vocabulary."""
        found = Facts()
        reader = Reader(checkpoint, self._names)
        section = data.get("drafter")
        if not isinstance(section, dict):
            return found
        rows = reader.tensor("embed")
        table = f"the rows of the embedding table of {reader.file}"
        values = {
            ("drafter", "width"): reader.key("embedding_length", "hidden_size"),
            ("drafter", "norm_eps"): reader.key("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            ("drafter", "head", "tied"): tied_head(reader),
            ("drafter", "head", "softcap"): softcap(reader),
            **_centroid_facts(reader, section.get("head")),
            ("target", "width"): reader.key(_TARGET_WIDTH, "backbone_hidden_size"),
            ("target", "vocab"): Fact(rows[0], table) if rows else reader.key("", "vocab_size"),
        }
        for path, fact in values.items():
            if fact is not None:
                found.values[path] = fact

        def per_layer(index: int, layer: LayerFacts) -> Mapping[Path, Fact | None]:
            return self._layer_facts(reader, index, layer)

        layers = reader.layers(own_kv=False)
        mixers = {QueryAttentionParams.kind: False}
        stack_facts(found, "drafter", section, mixers, layers, per_layer)
        return found

    def _layer_facts(
        self, reader: Reader, index: int, layer: LayerFacts
    ) -> Mapping[Path, Fact | None]:
        arch = f"the architecture {self.name}"
        mixer = ("mixer", QueryAttentionParams.kind)
        q_norm, q = reader.has("q_norm", index), reader.tensor("q", index)
        heads = layer.heads
        width = layer.head_dim.value if layer.head_dim else None
        if q and isinstance(width, int) and width > 0 and q[0] % width == 0:
            # shapes outrank metadata: files are known whose head count is not per layer
            heads = Fact(q[0] // width, f"the {q[0]} query rows of layer {index} of {reader.file}")
        return {
            ("norms",): Fact("sandwich", arch),
            ("out_scale",): reader.has("out_scale", index),
            (*mixer, "heads"): heads,
            (*mixer, "head_dim"): layer.head_dim,
            (*mixer, "window"): layer.window,
            (*mixer, "scale"): Fact(1.0, arch),
            (*mixer, "q_norm"): q_norm and Fact("rms" if q_norm.value else "none", q_norm.origin),
            **rope_facts((*mixer, "rope"), reader, layer, arch),
            ("ffn", GatedFfnParams.kind, "width"): layer.ffn_width,
            ("ffn", GatedFfnParams.kind, "act"): activation(reader, self.name),
        }

    def expected(self, spec: Spec) -> list[Expected]:
        """Return what another drafter file must say to be used with this spec.

        Head counts are left out: the query matrix decides them, and metadata may be wrong.
        """
        drafter = spec.drafter
        keys = tuple(f"{prefix}{key}" for prefix in _PREFIXES for key in _TARGET_WIDTH)
        found = [
            Expected((*keys, "backbone_hidden_size"), spec.target.width, ("target", "width")),
            Expected(("vocab_size",), spec.target.vocab, ("target", "vocab")),
        ]
        merged: dict[Path, list[Expected]] = {}
        for prefix in _PREFIXES:
            both = model_expected(prefix, "drafter", drafter.width, drafter.norm_eps, spec)
            for item in (*both, *layer_expected(prefix, "drafter", spec)):
                if not any("head_count" in key for key in item.keys):
                    merged.setdefault((*item.path, item.keys[-1].split(".")[-1]), []).append(item)
        for items in merged.values():
            spellings = dict.fromkeys(key for item in items for key in item.keys)
            found.append(Expected(tuple(spellings), items[0].value, items[0].path))
        return found

    def ignored(self, spec: Spec) -> Mapping[str, str]:
        """Return the tensors of a centroid head that the spec does not use."""
        head = getattr(spec.drafter, "head", None)
        if not isinstance(head, ChainedHead) or head.centroids is not None:
            return {}
        why = "the spec has the full head: no `drafter.head.centroids`"
        return {name: why for names in _CENTROIDS.values() for name in names}


def _centroid_facts(reader: Reader, head: object) -> dict[Path, Fact | None]:
    """Return the centroid head as the file has it.

    A spec may choose the full head for a file with clusters: so whether there is one is a fact only
    for a spec that leaves it to the file.
    """
    clusters = reader.tensor("centroids")
    count = reader.key("n_centroids", "num_centroids")
    if clusters:
        count = Fact(clusters[0], f"the rows of the centroids of {reader.file}")
    active = reader.key("centroid_top_k", "centroid_intermediate_top_k")
    path = ("drafter", "head", "centroids")
    if not isinstance(head, dict) or head.get("centroids") != "auto":
        return {(*path, "count"): count, (*path, "active"): active}
    if not clusters or count is None:
        return {path: Fact(None, f"the absence of centroids in {reader.file}")}
    if active is None:
        return {}
    return {path: Fact({"count": count.value, "active": active.value}, count.origin)}


TABLE = Gemma4Assistant()

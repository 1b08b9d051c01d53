"""The feed-forward parts of gemma4 layers, dense or with experts: facts and expectations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memra_compiler.layers.base import FfnParams, LayerKind
from memra_compiler.layers.gated_ffn import GatedFfnParams
from memra_compiler.layers.moe import MoeFfnParams
from memra_compiler.layers.params import Path, Problem
from memra_compiler.spec.archs.gemma_family import LayerFacts, Reader
from memra_compiler.spec.archs.table import Expected, Fact, Facts

if TYPE_CHECKING:
    from memra_compiler.spec.model import Spec


def ffn_facts(reader: Reader, index: int, layer: LayerFacts, act: Fact) -> dict[Path, Fact | None]:
    """Return what is known of a layer's feed-forward part, under its kind."""
    experts = _experts(reader, index)
    if experts is None:
        path = ("ffn", GatedFfnParams.kind)
        return {(*path, "width"): layer.ffn_width, (*path, "act"): act}
    fused, split = reader.has("gate_up_exps", index), reader.has("gate_exps", index)
    down = reader.tensor("down_exps", index)
    width = reader.key("expert_feed_forward_length", "moe_intermediate_size")
    if width is None and down is not None:
        width = Fact(down[-1], f"the down matrices of layer {index} of {reader.file}")
    gate_up = fused and Fact("fused", fused.origin)
    if split is not None and split.value:
        gate_up = Fact("split", split.origin)
    path = ("ffn", MoeFfnParams.kind)
    return {
        (*path, "experts"): experts,
        (*path, "active"): reader.key("expert_used_count", "top_k_experts"),
        (*path, "expert_width"): width,
        (*path, "dense_width"): layer.ffn_width,
        (*path, "act"): act,
        (*path, "gate_up"): gate_up,
    }


def _experts(reader: Reader, index: int) -> Fact | None:
    """Return how many experts a layer has; None if it has none.

    A config keeps `num_experts` beside `enable_moe_block: false`.
    """
    enabled = reader.key("", "enable_moe_block")
    count = reader.key("expert_count", "num_experts")
    if count is None and (router := reader.tensor("router", index)):
        count = Fact(router[0], f"the rows of the router of layer {index} of {reader.file}")
    if count is None or not count.value or (enabled is not None and not enabled.value):
        return None
    return count


def wrong_ffns(section: Mapping[str, Any], facts: Facts) -> Iterator[Problem]:
    """Yield a problem for each layer kind whose feed-forward part is of another kind."""
    kinds = section.get("layer_kinds")
    for name, declared in kinds.items() if isinstance(kinds, dict) else ():
        choice = declared.get("ffn") if isinstance(declared, dict) else None
        here = ("target", "layer_kinds", name, "ffn")
        for wanted, what in (
            (GatedFfnParams.kind, "no experts"),
            (MoeFfnParams.kind, "experts beside a dense branch"),
        ):
            known = [f for path, f in facts.values.items() if path[:5] == (*here, wanted)]
            if known and isinstance(choice, dict) and choice and wanted not in choice:
                yield Problem(
                    here,
                    f"the layers of kind `{name}` have {what} in the weights",
                    label=f"must be `{wanted}`",
                    hint=f"see {known[0].origin}",
                    code="weights-mismatch",
                )


def dense_width(ffn: FfnParams) -> int | None:
    """Return what a file calls the feed-forward length: the width of the part that always runs."""
    if isinstance(ffn, GatedFfnParams):
        return ffn.width
    return ffn.dense_width if isinstance(ffn, MoeFfnParams) else None


def widths_expected(prefix: str, path: Path, kinds: list[LayerKind]) -> Iterator[Expected]:
    """Yield the feed-forward widths; a config has one, and whether shared layers double it."""
    widths = [width for kind in kinds if (width := dense_width(kind.ffn)) is not None]
    yield Expected((f"{prefix}feed_forward_length",), widths, path)
    shared = [not kind.mixer.owns_kv for kind in kinds]
    if all(shared) or not any(shared) or len(widths) < len(kinds):
        yield Expected(("intermediate_size",), widths, path)
        return
    double = all(w == widths[0] * (1 + s) for w, s in zip(widths, shared, strict=True))
    yield Expected(("intermediate_size",), widths[:1] if double else widths, path)
    yield Expected(("use_double_wide_mlp",), double, path)


def experts_expected(spec: Spec) -> list[Expected]:
    """Return the expectations of layers with experts; without such, that there are none."""
    target, kinds = spec.target, ("target", "layer_kinds")
    found = {}
    for _, name in target.layer_sequence():
        ffn = target.layer_kinds[name].ffn
        if isinstance(ffn, MoeFfnParams):
            found[name] = ffn
    if not found:
        return [
            Expected(("gemma4.expert_count",), 0, kinds),
            Expected(("enable_moe_block",), False, kinds),
        ]
    keys = {
        "experts": ("expert_count", "num_experts"),
        "active": ("expert_used_count", "top_k_experts"),
        "expert_width": ("expert_feed_forward_length", "moe_intermediate_size"),
    }
    return [
        Expected(
            (f"gemma4.{gguf}", config), getattr(ffn, field), (*kinds, name, "ffn", ffn.kind, field)
        )
        for name, ffn in found.items()
        for field, (gguf, config) in keys.items()
    ]

"""How gemma4 checkpoints name their weights, in GGUF and in Hugging Face layouts.

The same GGUF name means different things in different architectures (`post_attention_norm` here
normalises the attention output), so names belong to an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = {
    "embed": ("token_embd.weight", "model.embed_tokens.weight"),
    "head": ("output.weight", "lm_head.weight"),
    "output_norm": ("output_norm.weight", "model.norm.weight"),
    "rope_freqs": ("rope_freqs.weight",),
}
PER_LAYER_NAMES = {
    "per_layer_embed": ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
    "per_layer_context": ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
    "per_layer_norm": ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
}
LAYER_NAMES = {
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn_q.weight", "self_attn.q_proj.weight"),
    "k": ("attn_k.weight", "self_attn.k_proj.weight"),
    "v": ("attn_v.weight", "self_attn.v_proj.weight"),
    "o": ("attn_output.weight", "self_attn.o_proj.weight"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "post_attention_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    "ffn_norm": ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    "gate": ("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": ("ffn_up.weight", "mlp.up_proj.weight"),
    "down": ("ffn_down.weight", "mlp.down_proj.weight"),
    "post_ffw_norm": ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    "per_layer_gate": ("inp_gate.weight", "per_layer_input_gate.weight"),
    "per_layer_proj": ("proj.weight", "per_layer_projection.weight"),
    "per_layer_post_norm": ("post_norm.weight", "post_per_layer_input_norm.weight"),
    "out_scale": ("layer_output_scale.weight", "layer_scalar"),
}
#: Of a target's layers with experts, beside a dense branch that has the names above.
EXPERT_NAMES = {
    "router": ("ffn_gate_inp.weight", "router.proj.weight"),
    "router_norm": ("ffn_gate_inp.scale", "router.scale"),
    "expert_scale": ("ffn_down_exps.scale", "router.per_expert_scale"),
    "gate_up_exps": ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    "gate_exps": ("ffn_gate_exps.weight",),
    "up_exps": ("ffn_up_exps.weight",),
    "down_exps": ("ffn_down_exps.weight", "experts.down_proj"),
    "post_ffw_norm_1": ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    "pre_ffw_norm_2": ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    "post_ffw_norm_2": ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
}
_HF_PREFIXES = ("model.", "model.language_model.", "language_model.model.")


def spell(names: tuple[str, ...], layer: bool) -> tuple[str, ...]:
    """Add the prefixes of GGUF and of the Hugging Face layouts to (GGUF, HF) names."""
    gguf, *rest = names
    found = [f"blk.{{i}}.{gguf}" if layer else gguf]
    for name in rest:
        bare = name.removeprefix("model.")
        if layer:
            found += [f"{prefix}layers.{{i}}.{bare}" for prefix in _HF_PREFIXES]
        elif bare == name:  # outside of `model.`
            found += [name, f"language_model.{name}"]
        else:
            found += [f"{prefix}{bare}" for prefix in _HF_PREFIXES]
    return tuple(found)


def spelled(
    layer_roles: tuple[str, ...], more: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return every spelling of the shared roles (and of `more`), `{i}` being the layer number."""
    roles = {**NAMES, **(more or {})}
    found = {role: spell(names, layer=False) for role, names in roles.items()}
    layer_names = LAYER_NAMES | EXPERT_NAMES
    found.update({role: spell(layer_names[role], layer=True) for role in layer_roles})
    return found

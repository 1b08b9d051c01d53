"""The tiny variants as GGUF files, in both spellings that files of assistants have.

Names and keys are restated here by hand from llama.cpp's `conversion/gemma.py` and, for the older
spelling, from early E4B files; there is no tokenizer, which `open_files` takes from the folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from variant_models import FULL, SWA, Tensors, Variant

from memra_runtime.artifact import load_manifest
from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.device import Device
from memra_runtime.model import (
    Opened,
    bind_source,
    check_archs,
    check_facts,
    device_class,
    load_opened,
)
from memra_runtime.tokenizer import load_tokenizer

_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
_MODEL = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection",
    "masked_embedding.centroids": "masked_embd_centroids",
}  # fmt: skip
#: What the older spelling calls it.
_OLDER = {
    "nextn.pre_projection.weight": "mtp.pre_projection.weight",
    "nextn.post_projection.weight": "mtp.post_projection.weight",
    "masked_embd_centroids.weight": "mtp.centroids.weight",
    "masked_embd_ordering": "mtp.token_ordering.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of a Hugging Face folder."""
    if name == "masked_embedding.token_ordering":
        return "masked_embd_ordering"
    bare = name.removesuffix(".weight")
    if not bare.startswith("model.layers."):
        return f"{_MODEL[bare]}.weight"
    index, _, part = bare.removeprefix("model.layers.").partition(".")
    own = "layer_output_scale" if part == "layer_scalar" else _LAYER[part]
    return f"blk.{index}.{own}.weight"


def _write(
    path: Path, arch: str, keys: Mapping[str, Any], tensors: Tensors, format: str,
    rename: Mapping[str, str],
) -> Path:  # fmt: skip
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        name = f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    kind = gguf.GGMLQuantizationType[format.upper()]
    for name, values in tensors.items():
        stored = rename.get(gguf_name(name), gguf_name(name))
        if values.dtype == np.int64:
            writer.add_tensor(stored, values.astype(np.int32))
        elif values.ndim > 1:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values.astype(np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1] * 8 + [1e30] * 24, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: Mapping[str, Any], boundary: int) -> dict[str, Any]:
    """What both models' files say; E2B's widths and K/V heads are arrays as the converter has."""
    kinds = config["layer_types"]
    global_kv = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    double = bool(config["use_double_wide_mlp"])
    width = config["intermediate_size"]
    return {
        "block_count": len(kinds),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": [width * (1 + (double and i >= boundary)) for i in range(len(kinds))]
        if double else width,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind == SWA else global_kv for kind in kinds
        ],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == SWA for kind in kinds],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.freq_base": config["rope_parameters"][FULL]["rope_theta"],
        "rope.freq_base_swa": config["rope_parameters"][SWA]["rope_theta"],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }  # fmt: skip


def write_target(variant: Variant, path: Path, format: str = "bf16", **more: np.ndarray) -> Path:
    """The target as a GGUF file; `more` are further tensors by their Hugging Face names."""
    config = variant.target_config()
    keys = _keys(config, variant.boundary())
    keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    return _write(path, "gemma4", keys, variant.target_tensors() | more, format, {})


def write_draft(
    variant: Variant, path: Path, format: str = "bf16", *, older: bool = False, **more: np.ndarray
) -> Path:
    """The assistant as a GGUF file, in either spelling; `more` are tensors to add or replace."""
    config = variant.draft_config()
    keys = _keys(config["text_config"], 0)
    if older:
        keys["n_embd_backbone"] = config["backbone_hidden_size"]
        keys["n_centroids"] = config["num_centroids"]
        keys["centroid_top_k"] = config["centroid_intermediate_top_k"]
    else:
        keys["embedding_length_out"] = config["backbone_hidden_size"]
        keys["nextn_predict_layers"] = len(config["text_config"]["layer_types"])
    arch = "gemma4_assistant" if older else "gemma4-assistant"
    tensors = variant.draft_tensors() | more
    return _write(path, arch, keys, tensors, format, _OLDER if older else {})


def load(folder: Path, target: Path, draft: Path, tokenizer: Path) -> Device:
    """Load an artifact with files that have no tokenizer, with every other check."""
    manifest = load_manifest(folder)
    files = {"target": open_checkpoint(target), "draft": open_checkpoint(draft)}
    check_archs(manifest, files)
    check_facts(manifest, files)
    bindings = {source: bind_source(manifest, source, file) for source, file in files.items()}
    words = load_tokenizer(open_checkpoint(tokenizer))
    made = device_class(manifest, folder)
    return load_opened(Opened(folder, manifest, files, words, bindings, made)).device

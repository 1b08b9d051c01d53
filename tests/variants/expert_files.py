"""The tiny 26B as GGUF files: experts fused or split, with and without their scale, quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from variant_models import FULL, SWA, VARIANTS, Tensors

from memra_compiler.spec import arch_table

VARIANT = VARIANTS["26b"]


@dataclass(frozen=True)
class ExpertFile:
    """How a file spells the experts. Without `scaled` it has no scales; `scales` replaces them."""

    split: bool = False
    scaled: bool = True
    scales: float | None = None
    matrices: str = "F32"

    def write(self, path: Path) -> Path:
        """Write the target; no tokenizer, which no kernel needs."""
        writer = gguf.GGUFWriter(path, "gemma4")
        for name, value in _keys().items():
            if isinstance(value, list):
                writer.add_array(f"gemma4.{name}", value)
            elif isinstance(value, float):
                writer.add_float32(f"gemma4.{name}", value)
            else:
                writer.add_uint32(f"gemma4.{name}", value)
        for name, values in self._tensors().items():
            kind = gguf.GGMLQuantizationType.F32
            if values.ndim > 1 and not name.endswith("ffn_gate_inp.weight"):
                kind = gguf.GGMLQuantizationType[self.matrices]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tensors(self) -> Tensors:
        pairs = VARIANT.target_config()["global_head_dim"] // 2
        turning = np.arange(pairs) < pairs // 4
        found = {"rope_freqs.weight": np.where(turning, 1, 1e30).astype(np.float32)}
        names = _gguf_names()
        for own, values in VARIANT.target_tensors().items():
            name = names[own]
            if name.endswith("ffn_down_exps.scale"):
                if not self.scaled:
                    continue
                if self.scales is not None:
                    values = np.full_like(values, self.scales)
            if self.split and name.endswith("ffn_gate_up_exps.weight"):
                for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                    found[name.replace("gate_up", part)] = np.ascontiguousarray(half)
            else:
                found[name] = values
        return found


def _keys() -> Mapping[str, object]:
    config = VARIANT.target_config()
    types = config["layer_types"]
    kv = {SWA: config["num_key_value_heads"], FULL: config["num_global_key_value_heads"]}
    return {
        "block_count": len(types),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [kv[kind] for kind in types],
        "attention.key_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == SWA for kind in types],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["top_k_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def _gguf_names() -> Mapping[str, str]:
    """GGUF name by Hugging Face name."""
    table, layers = arch_table("gemma4"), len(VARIANT.target["layer_types"])
    every = [table.weight_names(role) for role in table.roles]
    every += [table.weight_names(role, i) for role in table.layer_roles for i in range(layers)]
    return {other: first for first, *others in every for other in others}

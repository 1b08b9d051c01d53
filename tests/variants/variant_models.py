"""Tiny gemma4 models, one of every published variant, with their assistants.

Weights are made from a seed, so a test writes the Hugging Face folders that it needs; what
transformers computes from them is in `tests/golden/variants` (made by `make_golden.py`). Norm
weights, layer scalars and router scales are far from 1, so that none can be left out unseen.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent.parent / "golden" / "variants"

VOCAB, WINDOW, PROMPT, GREEDY, DRAFTS = 256, 16, 30, 24, 5
SWA, FULL = "sliding_attention", "full_attention"

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """A tiny target and its assistant.

    `target` are keys of the text configuration; `assistant` are keys that replace the target's in
    the drafter's. `suppress` are token ids that are never produced.
    """

    name: str
    seed: int
    target: Mapping[str, Any]
    assistant: Mapping[str, Any] = field(default_factory=dict)
    centroids: tuple[int, int] | None = None  # clusters, and how many of them are searched
    unified: bool = False
    suppress: tuple[int, ...] = ()

    def target_config(self) -> dict[str, Any]:
        """config.json of the target."""
        kind = "gemma4_unified_text" if self.unified else "gemma4_text"
        name = "Gemma4UnifiedForCausalLM" if self.unified else "Gemma4ForCausalLM"
        config = {"architectures": [name], "model_type": kind, "dtype": "bfloat16"}
        return config | _COMMON | dict(self.target)

    def draft_config(self) -> dict[str, Any]:
        """config.json of the assistant."""
        middle = "_unified" if self.unified else ""
        text = {
            **_COMMON,
            **{key: self.target[key] for key in _SHARED if key in self.target},
            "model_type": f"gemma4{middle}_text",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "layer_types": [SWA, SWA, SWA, FULL],
            "final_logit_softcapping": None,
            **self.assistant,
        }
        clusters, active = self.centroids or (16, 4)
        name = "Gemma4UnifiedAssistantForCausalLM" if self.unified else "Gemma4AssistantForCausalLM"
        return {
            "architectures": [name],
            "model_type": f"gemma4{middle}_assistant",
            "dtype": "bfloat16",
            "backbone_hidden_size": self.target["hidden_size"],
            "use_ordered_embeddings": self.centroids is not None,
            "num_centroids": clusters,
            "centroid_intermediate_top_k": active,
            "tie_word_embeddings": True,
            "text_config": text,
        }

    def boundary(self) -> int:
        """The first layer that reads another layer's keys and values."""
        return len(self.target["layer_types"]) - int(self.target.get("num_kv_shared_layers", 0))

    def last_own(self, kind: str) -> int:
        """The last layer of a kind that has keys and values of its own."""
        own = self.target["layer_types"][: self.boundary()]
        return len(own) - 1 - list(reversed(own)).index(kind)

    def prompt(self) -> list[int]:
        """Token ids of the prompt; the first is the beginning of a text."""
        rng = np.random.default_rng(self.seed)
        return [2, *(int(i) for i in 3 + np.floor(rng.random(PROMPT - 1) * (VOCAB - 3)))]

    def target_tensors(self) -> Tensors:
        """Name -> float32 values that bf16 holds exactly."""
        return self._filled("target", _target_shapes(self.target_config()))

    def draft_tensors(self) -> Tensors:
        """The same of the assistant; `token_ordering` is int64."""
        found = self._filled("draft", _draft_shapes(self.draft_config()))
        if self.centroids:
            rng = np.random.default_rng(self.seed + 1)
            order = np.argsort(rng.random(VOCAB)).astype(np.int64)
            found["masked_embedding.token_ordering"] = order
        return found

    def _filled(self, section: str, shapes: Iterator[tuple[str, tuple[int, ...]]]) -> Tensors:
        return {
            name: _values(zlib.crc32(f"{self.seed} {section} {name}".encode()), name, shape)
            for name, shape in shapes
        }

    def write_target(self, folder: Path) -> Path:
        """Write the target as a Hugging Face folder, in bf16."""
        return _write(folder, self.target_config(), self.target_tensors())

    def write_draft(self, folder: Path) -> Path:
        """Write the assistant likewise."""
        return _write(folder, self.draft_config(), self.draft_tensors())


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "sliding_window": WINDOW,
    "use_bidirectional_attention": None,
    "head_dim": 32,
    "global_head_dim": 64,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SWA: {"rope_type": "default", "rope_theta": 1e4},
    },
}
#: What an assistant must have in common with its target.
_SHARED = (
    "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v",
)  # fmt: skip


def _config(layers: list[str], heads: int, kv: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": ffn,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


def _values_from_keys(kv_heads: int) -> dict[str, Any]:
    return {"attention_k_eq_v": True, "num_global_key_value_heads": kv_heads}


_EXPERTS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
}  # fmt: skip
_PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB}
_SIX, _NINE = [SWA, SWA, FULL] * 2, [SWA, SWA, FULL] * 3
_FOUR_HEADS = {"num_attention_heads": 4}  # the drafters of E4B and E2B have fewer heads

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("31b", 31, _config(_SIX, 4, 4, 96, **_values_from_keys(2))),
        Variant("12b", 12, _config(_SIX, 4, 2, 96, **_values_from_keys(1)), unified=True,
                suppress=(7, 200)),
        Variant("26b", 26, _config(_SIX, 4, 2, 96, **_values_from_keys(2), **_EXPERTS)),
        Variant("e4b", 4, _config(_NINE, 8, 2, 96, num_kv_shared_layers=3, **_PER_LAYER),
                _FOUR_HEADS, centroids=(16, 4)),
        Variant("e2b", 2, _config(_NINE, 8, 1, 96, num_kv_shared_layers=6,
                use_double_wide_mlp=True, **_PER_LAYER), _FOUR_HEADS, centroids=(16, 4)),
        # the layer before the boundary is windowed here: no released file is like this
        Variant("e2b_odd", 3, _config(_NINE, 8, 1, 96, num_kv_shared_layers=4,
                use_double_wide_mlp=True, **_PER_LAYER), _FOUR_HEADS, centroids=(16, 4)),
    )
}  # fmt: skip


def _heads(config: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """(key/value heads, head width) of a layer kind."""
    if kind == SWA:
        return config["num_key_value_heads"], config["head_dim"]
    own = config.get("num_global_key_value_heads")
    return own or config["num_key_value_heads"], config["global_head_dim"]


def _layer_shapes(
    config: Mapping[str, Any], index: int, boundary: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kind = config["layer_types"][index]
    kv, d = _heads(config, kind)
    ffn = config["intermediate_size"]
    if config["use_double_wide_mlp"] and index >= boundary:
        ffn *= 2
    yield "self_attn.q_proj.weight", (heads * d, width)
    yield "self_attn.q_norm.weight", (d,)
    yield "self_attn.o_proj.weight", (width, heads * d)
    if index < boundary:
        yield "self_attn.k_proj.weight", (kv * d, width)
        yield "self_attn.k_norm.weight", (d,)
        if not (config["attention_k_eq_v"] and kind == FULL):
            yield "self_attn.v_proj.weight", (kv * d, width)
    yield "mlp.gate_proj.weight", (ffn, width)
    yield "mlp.up_proj.weight", (ffn, width)
    yield "mlp.down_proj.weight", (width, ffn)
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    for name in norms:
        yield f"{name}_layernorm.weight", (width,)
    yield "layer_scalar", (1,)
    if p := config["hidden_size_per_layer_input"]:
        yield "per_layer_input_gate.weight", (p, width)
        yield "per_layer_projection.weight", (width, p)
        yield "post_per_layer_input_norm.weight", (width,)
    if config["enable_moe_block"]:
        experts, inner = config["num_experts"], config["moe_intermediate_size"]
        yield "router.proj.weight", (experts, width)
        yield "router.scale", (width,)
        yield "router.per_expert_scale", (experts,)
        yield "experts.gate_up_proj", (experts, 2 * inner, width)
        yield "experts.down_proj", (experts, width, inner)
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
                     "pre_feedforward_layernorm_2"):  # fmt: skip
            yield f"{name}.weight", (width,)


def _stack_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    yield "model.norm.weight", (width,)
    for index in range(layers):
        for name, shape in _layer_shapes(config, index, layers - config["num_kv_shared_layers"]):
            yield f"model.layers.{index}.{name}", shape


def _target_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _stack_shapes(config)
    if p := config["hidden_size_per_layer_input"]:
        width, packed = config["hidden_size"], config["num_hidden_layers"] * p
        rows = config["vocab_size_per_layer_input"]
        yield "model.embed_tokens_per_layer.weight", (rows, packed)
        yield "model.per_layer_model_projection.weight", (packed, width)
        yield "model.per_layer_projection_norm.weight", (p,)


def _draft_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    text = config["text_config"]
    yield from _stack_shapes(text)
    own, target = text["hidden_size"], config["backbone_hidden_size"]
    yield "pre_projection.weight", (own, 2 * target)
    yield "post_projection.weight", (target, own)
    if config["use_ordered_embeddings"]:
        yield "masked_embedding.centroids.weight", (config["num_centroids"], own)


def _values(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    uniform = np.random.default_rng(seed).random(shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        found = 0.3 + 0.5 * uniform  # scores of the size that training leaves
    elif name.endswith("layer_scalar"):
        found = 0.6 + 0.6 * uniform
    elif name == "model.norm.weight":  # both signs, or a tied head would repeat its input
        found = np.where(uniform < 0.5, -1.5, 0.5) + uniform
    elif len(shape) == 1:
        found = 0.5 + uniform
    else:
        tables = ("embed_tokens.weight", "embed_tokens_per_layer.weight")
        spread = 0.3 if name.endswith(tables) else shape[-1] ** -0.5
        spread *= 2 if name.endswith("router.proj.weight") else 1
        found = spread * 12**0.5 * (uniform - 0.5)
    return round_bf16(found.astype(np.float32))


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Float32 values to the nearest that bf16 has, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).reshape(x.shape)


def _tokenizer() -> dict[str, Any]:
    """One token a character; both models of every variant have it."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    letters = ["\u2581", "\n", *map(chr, range(0x21, 0x7F))]
    fill = [f"<unused{i}>" for i in range(VOCAB - len(special) - len(letters))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": t, "special": True, **flags} for i, t in enumerate(special)]
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "merges": [],
            "vocab": {token: i for i, token in enumerate([*special, *letters, *fill])},
        },
    }  # fmt: skip


def _write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    for file, content in {"config.json": config, "tokenizer.json": _tokenizer()}.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        if values.dtype == np.int64:
            kind, raw = "I64", values.tobytes()
        else:
            kind, raw = "BF16", (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder

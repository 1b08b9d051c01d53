"""Checkpoints without a file, for facts that no fixture has."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bad_specs import ROOT

from memra_compiler.spec import Checkpoints
from memra_runtime.checkpoint import open_checkpoint

TINY = ROOT / "model_specs" / "tiny"


@dataclass
class FakeTensor:
    name: str
    shape: tuple[int, ...]
    format: str = "f32"
    nbytes: int = 0


@dataclass
class FakeCheckpoint:
    """What the spec language looks at in a checkpoint."""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, FakeTensor] = field(default_factory=dict)
    kind: str = "gguf"
    path: Path = Path("weights/fake.gguf")


def copy_of(file: str, **changes: Any) -> FakeCheckpoint:
    """Copy a bundled GGUF file's metadata and shapes; `None` removes a key or tensor.

    Keys are written with `__` for the dot: `gemma4__attention__head_count=8`.
    """
    with open_checkpoint(TINY / file) as real:
        metadata = {k: v for k, v in real.metadata.items() if not k.startswith("tokenizer.")}
        tensors = {t.name: FakeTensor(t.name, tuple(t.shape)) for t in real.tensors.values()}
        copied = FakeCheckpoint(real.arch, metadata, tensors)
    for key, value in changes.items():
        name = key.replace("__", ".")
        store: dict[str, Any] = copied.tensors if name.endswith(".weight") else copied.metadata
        store.pop(name, None)
        if value is not None:
            store[name] = value
    return copied


def bundled() -> Checkpoints:
    """Return the bundled target and drafter, as metadata and shapes."""
    return Checkpoints(
        target=copy_of("gemma4-tiny-q8_0.gguf"), drafter=copy_of("gemma4-tiny-assistant-q8_0.gguf")
    )


#: The 31B as its config.json spells it: `global_*` keys, no `per_layer_config`.
CONFIG_31B: dict[str, Any] = {
    "model_type": "gemma4",
    "hidden_size": 5376,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "intermediate_size": 21504,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 1e4},
    },
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_experts": None,
    "num_kv_shared_layers": 0,
}


def config_31b(**changes: Any) -> FakeCheckpoint:
    return FakeCheckpoint(
        "gemma4", {**CONFIG_31B, **changes}, kind="safetensors", path=Path("weights/gemma4-31b")
    )

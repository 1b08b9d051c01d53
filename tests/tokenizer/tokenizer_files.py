"""Build tokenizers: the bundled one, and changed copies of it in both forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memra_runtime.checkpoint import Checkpoint, open_checkpoint

TESTS = Path(__file__).parents[1]
TINY = TESTS.parent / "model_specs" / "tiny"
TARGET = TINY / "gemma4-tiny-q8_0.gguf"
DRAFT = TINY / "gemma4-tiny-assistant-q8_0.gguf"
DATA = TESTS / "data"


def golden() -> dict[str, Any]:
    path = TESTS / "golden" / "tokenizer" / "gemma4_tiny_ids.json"
    return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]


def changed(changes: Mapping[str, object], arch: str = "gemma4") -> Checkpoint:
    """The bundled file with some metadata replaced; None removes a key."""
    with open_checkpoint(TARGET) as checkpoint:
        metadata = {**checkpoint.metadata, **changes}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return Checkpoint(TARGET, "gguf", arch, kept, {}, [], {}, b"")


def tokenizer_json(**changes: object) -> dict[str, Any]:
    """The tokenizer.json that the bundled file was made from, rebuilt from its metadata."""
    with open_checkpoint(TARGET) as checkpoint:
        tokens = list(checkpoint.metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
        merges = list(checkpoint.metadata["tokenizer.ggml.merges"])  # type: ignore[call-overload]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": text, "special": True, **flags} for i, text in enumerate(tokens[:16])
    ]
    split = {"type": "Split", "pattern": {"Regex": "[^\\n]+|[\\n]+"}, "invert": False}
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {**split, "behavior": "Isolated"},
        "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": True,
            "ignore_merges": False, "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
        **changes,
    }  # fmt: skip


def write_folder(path: Path, files: Mapping[str, object] | None = None) -> Path:
    """A folder with config, no weights and the rebuilt tokenizer; `files` replaces or adds."""
    contents: dict[str, object] = {
        "config.json": {"model_type": "gemma4_text", "eos_token_id": 1, "bos_token_id": 2},
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}},
        "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
        **(files or {}),
    }
    path.mkdir()
    for name, content in contents.items():
        if content is not None:
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (path / name).write_bytes(raw)
    return path

"""Build a tokenizer from the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import tokenizers

from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.checkpoint.hf_folder import read_json
from memra_runtime.errors import fail
from memra_runtime.tokenizer.model import Tokenizer
from memra_runtime.tokenizer.vocabulary import Vocabulary, kind_in_json

_MAX_BYTES = 256 << 20


def from_folder(checkpoint: Checkpoint) -> Tokenizer:
    """Raises: MemraError if tokenizer.json is missing, damaged or decodes in an unknown way."""
    folder = checkpoint.path
    path = folder / "tokenizer.json"
    if not path.exists():
        sentencepiece = (folder / "tokenizer.model").exists()
        what = "convert its tokenizer.model" if sentencepiece else "fetch it from the model's page"
        fail("tokenizer-missing", "there is no tokenizer.json", str(folder), hints=(what,))
    engine, spec = _read(path)
    vocabulary = _vocabulary(engine, spec)
    config, generation = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("tokenizer_config.json", "generation_config.json")
    )
    sources = (generation, checkpoint.metadata)
    named = [i for source in sources for i in _ids(source.get("eos_token_id"))]
    bos, eos = (
        engine.token_to_id(_content(config.get(f"{name}_token"))) for name in ("bos", "eos")
    )
    if bos is None:
        bos = next(iter(_ids(checkpoint.metadata.get("bos_token_id"))), None)
    gemma = checkpoint.arch.startswith("gemma4")
    return Tokenizer(
        engine,
        vocabulary,
        str(path),
        bos_id=vocabulary.valid(bos),
        eos_id=vocabulary.valid(eos),
        add_bos=gemma or config.get("add_bos_token") is True,
        eos_ids=vocabulary.ends([eos, *named]),
        suppress_ids=[
            i for i in _ids(generation.get("suppress_tokens")) if i < len(vocabulary.tokens)
        ],
        chat_template=_template(folder, config),
        byte_alphabet=_byte_alphabet() if _is_byte_level(spec, str(path)) else None,
    )


def _read(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, object]]:
    """Return the ready tokenizer and the JSON it was made from."""

    def damaged(what: str) -> NoReturn:
        hints = ("fetch the file again (with git-lfs: `git lfs pull`)",)
        fail("tokenizer-damaged", f"tokenizer.json {what}", str(path), hints=hints)

    try:
        if path.stat().st_size > _MAX_BYTES:
            damaged("is too large to be a tokenizer")
        text = path.read_text("utf-8")
        spec = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        damaged(f"cannot be read: {error}")
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        damaged("has no `model`")
    try:
        engine = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library has no error type of its own
        damaged(f"is not valid: {error}")
    engine.no_truncation()
    engine.no_padding()
    return engine, spec


def _vocabulary(engine: tokenizers.Tokenizer, spec: Mapping[str, object]) -> Vocabulary:
    ids: dict[str, int] = engine.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    tokens = [""] * size
    for token, i in ids.items():
        tokens[i] = token
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    added: dict[int, tokenizers.AddedToken] = engine.get_added_tokens_decoder()
    special = {i: item.special for i, item in added.items()}
    kinds = [kind_in_json(token, special.get(i)) for i, token in enumerate(tokens)]
    model = spec["model"]
    merges = model.get("merges", []) if isinstance(model, dict) else []
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return Vocabulary(tokens, kinds, pairs)


def _is_byte_level(spec: Mapping[str, object], place: str) -> bool:
    """Tell how tokens spell bytes: as GPT-2 does, or as text with U+2581 for a space."""
    decoder = spec.get("decoder")
    kinds = {item["type"] for item in _steps(decoder)}
    if kinds == {"ByteLevel"}:
        return True
    if not kinds <= {"Replace", "ByteFallback", "Fuse"}:
        fail(
            "tokenizer-kind",
            f"tokenizer.json decodes with {', '.join(sorted(kinds))}, which Memra cannot",
            place,
            notes=("supported: ByteLevel, and Replace + ByteFallback + Fuse",),
        )
    return False


def _steps(decoder: object) -> Iterator[Mapping[str, str]]:
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for step in decoder.get("decoders", []):
                yield from _steps(step)
        else:
            yield decoder


def _byte_alphabet() -> dict[str, int]:
    """Return the character that stands for each byte. Source: GPT-2, `encoder.py`."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _ids(value: object) -> list[int]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if type(item) is int and item >= 0]


def _content(token: object) -> str:
    """Return the text of a token that a config writes as text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _template(folder: Path, config: Mapping[str, object]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8", errors="replace")
    value = config.get("chat_template")
    if isinstance(value, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None

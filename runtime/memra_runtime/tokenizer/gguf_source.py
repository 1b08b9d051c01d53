"""Build a tokenizer from the metadata of a GGUF file.

Supported is `tokenizer.ggml.model` = `gemma4`: byte-pair merges over Unicode characters, a space
written as U+2581, a split only between newlines and other text, and a byte token for each byte of
a character that has no token.

Source: llama.cpp, `src/llama-vocab.cpp`: LLAMA_VOCAB_PRE_TYPE_GEMMA4, llm_tokenizer_bpe_session.
It emits a run of newlines that is a token as that token; the merges of the model do the same.
One difference: text such as `<|turn>` is matched whole even where a converter typed it as a normal
token, as it is in the tokenizer.json that the file was made from; llama.cpp would spell it out.
"""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.errors import fail
from memra_runtime.tokenizer.model import Tokenizer
from memra_runtime.tokenizer.vocabulary import Kind, Vocabulary, kind_in_gguf, steers

_PREFIX = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def from_gguf(checkpoint: Checkpoint) -> Tokenizer:
    """Raises: MemraError if the file has no tokenizer, or one that is damaged or not supported."""
    metadata, place = checkpoint.metadata, str(checkpoint.path)
    model = metadata.get(_PREFIX + "model")
    if model != "gemma4":
        what = "has no tokenizer" if model is None else f"has a tokenizer of kind `{model}`"
        fail(
            "tokenizer-kind",
            f"`{checkpoint.path.name}` {what}; from GGUF files Memra reads kind `gemma4`",
            place,
            hints=("give the Hugging Face folder of the model, with its tokenizer.json",),
        )
    vocabulary = _vocabulary(metadata, place)
    template = metadata.get("tokenizer.chat_template")
    bos, eos = (metadata.get(f"{_PREFIX}{name}_token_id") for name in ("bos", "eos"))
    suppress = _integers(metadata, "suppress_tokens", place)
    return Tokenizer(
        _engine(vocabulary, place),
        vocabulary,
        place,
        bos_id=vocabulary.valid(bos),
        eos_id=vocabulary.valid(eos),
        add_bos=True,  # llama.cpp forces it for this kind, whatever `add_bos_token` says
        eos_ids=vocabulary.ends(metadata.get(_PREFIX + key) for key in _END_KEYS),
        suppress_ids=[i for i in suppress if 0 <= i < len(vocabulary.tokens)],
        chat_template=template if isinstance(template, str) else None,
    )


def _damaged(what: str, place: str) -> None:
    fail(
        "tokenizer-damaged",
        f"the tokenizer in this file is damaged: {what}",
        place,
        hints=("convert the model again with a current llama.cpp",),
    )


def _strings(metadata: Mapping[str, object], key: str, place: str) -> list[str]:
    value = metadata.get(_PREFIX + key)
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        _damaged(f"`{_PREFIX}{key}` is missing or not a list of texts", place)
    items: list[str] = list(value)  # type: ignore[call-overload]
    if items and not isinstance(items[0], str):
        _damaged(f"`{_PREFIX}{key}` is not a list of texts", place)
    return items


def _integers(metadata: Mapping[str, object], key: str, place: str) -> list[int]:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return []
    dtype = getattr(value, "dtype", None)
    if dtype is None or dtype.kind not in "iu":
        _damaged(f"`{_PREFIX}{key}` is not a list of integers", place)
    return list(value.tolist())  # type: ignore[attr-defined]


def _vocabulary(metadata: Mapping[str, object], place: str) -> Vocabulary:
    tokens = _strings(metadata, "tokens", place)
    types = _integers(metadata, "token_type", place) or [int(Kind.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        _damaged(f"{len(tokens)} tokens, but {len(types)} token types", place)
    wrong = next((i for i, kind in enumerate(types) if not 1 <= kind <= 6), None)
    if wrong is not None:
        _damaged(f"token {wrong} has type {types[wrong]}", place)
    # llama.cpp names empty tokens, so that each token has a text of its own; so do we
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    kinds = [kind_in_gguf(token, kind) for token, kind in zip(tokens, types, strict=True)]
    return Vocabulary(tokens, kinds, _strings(metadata, "merges", place))


def _engine(vocabulary: Vocabulary, place: str) -> tokenizers.Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        twice = next(t for i, t in enumerate(vocabulary.tokens) if ids[t] != i)
        _damaged(f"token {twice!r} appears twice", place)
    bytes_missing = [f"<0x{i:02X}>" for i in range(256) if f"<0x{i:02X}>" not in ids]
    if bytes_missing:
        _damaged(f"{len(bytes_missing)} byte tokens are missing, first {bytes_missing[0]}", place)
    pairs = []
    for rank, merge in enumerate(vocabulary.merges):
        split = merge.find(" ", 1)  # from 1: the left token may be a space
        left, right = merge[:split], merge[split + 1 :]
        if split < 0 or not (left in ids and right in ids and left + right in ids):
            _damaged(f"merge {rank} ({merge!r}) needs a token that is not there", place)
        pairs.append((left, right))
    engine = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs, byte_fallback=True))
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    engine.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("[^\\n]+|[\\n]+"), "isolated")
    for i in vocabulary.matched():
        token = vocabulary.tokens[i]
        special = steers(token, vocabulary.kinds[i])
        added = tokenizers.AddedToken(token, special=special, normalized=False)
        (engine.add_special_tokens if special else engine.add_tokens)([added])
    return engine

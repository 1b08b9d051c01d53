"""Decoding, whole and streamed."""

from __future__ import annotations

import random

import pytest
from tokenizer_files import TARGET, golden, tokenizer_json, write_folder

from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def target() -> Tokenizer:
    with open_checkpoint(TARGET) as checkpoint:
        return load_tokenizer(checkpoint)


def byte(value: int) -> int:
    return 16 + value


def test_text_survives_encode_and_decode(target: Tokenizer) -> None:
    for case in golden()["cases"]:
        text = case["text"]
        assert target.decode(case["ids"][1:], special=True) == text.replace("\u2581", " ")


def test_control_tokens_are_printed_only_when_asked(target: Tokenizer) -> None:
    ids = target.encode("<|turn>user\nHi<turn|>")
    assert target.decode(ids) == "user\nHi"
    assert target.decode(ids, special=True) == "<bos><|turn>user\nHi<turn|>"


def test_stream_holds_a_character_until_it_is_whole(target: Tokenizer) -> None:
    stream = target.stream()
    ids = [byte(value) for value in "🤗".encode()]
    assert [stream.push(i) for i in ids] == ["", "", "", "🤗"]
    assert stream.flush() == ""


def test_broken_characters_become_replacement_characters(target: Tokenizer) -> None:
    stream = target.stream()
    a = target.encode("a", add_bos=False)[0]
    assert [stream.push(byte(0xE2)), stream.push(a), stream.push(byte(0xF0))] == ["", "\ufffda", ""]
    assert stream.flush() == "\ufffd"
    assert target.decode([byte(0xE2), a, byte(0xF0)]) == "\ufffda\ufffd"


def test_streamed_text_equals_decoded_text(target: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(200):
        ids = [
            rng.randrange(16, 272) if rng.random() < 0.6 else rng.randrange(-1, 4100)
            for _ in range(rng.randint(0, 30))
        ]
        for special in (True, False):
            stream = target.stream(special=special)
            parts = [stream.push(i) for i in ids]
            assert "".join(parts) + stream.flush() == target.decode(ids, special=special)


def test_padded_rows_have_no_text(target: Tokenizer) -> None:
    assert target.decode([4096, 300_000]) == "\ufffd\ufffd"
    assert target.token(4096) == ""


def test_byte_alphabet_of_gpt2(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder whose characters stand for bytes (Qwen's way) decodes too."""
    vocab = {"<|im_end|>": 0, "Ġ": 1, "h": 2, "i": 3, "ð": 4, "Ł": 5, "¤": 6, "Ĺ": 7, "hi": 8}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec = tokenizer_json(
        added_tokens=[{"id": 0, "content": "<|im_end|>", "special": True, **flags}],
        normalizer=None, pre_tokenizer=level, decoder=level,
        model={"type": "BPE", "vocab": vocab, "merges": [["h", "i"]]},
    )  # fmt: skip
    files = {
        "config.json": {"model_type": "qwen3_5_text"}, "tokenizer.json": spec,
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
    }  # fmt: skip
    path = write_folder(tmp_path_factory.mktemp("bytes") / "m", files)
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode(" hi🤗<|im_end|>")
    assert ids == [1, 8, 4, 5, 6, 7, 0]
    assert tokenizer.decode(ids) == " hi🤗"
    assert not tokenizer.add_bos
    assert tokenizer.eos_ids == {0}

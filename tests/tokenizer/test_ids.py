"""Ids: the same from a GGUF file, a folder, transformers and llama.cpp's algorithm."""

from __future__ import annotations

import random

import pytest
from llama_reference import LlamaReference
from tokenizer_files import DATA, DRAFT, TARGET, golden, write_folder

from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.errors import MemraError
from memra_runtime.tokenizer import Tokenizer, load_tokenizer

GOLDEN = golden()


@pytest.fixture(scope="module")
def target() -> Tokenizer:
    with open_checkpoint(TARGET) as checkpoint:
        return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def from_json(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_folder(tmp_path_factory.mktemp("hf") / "model")
    with open_checkpoint(path) as checkpoint:
        return load_tokenizer(checkpoint)


def test_gguf_gives_the_ids_of_transformers(target: Tokenizer) -> None:
    for case in GOLDEN["cases"]:
        assert target.encode(case["text"]) == case["ids"], repr(case["text"])


def test_folder_gives_the_ids_of_transformers(from_json: Tokenizer) -> None:
    for case in GOLDEN["cases"]:
        assert from_json.encode(case["text"]) == case["ids"], repr(case["text"])


def test_ids_follow_the_algorithm_of_llama_cpp(target: Tokenizer) -> None:
    vocabulary = target.vocabulary
    reference = LlamaReference(vocabulary.tokens, vocabulary.merges, vocabulary.matched())
    for case in GOLDEN["cases"]:
        assert [2, *reference.encode(case["text"])] == case["ids"], repr(case["text"])
    runs = [token for token in vocabulary.tokens if token.strip("\n") == ""]
    assert len(runs) == 2  # each is taken whole there, and must be here
    assert all(len(target.encode(run, add_bos=False)) == 1 for run in runs)


def test_both_sources_agree_on_random_text(target: Tokenizer, from_json: Tokenizer) -> None:
    rng = random.Random(11)
    matched = set(target.vocabulary.matched())
    pool = [*"aeinst ,.<>|\n\t\r\0", "\u2581", "é", "世", "🤗", "<bos>", "<|turn>", "<0x41>", "  "]
    for _ in range(300):
        text = "".join(rng.choices(pool, k=rng.randint(0, 40)))
        for special in (True, False):
            ids = target.encode(text, special=special)
            assert ids == from_json.encode(text, special=special), repr(text)
            expected = text.replace("\u2581", " ")
            assert target.decode(ids[1:], special=True) == expected
        assert matched.isdisjoint(ids[1:])


def test_control_tokens_stay_text_when_asked(target: Tokenizer, from_json: Tokenizer) -> None:
    for case in GOLDEN["plain"]:
        assert target.encode(case["text"], special=False) == case["ids"]
        assert from_json.encode(case["text"], special=False) == case["ids"]


def test_beginning_of_text(target: Tokenizer) -> None:
    assert target.encode("") == [2]
    assert target.encode("", add_bos=False) == []
    assert target.encode("<bos>") == [2, 2]  # as transformers and llama.cpp: text is not edited


def test_a_lone_surrogate_is_refused(target: Tokenizer) -> None:
    with pytest.raises(MemraError, match=r"character 2 of the text is half .*U\+D83D"):
        target.encode("ab\ud83d")


def test_ends_and_sizes_agree(target: Tokenizer, from_json: Tokenizer) -> None:
    for tokenizer in (target, from_json):
        assert tokenizer.vocab_size == 4096
        assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 1)
        assert tokenizer.eos_ids == {1, 6}  # <eos>, and <turn|> by its text
    assert target.fingerprint == from_json.fingerprint


def test_the_drafter_has_the_same_tokenizer(target: Tokenizer) -> None:
    with open_checkpoint(DRAFT) as checkpoint:
        assert load_tokenizer(checkpoint).fingerprint == target.fingerprint


@pytest.mark.parametrize("name", ["gemma4-tiny", "gemma4-tiny-assistant"])
def test_hugging_face_folders(target: Tokenizer, name: str) -> None:
    with open_checkpoint(DATA / name) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.fingerprint == target.fingerprint
    for case in GOLDEN["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], repr(case["text"])

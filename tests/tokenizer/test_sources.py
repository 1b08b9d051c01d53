"""Wrong tokenizers are refused with a reason; ends, suppression and pairing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizer_files import changed, tokenizer_json, write_folder

from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.errors import MemraError
from memra_runtime.tokenizer import Tokenizer, check_pairing, load_tokenizer

TOKENS = [f"<0x{i:02X}>" for i in range(256)] + ["a", "b", "ab", "<bos>", "<eos>"]
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
TYPES = [6] * 256 + [1, 1, 1, 3, 3]


def small(**changes: object) -> Tokenizer:
    """A tokenizer of 261 tokens from GGUF metadata."""
    metadata: dict[str, object] = {
        "tokens": TOKENS, "token_type": np.array(TYPES, dtype="i4"), "merges": ["a b"],
        "bos_token_id": 259, "eos_token_id": 260, "suppress_tokens": None, **changes,
    }  # fmt: skip
    return load_tokenizer(changed({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}))


def types(*tail: int) -> np.ndarray:
    return np.array(TYPES[: 261 - len(tail)] + list(tail), dtype="i4")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": None}, "has no tokenizer"),
        ({"model": "llama"}, "has a tokenizer of kind `llama`"),
        ({"tokens": None}, "`tokenizer.ggml.tokens` is missing"),
        ({"tokens": np.arange(3)}, "`tokenizer.ggml.tokens` is not a list of texts"),
        ({"merges": None}, "`tokenizer.ggml.merges` is missing"),
        ({"token_type": types()[:9]}, "261 tokens, but 9 token types"),
        ({"token_type": types(77)}, "token 260 has type 77"),
        ({"token_type": ["x"]}, "is not a list of integers"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "token 'a' appears twice"),
        ({"tokens": ["x", *TOKENS[1:]]}, "1 byte tokens are missing, first <0x00>"),
        ({"merges": ["a b", "b c"]}, "merge 1 ('b c') needs a token that is not there"),
        ({"merges": ["ab"]}, "merge 0 ('ab') needs"),
    ],
)
def test_damaged_metadata(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(MemraError) as caught:
        small(**changes)
    assert expected in str(caught.value)


def test_gguf_ends_suppression_and_beginning() -> None:
    tokenizer = small(
        eot_token_id=258, eom_token_id=999, suppress_tokens=np.array([-1, 5, 900], dtype="i4"),
        add_bos_token=False,
    )  # fmt: skip
    assert tokenizer.eos_ids == {258, 260}
    assert tokenizer.suppress_ids == (5,)
    assert tokenizer.encode("ab") == [259, 258]  # llama.cpp adds it for this kind, come what may


def test_user_defined_tokens_are_always_matched_and_printed() -> None:
    tokens = [*TOKENS, "\t\t", "<|channel>"]
    tokenizer = small(tokens=tokens, token_type=np.array([*TYPES, 4, 4], dtype="i4"))
    ids = tokenizer.encode("a\t\t<|channel>", add_bos=False)
    assert ids == [256, 261, 262]
    assert tokenizer.decode(ids) == "a\t\t<|channel>"
    plain = tokenizer.encode("a\t\t<|channel>", add_bos=False, special=False)
    assert plain[:2] == [256, 261]
    assert 262 not in plain  # printed, but it steers the reply: text of a user stays text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer.json": None}, "there is no tokenizer.json"),
        ({"tokenizer.json": None, "tokenizer.model": b"x"}, "convert its tokenizer.model"),
        ({"tokenizer.json": b"{"}, "cannot be read"),
        ({"tokenizer.json": b"version https://git-lfs"}, "git lfs pull"),
        ({"tokenizer.json": {}}, "has no `model`"),
        ({"tokenizer.json": {"model": {"type": "BPE"}}}, "is not valid"),
        ({"tokenizer_config.json": b"["}, "tokenizer_config.json"),
        ({"tokenizer.json": tokenizer_json(decoder=METASPACE)}, "Metaspace"),
    ],
)
def test_damaged_folder(tmp_path: Path, files: dict[str, object], expected: str) -> None:
    path = write_folder(tmp_path / "m", files)
    with open_checkpoint(path) as checkpoint, pytest.raises(MemraError) as caught:
        load_tokenizer(checkpoint)
    assert expected in str(caught.value)


def test_ends_come_from_every_config(tmp_path: Path) -> None:
    files = {"generation_config.json": {"eos_token_id": [1, 50], "suppress_tokens": [9, 5000]}}
    with open_checkpoint(write_folder(tmp_path / "m", files)) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.eos_ids == {1, 6, 50}
    assert tokenizer.suppress_ids == (9,)


def test_equal_tokenizers_pair(tmp_path: Path) -> None:
    check_pairing(small(), small())
    assert small().fingerprint == small().fingerprint
    assert small().fingerprint != small(merges=[]).fingerprint


def test_another_tokenizer_is_refused_by_its_first_token() -> None:
    other = small(tokens=[*TOKENS[:256], "a", "c", "ac", *TOKENS[259:]], merges=["a c"])
    with pytest.raises(MemraError) as caught:
        check_pairing(small(), other)
    message = str(caught.value)
    assert "token 257 is 'b' in the target and 'c' in the drafter (2 ids differ)" in message
    assert "target: 261 tokens" in message


@pytest.mark.parametrize("filler", ["[PAD{}]", "<unused{}>", ""])
def test_a_padded_vocabulary_pairs(filler: str) -> None:
    tokens = [*TOKENS, *(filler.format(i) for i in range(261, 320))]
    kinds = np.array([*TYPES, *[5 if filler.startswith("[") else 1] * 59], dtype="i4")
    padded = small(tokens=tokens, token_type=kinds)
    check_pairing(small(), padded)
    check_pairing(padded, small())


def test_more_real_tokens_do_not_pair() -> None:
    longer = small(tokens=[*TOKENS, "x", "y"], token_type=np.array([*TYPES, 1, 1], dtype="i4"))
    with pytest.raises(MemraError, match=r"the drafter has 2 tokens .* from id 261 on: 'x', 'y'"):
        check_pairing(small(), longer)
    with pytest.raises(MemraError, match="the target has 2 tokens"):
        check_pairing(longer, small())

"""Damaged and wrong files: one clear error each, never a traceback or a huge allocation."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from weight_files import DRAFT, F32, Q8_0, folder, gguf, safetensors, text, value

from memra_runtime.checkpoint import Checkpoint, find_nonfinite, open_checkpoint
from memra_runtime.errors import MemraError

A = ("a", (4,), F32, bytes(16))
B = ("b", (4,), F32, bytes(16))
CONFIG: dict[str, object] = {"model_type": "toy"}


def refused(path: Path) -> str:
    with pytest.raises(MemraError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith("error[weights-")
    assert "-->" in message
    return message


def one_key(key: str, raw: bytes) -> bytes:
    """A file whose second key has a raw value, which may be nonsense."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    return head + text("general.architecture") + value("toy") + text(key) + raw


GGUF_CASES: dict[str, tuple[bytes, str]] = {
    "zero length": (b"", "is empty (0 bytes)"),
    "pytorch": (b"PK\x03\x04" + bytes(60), "zip archive, as PyTorch's"),
    "pickle": (b"\x80\x02}q" + bytes(60), "Python pickle"),
    "html": (b"<!DOCTYPE html><html>login</html>", "a web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    "safetensors": (safetensors({}), "a safetensors file"),
    "json": (b'{"model_type": 1}', "a JSON text"),
    "other": (b"\x07\x07\x07\x07\x07", "first bytes 07 07 07 07"),
    "magic only": (b"GGUF", "ends inside its header"),
    "version 1": (gguf({}, version=1), "is GGUF version 1"),
    "version 9": (gguf({}, version=9), "is GGUF version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (gguf({}, counts=(2**60, 1)), "1,152,921,504,606,846,976 tensors"),
    "many keys": (gguf({}, counts=(0, 2**63)), "metadata keys"),
    "no arch": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "`general.architecture` is missing"),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("general.architecture") + value("x")),
        "metadata key `general.architecture` appears twice",
    ),
    "long string": (one_key("k", struct.pack("<IQ", 8, 2**62)), "needs 4,611,686,018,427,387,904"),
    "long array": (one_key("k", struct.pack("<IIQ", 9, 4, 2**61)), "entries needs"),
    "long strings": (one_key("tokenizer.t", struct.pack("<IIQ", 9, 8, 2**40)), "entries needs"),
    "string array past the end": (
        one_key("tokenizer.t", struct.pack("<IIQQ", 9, 8, 1, 2**63)), "with 1 strings needs"
    ),
    "nested array": (one_key("k", struct.pack("<IIQ", 9, 9, 1)), "array of value type 9"),
    "value type": (one_key("k", struct.pack("<I", 77)), "value type 77"),
    "bad utf-8 value": (gguf({"k": b"\xff\xfe"}), "the value of `k` is not UTF-8"),
    "bad utf-8 key": (one_key("k", value("x")).replace(text("k"), text(b"\xff")), "is not UTF-8"),
    "tensor twice": (gguf({}, [A, A]), "tensor `a` appears twice"),
    "overlap": (gguf({}, [A, B], offsets=[0, 0]), "overlap"),
    "misaligned": (gguf({}, [A, B], offsets=[0, 17]), "starts at 17, not on 32 bytes"),
    "past the end": (gguf({}, [A, B], offsets=[0, 2**40]), "ends before its tensor `b` does"),
    "cut data": (gguf({}, [A, B])[:-32], "ends before its tensor `b` does"),
    "huge shape": (gguf({}, [("a", (2**62, 2**62), F32, b"")]), "are needed"),
    "zero shape": (gguf({}, [("a", (0, 4), F32, b"")]), "has the shape [0, 4]"),
    "rank": (gguf({}, [("a", (1,) * 9, F32, bytes(4))]), "has 9 dimensions"),
    "row": (gguf({}, [("a", (2, 33), Q8_0, bytes(68))]), "rows of `a` have 33 values"),
    "alignment 0": (gguf({"general.alignment": ("u32", 0)}), "`general.alignment` is 0"),
    "alignment 48": (gguf({"general.alignment": ("u32", 48)}), "`general.alignment` is 48"),
    "alignment 2^31": (gguf({"general.alignment": ("u32", 2**31)}), "`general.alignment`"),
    "alignment text": (gguf({"general.alignment": "32"}), "`general.alignment` is '32'"),
    "split": (gguf({"split.count": ("u32", 3)}), "one of 3 parts"),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf(case: str, tmp_path: Path) -> None:
    raw, expected = GGUF_CASES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    message = refused(path)
    assert expected in message
    assert "bad.gguf" in message


def test_bad_utf_8_in_a_lazy_array_is_named_when_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf({"tokenizer.t": ("str", ["ok", b"\xff"])}))
    tokens = open_checkpoint(path).metadata["tokenizer.t"]
    assert tokens[0] == "ok"  # type: ignore[index]
    with pytest.raises(MemraError, match=r"`tokenizer\.t\[1\]` is not UTF-8"):
        tokens[1]  # type: ignore[index]
    with pytest.raises(MemraError, match="not UTF-8"):
        list(tokens)  # type: ignore[call-overload]


T = {"a": ("F32", (2,), bytes(8)), "b": ("F32", (2,), bytes(8))}
HEADER_CASES: dict[str, tuple[bytes, str]] = {
    "zero length": (b"", "is empty"),
    "short": (b"\x01\x00", "not a safetensors file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    "huge header": (struct.pack("<Q", 2**60) + b"{}", "not a safetensors file"),
    "header past the end": (struct.pack("<Q", 4000) + b"{}", "its header has 4,000 bytes"),
    "not json": (struct.pack("<Q", 4) + b"{abc", "is not valid JSON"),
    "deep json": (
        struct.pack("<Q", 200_005) + b'{"a":' + b"[" * 100_000 + b"]" * 100_000, "not valid JSON"
    ),
    "name twice": (
        struct.pack("<Q", 15) + b'{"a":1,"a":2}  ', "key 'a' appears twice"
    ),
    "cut data": (safetensors(T)[:-3], "its tensors need"),
    "long data": (safetensors(T) + b"x", "1 bytes at its end belong to no tensor"),
    "overlap": (safetensors(T, {"b": {"data_offsets": [4, 12]}}), "`a` and `b` overlap"),
    "gap": (safetensors(T, {"b": {"data_offsets": [9, 17]}}), "1 bytes before tensor `b`"),
    "wrong size": (safetensors(T, {"a": {"shape": [3]}}), "F32 [3] takes 12 bytes, 8 are given"),
    "wrong dtype": (safetensors(T, {"a": {"dtype": "I64"}}), "takes 16 bytes"),
    "dtype is a number": (safetensors(T, {"a": {"dtype": 3}}), "`dtype` is not a text"),
    "shape": (safetensors(T, {"a": {"shape": [-2]}}), "`shape` is not a list of sizes"),
    "shape of truth": (safetensors(T, {"a": {"shape": [True, 2]}}), "`shape` is not"),
    "offsets": (safetensors(T, {"a": {"data_offsets": [8, 0]}}), "is not [begin, end]"),
    "huge": (safetensors(T, {"a": {"data_offsets": [0, 2**70], "shape": [2**68]}}), "overlap"),
    "entry": (struct.pack("<Q", 8) + b'{"a": 1}', "it is not an object"),
    "field": (struct.pack("<Q", 9) + b'{"a": {}}', "`dtype` is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADER_CASES)
def test_safetensors(case: str, tmp_path: Path) -> None:
    raw, expected = HEADER_CASES[case]
    path = folder(tmp_path / "m", {"config.json": CONFIG, "model.safetensors": raw})
    message = refused(path)
    assert expected in message
    assert "model.safetensors" in message


ONE = safetensors({"a": ("F32", (1,), bytes(4))})
INDEX = "model.safetensors.index.json"
FOLDER_CASES: dict[str, tuple[dict[str, bytes | dict[str, object]], str]] = {
    "no config": ({"model.safetensors": ONE}, "has no config.json"),
    "only gguf": ({"x.gguf": b"GGUF"}, "give one of its GGUF files: x.gguf"),
    "config damaged": ({"config.json": b"{", "model.safetensors": ONE}, "not valid JSON"),
    "config is a list": ({"config.json": b"[]"}, "is not a JSON object"),
    "no model type": ({"config.json": {}, "model.safetensors": ONE}, "`model_type` is missing"),
    "no weights": ({"config.json": CONFIG}, "has no model.safetensors"),
    "only bin": ({"config.json": CONFIG, "pytorch_model.bin": b"PK"}, "pytorch_model.bin"),
    "missing shards": (
        {"config.json": CONFIG, "x": ONE, INDEX: {"weight_map": {"a": "x", "b": "y", "c": "z"}}},
        "2 of 3 weight files are missing: y, z",
    ),
    "shard without its tensor": (
        {"config.json": CONFIG, "x": ONE, INDEX: {"weight_map": {"a": "x", "b": "x"}}},
        "`x` has tensor `b`, which it has not",
    ),
    "no map": ({"config.json": CONFIG, INDEX: {}}, "it has no `weight_map`"),
    "outside": (
        {"config.json": CONFIG, INDEX: {"weight_map": {"a": "../x"}}}, "is not the name of a file"
    ),
    "twice": (
        {"config.json": CONFIG, "x": ONE, "y": safetensors(T),
         INDEX: {"weight_map": {"b": "y", "c": "x"}}},
        "tensor `a` is in both `x` and `y`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDER_CASES)
def test_folder(case: str, tmp_path: Path) -> None:
    files, expected = FOLDER_CASES[case]
    assert expected in refused(folder(tmp_path / "m", files))


def test_absent_file_lists_its_neighbours() -> None:
    assert DRAFT.name in refused(DRAFT.with_name("gemma4-tiny-q8.gguf"))


def test_single_safetensors_file_gets_a_hint(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model.safetensors": ONE}) / "model.safetensors"
    assert f"give the folder, which also has config.json: `{path.parent}`" in refused(path)


def use(checkpoint: Checkpoint) -> None:
    """Touch all that a damaged file could make explode."""
    for item in checkpoint.metadata.values():
        if not isinstance(item, (str, int, float)):
            list(item)  # type: ignore[call-overload]
    for info in checkpoint.tensors.values():
        find_nonfinite(checkpoint, info)


def flip(raw: bytearray, rng: random.Random, limit: int) -> bytes:
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(limit)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(raw)


def fuzz(path: Path, write: Callable[[bytes], None], original: bytes, header: int) -> int:
    """Flip bytes and cut; return how many variants were refused."""
    rng = random.Random(path.name)
    refusals = 0
    for step in range(400):
        raw = flip(bytearray(original), rng, header)
        if step % 4 == 0:
            raw = original[: rng.randrange(len(original))]
        write(raw)
        try:
            with open_checkpoint(path) as checkpoint:
                use(checkpoint)
        except MemraError:
            refusals += 1
    return refusals


def test_random_damage_to_gguf_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.gguf"
    tensors = [
        ("blk.0.attn_q.weight", (8, 64), Q8_0, bytes(8 * 2 * 34)),
        ("norm.weight", (64,), F32, bytes(256)),
    ]
    metadata = {
        "general.name": "toy", "general.alignment": ("u32", 32), "toy.list": ("i32", [1, 2, 3]),
        "tokenizer.ggml.tokens": ("str", ["a", "b", "ab"]), "toy.tags": ("str", ["x"]),
    }  # fmt: skip
    original = gguf(metadata, tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusals = fuzz(path, lambda raw: void(path.write_bytes(raw)), original, len(original))
    assert refusals > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_random_damage_to_safetensors_is_refused_or_read(tmp_path: Path) -> None:
    original = safetensors(T)
    path = folder(tmp_path / "m", {"config.json": CONFIG, "model.safetensors": original})
    file = path / "model.safetensors"
    assert fuzz(path, lambda raw: void(file.write_bytes(raw)), original, len(original)) > 100


def test_random_damage_to_a_real_header_is_refused_or_read(tmp_path: Path) -> None:
    raw = DRAFT.read_bytes()
    path = tmp_path / "real.gguf"
    rng = random.Random(3)
    for _ in range(25):
        path.write_bytes(flip(bytearray(raw), rng, 160_000))
        try:
            with open_checkpoint(path) as checkpoint:
                use(checkpoint)
        except MemraError:
            continue


def void(_: object) -> None:
    """Make a statement of an expression."""

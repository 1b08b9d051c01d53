"""Opening good files: shapes, formats, bytes, metadata, identity."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from weight_files import BF16, DRAFT, F16, F32, Q6_K, Q8_0, TARGET, folder, gguf, safetensors

from memra_runtime.checkpoint import TensorInfo, open_checkpoint
from memra_runtime.errors import MemraError


def test_target_file_is_read_as_its_converter_wrote_it() -> None:
    with open_checkpoint(TARGET) as checkpoint:
        assert (checkpoint.kind, checkpoint.arch) == ("gguf", "gemma4")
        assert len(checkpoint.tensors) == 86
        tensors = checkpoint.tensors
        assert tensors["token_embd.weight"] == TensorInfo(
            "token_embd.weight", (4096, 256), "q8_0", 4096 * 256 // 32 * 34
        )
        assert tensors["blk.0.attn_k.weight"].shape == (128, 256)
        assert tensors["rope_freqs.weight"].format == "f32"
        assert checkpoint.metadata["gemma4.attention.head_count_kv"] == [2, 2, 2, 2, 2, 1]
        assert checkpoint.metadata["gemma4.attention.sliding_window_pattern"] == [True] * 5 + [
            False
        ]
        assert "name 'Gemma4 Tiny'" in checkpoint.written_by


def test_bytes_equal_those_of_the_gguf_package() -> None:
    reader = pytest.importorskip("gguf").GGUFReader(DRAFT)
    with open_checkpoint(DRAFT) as checkpoint:
        assert list(checkpoint.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            expected = np.ascontiguousarray(tensor.data).view(np.uint8).ravel()
            np.testing.assert_array_equal(checkpoint.data(tensor.name), expected)
            assert checkpoint.tensors[tensor.name].shape == tuple(tensor.shape.tolist()[::-1])


def test_data_is_a_read_only_view_of_the_map() -> None:
    checkpoint = open_checkpoint(TARGET)
    view = checkpoint.data("output_norm.weight")
    assert view.dtype == np.uint8
    assert (view.ndim, view.flags.writeable, view.flags.owndata) == (1, False, False)
    kept = view.view("<f4").copy()
    checkpoint.close()
    np.testing.assert_array_equal(view.view("<f4"), kept)  # a view outlives the checkpoint
    with pytest.raises(ValueError, match="closed"):
        checkpoint.data("output_norm.weight")


def test_every_kind_of_value_and_format(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    tensors = [
        ("a", (3, 64), Q8_0, bytes(range(204))), ("b", (2, 256), Q6_K, bytes(420)),
        ("c", (5,), F32, bytes(20)), ("d", (2, 3, 4), F16, bytes(48)), ("e", (), BF16, b"\x80\x3f"),
    ]  # fmt: skip
    metadata = {
        "t.u8": ("u8", 7), "t.i32": ("i32", -7), "t.f32": ("f32", 0.5), "t.yes": ("bool", True),
        "t.big": ("u64", 2**40), "t.names": ("str", ["x", "é"]), "t.list": ("f32", [1.0, 2.5]),
        "tokenizer.ggml.tokens": ("str", ["", "ab", "▁"]), "tokenizer.n": ("i32", [1, 2]),
    }  # fmt: skip
    path.write_bytes(gguf(metadata, tensors))
    checkpoint = open_checkpoint(path)
    values = checkpoint.metadata
    assert [values[k] for k in ("t.u8", "t.i32", "t.f32", "t.yes", "t.big")] == [
        7, -7, 0.5, True, 2**40,
    ]  # fmt: skip
    assert values["t.names"] == ["x", "é"]
    assert values["t.list"] == [1.0, 2.5]
    tokens = values["tokenizer.ggml.tokens"]
    assert list(tokens) == ["", "ab", "▁"]  # type: ignore[call-overload]
    assert (tokens[1], tokens[-1], tokens[:2]) == ("ab", "▁", ["", "ab"])  # type: ignore[index]
    assert isinstance(values["tokenizer.n"], np.ndarray)
    infos = {i.name: (i.shape, i.format, i.nbytes) for i in checkpoint.tensors.values()}
    assert infos == {
        "a": ((3, 64), "q8_0", 204), "b": ((2, 256), "q6_k", 420), "c": ((5,), "f32", 20),
        "d": ((2, 3, 4), "f16", 48), "e": ((), "bf16", 2),
    }  # fmt: skip
    assert checkpoint.data("a").tobytes() == bytes(range(204))
    assert checkpoint.data("e").tobytes() == b"\x80\x3f"


def test_unknown_type_is_listed_and_only_wanting_it_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(gguf({}, [("a", (4,), 999, bytes(8)), ("b", (4,), F32, bytes(16))]))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["a"].format == "ggml_type_999"
    assert checkpoint.data("b").size == 16
    with pytest.raises(MemraError, match="stored as `ggml_type_999`"):
        checkpoint.data("a")


def test_missing_tensor_is_named_with_near_miss_and_writer() -> None:
    with open_checkpoint(TARGET) as checkpoint, pytest.raises(MemraError) as caught:
        checkpoint.data("blk.0.attn_qq.weight")
    assert "did you mean `blk.0.attn_q.weight`" in str(caught.value)
    assert "written by: name 'Gemma4 Tiny'" in str(caught.value)


def test_digest_tells_files_apart_and_is_stable(tmp_path: Path) -> None:
    raw = TARGET.read_bytes()
    digests = {open_checkpoint(TARGET).digest, open_checkpoint(str(TARGET)).digest}
    assert len(digests) == 1
    (tmp_path / "copy.gguf").write_bytes(raw)
    assert open_checkpoint(tmp_path / "copy.gguf").digest in digests
    other = bytearray(raw)
    start = raw.index(b"GGUF") + 157056  # the first tensor: same header, other weights
    other[start] ^= 1
    (tmp_path / "other.gguf").write_bytes(other)
    assert open_checkpoint(tmp_path / "other.gguf").digest not in digests


def test_version_two_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.gguf"
    path.write_bytes(gguf({}, [("a", (4,), F32, bytes(16))], version=2))
    assert open_checkpoint(path).tensors["a"].nbytes == 16


def test_folder_with_one_file(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma4_assistant", "backbone_hidden_size": 256, "eos_token_id": [1, 106],
        "architectures": ["X"],
        "text_config": {"model_type": "gemma4_text", "hidden_size": 128, "eos_token_id": 1,
                        "architectures": None, "hidden_activation": "gelu"},
    }  # fmt: skip
    raw = {"w": ("BF16", (2, 3), bytes(range(12))), "s": ("F32", (), b"\0\0\x80\x3f")}
    checkpoint = open_checkpoint(
        folder(tmp_path / "m", {"config.json": config, "model.safetensors": safetensors(raw)})
    )
    assert (checkpoint.kind, checkpoint.arch) == ("safetensors", "gemma4-assistant")
    metadata = checkpoint.metadata
    assert metadata["model_type"] == "gemma4_assistant"
    assert (metadata["hidden_size"], metadata["backbone_hidden_size"]) == (128, 256)
    assert (metadata["eos_token_id"], metadata["architectures"]) == ([1, 106], ["X"])
    assert checkpoint.tensors["w"] == TensorInfo("w", (2, 3), "bf16", 12)
    assert checkpoint.data("w").tobytes() == bytes(range(12))
    assert checkpoint.data("s").view("<f4") == 1.0


@pytest.mark.parametrize("raw", ["gemma4", "gemma4_text", "gemma4_unified_text"])
def test_text_models_have_one_arch(tmp_path: Path, raw: str) -> None:
    files: dict[str, bytes | dict[str, object]] = {
        "config.json": {"model_type": raw}, "model.safetensors": safetensors({}),
    }  # fmt: skip
    checkpoint = open_checkpoint(folder(tmp_path / "m", files))
    assert (checkpoint.arch, checkpoint.metadata["model_type"]) == ("gemma4", raw)


def test_folder_with_shards(tmp_path: Path) -> None:
    one = safetensors({"a": ("F32", (1,), bytes(4)), "b": ("F32", (1,), b"\0\0\0\0")})
    two = safetensors({"b": ("F32", (1,), b"\0\0\x80\x3f")})
    index: dict[str, object] = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    path = folder(
        tmp_path / "m",
        {"config.json": {"model_type": "toy"}, "one.safetensors": one, "two.safetensors": two,
         "model.safetensors.index.json": index},
    )  # fmt: skip
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.data("b").view("<f4") == 1.0  # the index decides which `b` counts


def test_import_is_light() -> None:
    heavy = {"torch", "tokenizers", "tvm", "gguf", "safetensors", "jinja2"}
    code = f"import sys, memra_runtime.checkpoint; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.alone
def test_header_of_a_full_vocabulary_opens_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    tokens = [f"token{i}" for i in range(262_144)]
    merges = [f"tok en{i}" for i in range(515_000)]
    path.write_bytes(
        gguf({
            "tokenizer.ggml.tokens": ("str", tokens), "tokenizer.ggml.merges": ("str", merges),
            "tokenizer.ggml.scores": ("f32", [0.0] * len(tokens)),
        })
    )  # fmt: skip
    best = min(_seconds(path) for _ in range(3))
    assert best < 1.0


def _seconds(path: Path) -> float:
    start = time.perf_counter()
    open_checkpoint(path).close()
    return time.perf_counter() - start


def test_hugging_face_folder_agrees_with_the_gguf_file() -> None:
    folder = Path(__file__).parents[1] / "data" / "gemma4-tiny"
    with open_checkpoint(folder) as hf, open_checkpoint(TARGET) as file:
        assert hf.arch == file.arch
        embed = hf.tensors["model.embed_tokens.weight"]
        assert (embed.shape, embed.format) == (file.tensors["token_embd.weight"].shape, "bf16")
        norm = hf.data("model.norm.weight").view("<u2").astype("<u4") << 16
        np.testing.assert_array_equal(norm.view("<f4"), file.data("output_norm.weight").view("<f4"))

"""Files of the variants: GGUF in both spellings, tensors that are not read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import variant_gguf
from variant_models import PROMPT, VARIANTS
from variant_support import (
    SPECS,
    check_first_round,
    check_greedy,
    check_rows,
    check_speculative_text,
    read_golden,
    write_files,
)

from memra_compiler.compile import CompileOptions, compile_spec, load
from memra_runtime.device import Device
from memra_runtime.errors import MemraError

#: What a GGUF file does not say.
NOT_IN_GGUF = {
    f"{section}.layer_kinds.{kind}.mixer.{mixer}.rope.fraction": "0.25"
    for section, kind, mixer in (
        ("target", "full", "attention"),
        ("target", "full_shared", "query_attention"),
        ("drafter", "full", "query_attention"),
    )
}


def build(
    name: str, target: Path, draft: Path, folder: Path, cache: Path, **overrides: str
) -> Device:
    options = CompileOptions("cpu", target, draft, NOT_IN_GGUF | overrides, cache)
    compiled = compile_spec(SPECS / f"{name}.yaml", folder / "v.cpu.memra", options)
    return variant_gguf.load(compiled.folder, target, draft, write_files(name, folder).target)


@pytest.mark.parametrize(("name", "older"), [("e4b", False), ("e2b", True)])
def test_gguf_files_equal_transformers(
    name: str, older: bool, tmp_path: Path, kernel_cache: Path
) -> None:
    """Both spellings; the target's file repeats keys of a layer that reads another's.

    Only the older keys say how many clusters are active: then the spec can leave all to the file.
    """
    variant, golden = VARIANTS[name], read_golden(name)
    unread = {f"model.layers.8.self_attn.{part}.weight": np.ones(size, np.float32)
              for part, size in (("k_proj", (64, 64)), ("k_norm", (64,)))}  # fmt: skip
    target = variant_gguf.write_target(variant, tmp_path / "target.gguf", **unread)
    draft = variant_gguf.write_draft(variant, tmp_path / "draft.gguf", older=older)
    overrides = {} if older else {"drafter.head.centroids.active": "4"}
    device = build(name, target, draft, tmp_path, kernel_cache, **overrides)
    check_rows(device, golden, 6)
    check_greedy(device, golden)
    check_first_round(device, golden, "centroid_")


def test_quantised_files_keep_the_text(tmp_path: Path, kernel_cache: Path) -> None:
    variant = VARIANTS["e2b"]
    target = variant_gguf.write_target(variant, tmp_path / "target.gguf", "q8_0")
    draft = variant_gguf.write_draft(variant, tmp_path / "draft.gguf", "q8_0", older=True)
    overrides = {"runtime.activations": "int8", "runtime.kv": "f16"}
    device = build("e2b", target, draft, tmp_path, kernel_cache, **overrides)
    check_speculative_text(device, variant.prompt()[:PROMPT], (2, 5))


def test_token_ids_must_be_whole_numbers(tmp_path: Path, kernel_cache: Path) -> None:
    variant = VARIANTS["e4b"]
    target = variant_gguf.write_target(variant, tmp_path / "target.gguf")
    order = variant.draft_tensors()["masked_embedding.token_ordering"].reshape(-1)
    wrong = {"masked_embedding.token_ordering": order.astype(np.float32)}
    draft = variant_gguf.write_draft(variant, tmp_path / "draft.gguf", **wrong)
    with pytest.raises(MemraError, match="lists token ids and is stored as f32") as error:
        build(
            "e4b", target, draft, tmp_path, kernel_cache, **{"drafter.head.centroids.active": "4"}
        )
    assert "draft.gguf" in str(error.value)


def refusal(name: str, tmp_path: Path, **overrides: str) -> str:
    files = write_files(name, tmp_path)
    spec = {"e4b": "e4b", "31b": "31b"}[overrides.pop("spec", name)]
    options = CompileOptions("cpu", files.target, files.draft, overrides)
    with pytest.raises(MemraError) as raised:
        load(SPECS / f"{spec}.yaml", options)
    return str(raised.value)


def test_spec_and_file_must_agree_on_per_layer_embeddings(tmp_path: Path) -> None:
    text = refusal("e4b", tmp_path / "a", spec="31b")
    assert "this checkpoint has per-layer embeddings 32 wide, the spec has none" in text
    assert "layer 6 is" in refusal_of_written_layers(tmp_path / "b")
    text = refusal("31b", tmp_path / "c", spec="e4b")
    assert "the spec has per-layer embeddings, this checkpoint has none" in text


def refusal_of_written_layers(tmp_path: Path) -> str:
    """A spec that gives layer 6 keys of its own."""
    order = "[swa, swa, full, swa, swa, full, swa, swa_shared, full_shared]"
    return refusal("e4b", tmp_path, **{"target.layers": order})

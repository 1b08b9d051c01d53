"""Every variant of gemma4 against transformers, in float32 on its bf16 weights, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from variant_models import DRAFTS, PROMPT, VARIANTS
from variant_support import (
    HEADS,
    RUNNING,
    Files,
    Golden,
    check_first_round,
    check_greedy,
    check_rows,
    check_speculative_text,
    compile_variant,
    load_variant,
    read_golden,
    write_files,
)

from memra_runtime.bench.costs import cost, program
from memra_runtime.device import Device


@pytest.fixture(scope="module", params=RUNNING)
def golden(request: pytest.FixtureRequest) -> Golden:
    return read_golden(request.param)


@pytest.fixture(scope="module")
def files(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(golden.variant.name, tmp_path_factory.mktemp(golden.variant.name))


@pytest.fixture(scope="module")
def device(
    golden: Golden, files: Files, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> Device:
    folder = tmp_path_factory.mktemp("variant") / "v.cpu.memra"
    return load_variant(compile_variant(golden.variant.name, files, folder, kernel_cache), files)


@pytest.mark.parametrize("width", [1, 6])
def test_rows_equal_transformers(device: Device, golden: Golden, width: int) -> None:
    check_rows(device, golden, width)


def test_greedy_text_equals_transformers(device: Device, golden: Golden) -> None:
    check_greedy(device, golden)


def test_first_drafts_equal_transformers(device: Device, golden: Golden) -> None:
    check_first_round(device, golden, HEADS.get(golden.variant.name, ""))


def test_costs_count_only_the_layers_that_a_program_runs(device: Device) -> None:
    """A prompt stops at the last layer that fills a cache, which leaves out a sharing tail."""
    manifest = device.manifest
    for name in ("prefill", "plain_step", "draft"):
        full = program(manifest, name)
        assert 0 < cost(manifest, name, full.rows, 1).flops < full.flops
        assert 0 < cost(manifest, name, full.rows, 1).bytes < full.bytes


def test_full_head_may_be_chosen_for_a_file_that_has_clusters(
    tmp_path: Path, kernel_cache: Path
) -> None:
    golden, files = read_golden("e4b"), write_files("e4b", tmp_path)
    overrides = {"drafter.head.centroids": "null"}
    folder = compile_variant("e4b", files, tmp_path / "v.cpu.memra", kernel_cache, overrides)
    check_first_round(load_variant(folder, files), golden)


def test_speculative_text_is_the_plain_text(device: Device, golden: Golden) -> None:
    check_speculative_text(device, golden.ids[:PROMPT], range(1, DRAFTS + 1))


def test_suppressed_tokens_would_have_won() -> None:
    """The 12B golden shows suppression only if the argmax alone is one of the listed tokens."""
    golden = read_golden("12b")
    best = golden.arrays["logits"][PROMPT - 1 : -1].argmax(axis=1)
    assert np.isin(best, VARIANTS["12b"].suppress).any()
    assert best.tolist() != golden.greedy


@pytest.mark.parametrize("name", ["e4b"])
@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_other_numeric_classes_keep_the_text(
    activations: str, name: str, tmp_path: Path, kernel_cache: Path
) -> None:
    """Of variants whose layers the bundled pair does not have."""
    overrides = {"runtime.activations": activations, "runtime.kv": "q8_0"}
    files, golden = write_files(name, tmp_path), read_golden(name)
    folder = compile_variant(name, files, tmp_path / "v.cpu.memra", kernel_cache, overrides)
    check_speculative_text(load_variant(folder, files), golden.ids[:PROMPT], (1, DRAFTS))

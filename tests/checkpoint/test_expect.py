"""Contradictions between a spec and the metadata of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from weight_files import DRAFT, TARGET, folder, safetensors

from memra_runtime.checkpoint import Expectation, check_arch, check_metadata, open_checkpoint
from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.checkpoint.expect import compare
from memra_runtime.errors import MemraError, Position


@pytest.fixture
def target() -> Iterator[Checkpoint]:
    with open_checkpoint(TARGET) as checkpoint:
        yield checkpoint


def refused(checkpoint: Checkpoint, *expected: Expectation) -> str:
    with pytest.raises(MemraError) as caught:
        check_metadata(checkpoint, expected)
    return str(caught.value)


def test_agreement_is_silent(target: Checkpoint) -> None:
    check_metadata(
        target,
        [
            Expectation(("gemma4.embedding_length", "hidden_size"), 256, "target.width"),
            Expectation(("gemma4.attention.layer_norm_rms_epsilon",), 1e-6, "target.eps"),
            Expectation(("gemma4.rope.freq_base",), 1_000_000, "rope.base"),
            Expectation(("gemma4.attention.head_count",), [4] * 6, "heads"),
            Expectation(("gemma4.attention.head_count_kv",), [2, 2, 2, 2, 2, 1], "kv_heads"),
            Expectation(("no.such.key",), 1, "absent"),
        ],
    )


def test_contradictions_are_collected(target: Checkpoint) -> None:
    message = refused(
        target,
        Expectation(("hidden_size", "gemma4.embedding_length"), 512, "target.width"),
        Expectation(
            ("gemma4.attention.head_count_kv",), 2, "kv", position=Position("s.yaml", 3, 7)
        ),
        Expectation(("gemma4.attention.sliding_window_pattern",), [True] * 4, "target.layers"),
        Expectation(("gemma4.rope.freq_base",), 10_000.0, "rope.base"),
        Expectation(("gemma4.nothing", "nothing"), 3, "depth", required=True),
    )
    for expected in (
        "`target.width` contradicts the weights: wanted 512, the file has 256",
        "note: `gemma4.embedding_length` in ",
        "`kv` contradicts the weights: entry 5: wanted 2, the file has 1\n  --> s.yaml:3:7",
        "`target.layers` contradicts the weights: wanted 4 entries, the file has 6",
        "wanted 10000.0, the file has 1000000.0",
        "does not say `gemma4.nothing` or `nothing`, which `depth` must be checked against",
    ):
        assert expected in message


def test_nested_keys_of_a_folder(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "model_type": "gemma4_text",
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
        "num_experts": None,
    }
    files: dict[str, bytes | dict[str, object]] = {
        "config.json": config, "model.safetensors": safetensors({}),
    }  # fmt: skip
    checkpoint = open_checkpoint(folder(tmp_path / "m", files))
    key = "rope_parameters.full_attention.rope_theta"
    check_metadata(checkpoint, [Expectation((key,), 1e6, "base"),
                                Expectation(("num_experts",), 8, "experts")])  # fmt: skip
    assert "wanted 2, the file has 1000000.0" in refused(checkpoint, Expectation((key,), 2, "base"))


def test_swapped_files_are_recognised(target: Checkpoint) -> None:
    check_arch(target, "gemma4", "target.arch")
    with open_checkpoint(DRAFT) as draft:
        check_arch(draft, "gemma4_assistant", "drafter.arch")
        with pytest.raises(MemraError) as caught:
            check_arch(draft, "gemma4", "target.arch", other=target)
    message = str(caught.value)
    assert "`target.arch` wants a `gemma4` model" in message
    assert f"`{DRAFT.name}` is `gemma4-assistant`" in message
    assert f"the two files seem swapped: `{TARGET.name}` is a `gemma4` model" in message


def test_wrong_arch_alone_suggests_no_swap(target: Checkpoint) -> None:
    with pytest.raises(MemraError) as caught:
        check_arch(target, "qwen35", "target.arch")
    assert "swapped" not in str(caught.value)


@pytest.mark.parametrize(
    ("expected", "actual", "difference"),
    [
        (1, 1.0, None), (1e-6, float(np.float32(1e-6)), None), (1.0, 1.0001, "wanted 1.0"),
        (True, 1, None), (True, 0, "wanted True"), ("a", "a", None), ("1", 1, "wanted '1'"),
        ([1, 2], np.array([1, 2]), None), ([1, 3], np.array([1, 2]), "entry 1: wanted 3"),
        (["x"], ["y"], "entry 0: wanted 'x'"), (float("nan"), 1.0, "wanted nan"),
    ],
)  # fmt: skip
def test_values_compare_by_value(expected: object, actual: object, difference: str | None) -> None:
    result = compare(expected, actual)
    assert (result is None) == (difference is None)
    assert result is None or result.startswith(difference or "")

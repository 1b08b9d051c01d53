"""memra-bench --synthetic: made-up weights that kernels cannot tell from a file's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_tools import call

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.formats import WEIGHT_FORMATS, dequantise
from memra_runtime.artifact import WeightEntry
from memra_runtime.bench.synthetic import synthetic_device, synthetic_weights
from memra_runtime.session import Session


def test_made_up_weights_are_those_an_artifact_wants(tiny_artifact: Path) -> None:
    """Every format and size; finite logits, and drafts that cannot be right."""
    device = synthetic_device(tiny_artifact)
    session = Session(device)
    session.prime([2, 5, 7], 12)
    assert len(list(session.generate(12))) == 12
    assert np.isfinite(device.value("verify", "target.logits")[0]).all()
    assert session.stats.accepted <= session.stats.drafted / 4


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_made_up_blocks_are_small_and_random(format: str) -> None:
    type = TensorType((64, 512), format)
    entry = WeightEntry("w", "target", ("w",), type.max_shape, format, type.nbytes)
    (data,) = synthetic_weights([entry])
    values = dequantise(data, type)
    assert 0.005 < values.std() < 0.1
    assert len(np.unique(values[0])) > 10


def test_synthetic_needs_no_files(tiny_artifact: Path) -> None:
    ended = call("memra-bench", tiny_artifact, "--synthetic", "--repeat", "2", "--max-new", "8",
                 "--json")  # fmt: skip
    assert ended.code == 0, ended.err
    assert "the weights are made up; only speed is measured" in ended.err
    assert json.loads(ended.out)["programs"]


@pytest.mark.parametrize("option", ["--weights", "--draft", "--prompt"])
def test_synthetic_ignores_nothing(tiny_artifact: Path, option: str) -> None:
    ended = call("memra-bench", tiny_artifact, "--synthetic", option, "x")
    assert ended.code == 2
    assert f"`--synthetic` makes its own weights and has no tokenizer: `{option}`" in ended.err

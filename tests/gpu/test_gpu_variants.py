"""Every variant of gemma4 on a GPU: transformers in float32, and plain text at every depth."""

from __future__ import annotations

from pathlib import Path

import pytest
from variant_bundle import RUNS, Run
from variant_models import DRAFTS, PROMPT
from variant_support import (
    HEADS,
    check_first_round,
    check_greedy,
    check_rows,
    check_speculative_text,
    load_variant,
    read_golden,
)

from memra_runtime.device import Device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("bundle")]
EXACT = [run for run in RUNS if run.activations == "f32"]


def load(run: Run, folder: Path) -> Device:
    return load_variant(run.artifact, run.files(folder))


@pytest.mark.parametrize("run", EXACT, ids=lambda run: run.id)
def test_rows_text_and_drafts_equal_transformers(run: Run, tmp_path: Path) -> None:
    device, golden = load(run, tmp_path), read_golden(run.name)
    for width in (1, 6):
        check_rows(device, golden, width)
    check_greedy(device, golden)
    check_first_round(device, golden, HEADS.get(run.name, ""))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_speculative_text_is_the_plain_text(run: Run, tmp_path: Path) -> None:
    device, golden = load(run, tmp_path), read_golden(run.name)
    check_speculative_text(device, golden.ids[:PROMPT], range(1, DRAFTS + 1))

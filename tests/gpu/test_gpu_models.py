"""Tiny models of other architectures than the bundled pair's, on a GPU, against transformers."""

from __future__ import annotations

from functools import cache

import pytest
from pair_bundle import CLASSES, MODELS, model_artifact
from variant_models import DRAFTS, PROMPT
from variant_support import (
    Files,
    check_first_round,
    check_greedy,
    check_rows,
    check_speculative_text,
    read_golden,
    write_files,
)

from memra_runtime.device import Device
from memra_runtime.model import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("bundle")]


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(name: str, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(name, tmp_path_factory.mktemp(name))


@cache
def load(name: str, activations: str, files: Files) -> Device:
    """A model of the bundle, loaded once a run."""
    return load_model(model_artifact(name, activations), files.target, files.draft).device


@pytest.mark.parametrize("width", [1, 6])
def test_rows_equal_transformers(name: str, files: Files, width: int) -> None:
    check_rows(load(name, "f32", files), read_golden(name), width)


def test_greedy_text_equals_transformers(name: str, files: Files) -> None:
    check_greedy(load(name, "f32", files), read_golden(name))


def test_first_drafts_equal_transformers(name: str, files: Files) -> None:
    check_first_round(load(name, "f32", files), read_golden(name))


@pytest.mark.parametrize("activations", CLASSES)
def test_speculative_text_is_the_plain_text(name: str, files: Files, activations: str) -> None:
    prompt = read_golden(name).ids[:PROMPT]
    check_speculative_text(load(name, activations, files), prompt, range(1, DRAFTS + 1))

"""An artifact that is compiled anew where it lies is the one that is loaded next."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.model import load_model
from memra_runtime.session import Session

TINY = Path(__file__).parents[2] / "model_specs" / "tiny"
FILES = (TINY / "gemma4-tiny-q8_0.gguf", TINY / "gemma4-tiny-assistant-q8_0.gguf")


def logits(folder: Path, kernel_cache: Path, **overrides: str) -> np.ndarray:
    options = CompileOptions(cache=kernel_cache, overrides=overrides)
    compile_spec(TINY / "gemma4_tiny.yaml", folder, options)
    model = load_model(folder, *FILES)
    Session(model.device).prime(list(range(2, 30)))
    rows: np.ndarray = model.device.value("plain_step", "target.logits")[0].copy()
    return rows


def test_recompiled_artifact_is_not_mistaken_for_the_old_one(
    tmp_path: Path, kernel_cache: Path
) -> None:
    int8 = {"runtime.activations": "int8", "runtime.kv": "f16"}
    first = logits(tmp_path / "a.memra", kernel_cache)
    second = logits(tmp_path / "a.memra", kernel_cache, **int8)
    elsewhere = logits(tmp_path / "b.memra", kernel_cache, **int8)
    assert second.tobytes() == elsewhere.tobytes() != first.tobytes()

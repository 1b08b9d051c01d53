"""The pair with a short context, compiled and loaded once a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_context import CONTEXT, DEPTH, Plain

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.model import Model, load_model
from tiny_pair import TINY_DRAFT, TINY_SPEC, TINY_TARGET


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Model:
    """Sessions on it begin with `prime` or `restore`, so tests may share it."""
    folder = tmp_path_factory.mktemp("short") / "tiny.cpu.memra"
    overrides = {"runtime.max_context": str(CONTEXT), "round.depth.max": str(DEPTH)}
    compile_spec(TINY_SPEC, folder, CompileOptions(overrides=overrides, cache=kernel_cache))
    return load_model(folder, TINY_TARGET, TINY_DRAFT)


@pytest.fixture(scope="session")
def oracle(model: Model) -> Plain:
    """Plain decoding on a device of its own."""
    return Plain(model)

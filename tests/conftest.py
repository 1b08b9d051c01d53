"""Shared fixtures: the bundled pair, compiled once a test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.model import Model, load_model
from tiny_pair import ROOT, TINY_DRAFT, TINY_SPEC, TINY_TARGET


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden texts")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/NAME`; `--update-golden` writes it instead."""

    def check(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text

    return check


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel cache of this test run, so that no test depends on what ran before."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """The bundled spec, compiled for the CPU. Tests must not write into it."""
    folder = tmp_path_factory.mktemp("artifact") / "tiny.cpu.memra"
    return compile_spec(TINY_SPEC, folder, CompileOptions(cache=kernel_cache)).folder


@pytest.fixture(scope="session")
def tiny_model(tiny_artifact: Path) -> Model:
    """The bundled pair, loaded. Sessions on it start with `prime`, so tests may share it."""
    return load_model(tiny_artifact, TINY_TARGET, TINY_DRAFT)


@pytest.fixture(scope="session")
def poor_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranks file that knows little of what is ever said: 256 tokens at random."""
    path = tmp_path_factory.mktemp("ranks") / "poor.txt"
    ids = np.random.default_rng(1).permutation(4096)[:256]
    path.write_text("# 256 of 4096, at random\n" + "".join(f"{i}\n" for i in ids))
    return path


@pytest.fixture(scope="session")
def trimmed_artifact(
    tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path, poor_ranks: Path
) -> Path:
    """The bundled pair with a head that is trimmed badly. Tests must not write into it."""
    folder = tmp_path_factory.mktemp("trimmed") / "tiny.cpu.memra"
    trim = f"{{ranks: {poor_ranks}, spare: 200}}"
    options = CompileOptions(overrides={"drafter.head.trim": trim}, cache=kernel_cache)
    return compile_spec(TINY_SPEC, folder, options).folder


@pytest.fixture(scope="session")
def kv8_model(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Model:
    """The bundled pair with keys and values in q8_0, shared as `tiny_model` is."""
    folder = tmp_path_factory.mktemp("kv8") / "tiny.cpu.memra"
    options = CompileOptions(overrides={"runtime.kv": "q8_0"}, cache=kernel_cache)
    return load_model(compile_spec(TINY_SPEC, folder, options).folder, TINY_TARGET, TINY_DRAFT)

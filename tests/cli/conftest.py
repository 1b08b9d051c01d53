"""A GPU made of host memory, and the pair compiled for it once a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memra_runtime.artifact import load_manifest


@pytest.fixture(scope="session")
def cuda_artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    from cuda_host import compile_for_cuda

    return compile_for_cuda(tmp_path_factory.mktemp("host") / "tiny.memra", kernel_cache)


@pytest.fixture(scope="session")
def cuda_module() -> Any:
    from cuda_host import cuda_ir

    return cuda_ir()


@pytest.fixture
def gpu(cuda_artifact: Path, cuda_module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fake driver in place of the real one; whatever a test allocates must be freed."""
    from fake_cuda import FakeDriver

    from memra_runtime.device import cuda_driver

    fake = FakeDriver(cuda_module, load_manifest(cuda_artifact))
    monkeypatch.setattr(cuda_driver, "driver", fake)
    yield fake
    gc.collect()  # what is freed is freed here, not by the real driver
    assert fake.held_bytes == 0

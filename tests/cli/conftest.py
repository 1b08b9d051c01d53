"""A GPU made of host memory, and the pair compiled for it once a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cuda_artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    from cuda_host import compile_for_cuda

    return compile_for_cuda(tmp_path_factory.mktemp("host") / "tiny.memra", kernel_cache)


@pytest.fixture(scope="session")
def cuda_module() -> Any:
    from cuda_host import cuda_ir

    return cuda_ir()


@pytest.fixture
def gpu(cuda_artifact: Path, cuda_module: Any) -> Iterator[Any]:
    from fake_cuda import in_place

    with in_place(cuda_module, cuda_artifact) as fake:
        yield fake

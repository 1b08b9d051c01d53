"""Fixtures of the GPU tests: the GPU, and what the run saw."""

from __future__ import annotations

import pytest
from gpu_driver import ARCH, Gpu
from worst_errors import table


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The first GPU; its kernels are compiled once a run. Skips where there is none."""
    try:
        return Gpu()
    except RuntimeError as error:  # no driver, or no device
        pytest.skip(f"no GPU: {str(error).splitlines()[0]}")


@pytest.fixture(scope="module")
def compiled(gpu: Gpu, request: pytest.FixtureRequest) -> None:
    """The kernels of all chosen tests of a module, compiled on all cores before the first.

    A parameter `case` names them: `named()` gives its launches.
    """
    specs = [getattr(i, "callspec", None) for i in request.session.items if i.path == request.path]
    cases = [spec.params["case"] for spec in specs if spec and "case" in spec.params]
    gpu.prepare([named for case in cases for named in case.named()], ARCH)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = table()
    if lines:
        terminalreporter.section("worst errors on the GPU")
        terminalreporter.write("\n".join(lines) + "\n")

"""Fixtures of the GPU tests: the GPU, and what the run saw."""

from __future__ import annotations

import pytest
from gpu_driver import Gpu
from worst_errors import table


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The first GPU; its kernels are compiled once a run. Skips where there is none."""
    try:
        return Gpu()
    except RuntimeError as error:  # no driver, or no device
        pytest.skip(f"no GPU: {str(error).splitlines()[0]}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = table()
    if lines:
        terminalreporter.section("worst errors on the GPU")
        terminalreporter.write("\n".join(lines) + "\n")

"""Fixtures of the GPU tests: the GPU, and what the run saw."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_support import compile_pair, fixed_session, load_pair, read_cases
from gpu_driver import ARCH, Gpu
from pair_bundle import MAIN, Loaded, load, problem
from pair_truth import measure
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


@pytest.fixture(scope="session")
def bundle(gpu: Gpu) -> None:
    """The compiled pair for this GPU. Fails where it was forgotten or is old."""
    why = problem(ARCH.name)
    if why:
        pytest.fail(why, pytrace=False)


@pytest.fixture(scope="session")
def cpu_pair(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Loaded:
    """The pair on the CPU, so that the same tests run without a GPU; the truth is its own."""
    variant = MAIN[0]
    folder = tmp_path_factory.mktemp("pair") / "pair.cpu.memra"
    model = load_pair(
        variant.pair, compile_pair(variant.pair, folder, kernel_cache, variant.overrides)
    )
    prompts = [case.ids for case in read_cases()]
    return Loaded(variant, model, measure(fixed_session(model.device, 0), None, prompts))


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Loaded:
    """The pair on the device that the parameter names (`on_devices`)."""
    if request.param == "cpu":
        found: Loaded = request.getfixturevalue("cpu_pair")
        return found
    request.getfixturevalue("bundle")
    return load(request.param)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The worst errors, in a run that asked for the GPU."""
    lines = table()
    if lines and "gpu" in config.option.markexpr:
        terminalreporter.section("what the device tests saw")
        terminalreporter.write("\n".join(lines) + "\n")

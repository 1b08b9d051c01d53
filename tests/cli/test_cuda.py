"""The commands on a CUDA artifact, on a machine that has no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_tools import SPEC, WEIGHTS, Ended, call

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from cuda.bindings import driver


def compiled(folder: Path, cache: Path, *more: str) -> Ended:
    return call("memra-compile", SPEC, "--target", "cuda:sm_90a", "-o", folder, "--cache", cache,
                *more)  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("cuda") / "tiny.memra"
    ended = compiled(folder, kernel_cache)
    assert ended.code == 0, ended.err
    assert "memra.cuda" not in ended.err
    assert "\ntarget   cuda:sm_90a\n" in ended.err
    return folder


def test_activations_that_no_fast_kernel_reads_are_told(tmp_path: Path, kernel_cache: Path) -> None:
    ended = compiled(tmp_path / "a", kernel_cache, "--set", "runtime.activations=f32")
    assert ended.code == 0
    assert "65 quantised or 16-bit weights meet f32 activations" in ended.err
    assert "--set runtime.activations=auto" in ended.err


@pytest.mark.parametrize("part", [(), ("--plan",), ("--weights-list",)])
def test_inspect_shows_the_artifact(artifact: Path, part: tuple[str, ...]) -> None:
    ended = call("memra-inspect", artifact, *part)
    assert (ended.code, ended.err) == (0, ""), ended.err
    assert ended.out


def test_run_without_a_driver_says_so(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("libcuda.so.1")

    monkeypatch.setattr(driver, "cuInit", missing)
    ended = call("memra-run", artifact, *WEIGHTS, "--prompt", "import")
    assert ended.code == 2
    assert "error[no-gpu]: no usable NVIDIA GPU: the NVIDIA driver is not installed" in ended.err
    assert "--target cpu" in ended.err

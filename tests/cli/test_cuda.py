"""The commands on a CUDA artifact, on a machine that has no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_tools import SPEC, WEIGHTS, Ended, call

from memra_runtime.artifact import load_manifest
from memra_runtime.cli import loading
from memra_runtime.cli.app import teller

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from cuda.bindings import driver

from memra_runtime.device import cuda_driver

INT8 = ("--set", "runtime.activations=int8")


def compiled(folder: Path, cache: Path, *more: str) -> Ended:
    return call("memra-compile", SPEC, "--target", "cuda:sm_90a", "-o", folder, "--cache", cache,
                *more)  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("cuda") / "tiny.memra"
    ended = compiled(folder, kernel_cache, *INT8)
    assert ended.code == 0, ended.err
    assert "memra.cuda" not in ended.err
    assert "\ntarget   cuda:sm_90a\n" in ended.err
    return folder


def test_activations_that_no_fast_kernel_reads_are_told(tmp_path: Path, kernel_cache: Path) -> None:
    ended = compiled(tmp_path / "a", kernel_cache)
    assert ended.code == 0
    assert "65 quantised weights meet f32 activations" in ended.err
    assert "--set runtime.activations=int8" in ended.err


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


class SmallGpu:
    """A context that tells how much memory is free, and cannot be asked for more."""

    name = "NVIDIA Small"
    free = 8 << 20

    def free_memory(self) -> int:
        return self.free


def test_memory_of_the_gpu_is_told_and_refused_before_weights_are_read(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "Context", SmallGpu)
    ended = call("memra-run", artifact, *WEIGHTS, "--prompt", "import")
    manifest = load_manifest(artifact)
    largest = max(w.bytes for w in manifest.weights if w.format == "q8_0")
    assert manifest.staging_bytes == largest
    need = manifest.arena_bytes + manifest.weight_bytes + largest
    assert ended.code == 2
    assert re.search(
        rf"memory   arena \S+ MiB \+ weights \S+ MiB \+ \S+ MiB to repack them = "
        rf"{need / 2**20:.1f} MiB on NVIDIA Small \(8\.0 MiB free\)\n", ended.err
    ), ended.err  # fmt: skip
    assert re.search(
        rf"error\[memory\]: the model needs {need / 2**20:.1f} MiB \(arena \S+ MiB, weights "
        r"\S+ MiB, \S+ MiB to repack them\), 8\.0 MiB are free on NVIDIA Small\n", ended.err
    ), ended.err  # fmt: skip


def test_upload_is_one_line_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    upload = loading.Upload(teller(quiet=False), quiet=False)
    for done in (0, 1 << 30, 3 << 30):
        upload(done, 3 << 30)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"upload   3\.00 GiB, [\d.]+ GB/s  \d+\.\d s", line)


def test_long_upload_says_that_it_is_alive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(clock))
    upload = loading.Upload(teller(quiet=False), quiet=False)
    for done in (0, 1 << 30, 2 << 30, 3 << 30):
        upload(done, 3 << 30)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "upload   2.00 GiB of 3.00 GiB, 0.2 GB/s ...",
        "upload   3.00 GiB, 0.2 GB/s  18.0 s",
    ]


def test_upload_is_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    upload = loading.Upload(teller(quiet=False), quiet=False)
    upload(0, 100)
    assert upload._bar is not None
    upload(100, 100)
    assert upload._bar is None
    assert capsys.readouterr().err.count("upload") >= 1

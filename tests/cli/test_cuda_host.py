"""The host's half of the CUDA target, on a driver made of host memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from cli_tools import WEIGHTS, call
from cuda_host import TARGET
from fake_cuda import FakeDriver, next_token

from memra_runtime.artifact import load_manifest
from memra_runtime.device.cuda import CudaDevice
from memra_runtime.device.cuda_timing import GraphTimer
from memra_runtime.model import load_model
from memra_runtime.session import Session
from tiny_pair import TINY_DRAFT, TINY_TARGET


def loaded(cuda_artifact: Path) -> CudaDevice:
    """No fixture: pytest would hold it for longer than the fake driver is there."""
    found = load_model(cuda_artifact, TINY_TARGET, TINY_DRAFT).device
    assert isinstance(found, CudaDevice)
    return found


def text(prompt_end: int, count: int) -> list[int]:
    """What the fake target says after a token."""
    found = [next_token(prompt_end)]
    while len(found) < count:
        found.append(next_token(found[-1]))
    return found


#: A driver without nodes of several bodies: the host repeats the rounds of a burst.
OLD_DRIVER = 12040


@pytest.mark.parametrize("version", [OLD_DRIVER, 13000])
@pytest.mark.parametrize("sequence", ["round", "plain"])
def test_a_round_or_a_burst_is_one_launch_and_one_read(
    cuda_artifact: Path, gpu: FakeDriver, version: int, sequence: str
) -> None:
    gpu.version = version
    device = loaded(cuda_artifact)
    session = Session(device)
    session.prime([5, 6, 7], 100)
    before = device.launches, device.reads
    tokens = list(session.generate(100, sequence=sequence))
    assert tokens == text(7, 100)
    rounds = session.stats.rounds
    assert rounds > 2
    launches = rounds if version == OLD_DRIVER else 2  # bursts of 64 tokens
    assert (device.launches - before[0], device.reads - before[1]) == (launches, launches)


def test_planes_that_are_written_whole_are_not_read_first(
    cuda_artifact: Path, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = loaded(cuda_artifact)
    plane = device.plane("hidden")
    plane[...] = np.arange(256)
    assert plane[3] == 3
    plane[3] = 7
    assert plane.copy().tolist() == [0, 1, 2, 7, *range(4, 256)]
    with monkeypatch.context() as patch:
        patch.setattr(device, "download", None)
        plane[...] = np.zeros(256)


def test_parts_are_the_launches_of_the_whole(cuda_artifact: Path, gpu: FakeDriver) -> None:
    """The timer runs the same kernels in the same order, and times each program's share."""
    device = loaded(cuda_artifact)
    session, timer = Session(device), GraphTimer(device)
    session.policy = session.policy.fixed(3)
    seen = {}
    for how in ("whole", "parts"):
        session.prime([5, 6, 7])
        gpu.launched.clear()
        if how == "whole":
            device.launch("round")
        else:
            spent = timer.parts("round", 3)
        seen[how] = list(gpu.launched)
        assert device.get("position") == 4
        assert device.get("pending") == next_token(next_token(7))
    assert seen["parts"] == seen["whole"]
    launches = device.manifest.launches
    assert {name: len(times) for name, times in spent.items()} == {
        name: 3 if repeat else 1 for name, repeat in device.manifest.sequences["round"]
    }
    for name, times in spent.items():
        assert times == pytest.approx([1e-6 * len(launches[name])] * len(times))


def test_kernels_are_timed_alone(cuda_artifact: Path, gpu: FakeDriver) -> None:
    device = loaded(cuda_artifact)
    timer = GraphTimer(device)
    gpu.launched.clear()
    assert timer.kernels("verify", [3, 5, 8], 6) == pytest.approx(3e-6)
    before = (0, 1, 2)  # run, but not timed: the third may read what they leave
    symbols = [entry.symbol for entry in device.manifest.launches["verify"]]
    assert gpu.launched == [symbols[i] for i in (*before, 3, 5, 8)]
    assert timer.copy_gb_s() == pytest.approx(4000)


HOW = {OLD_DRIVER: " (one launch and one host read)",
       13000: ", repeated on the GPU (one launch a burst)"}  # fmt: skip


@pytest.mark.parametrize("version", HOW)
@pytest.mark.parametrize("more", [(), ("--plain",), ("--depth", "2")])
def test_run_says_how_rounds_ran(
    cuda_artifact: Path, gpu: FakeDriver, version: int, more: tuple[str, ...]
) -> None:
    gpu.version = version
    ended = call("memra-run", cuda_artifact, *WEIGHTS, "--ids", "5,6,7", "-n", "30", "--strict",
                 "--stats", "--json", *more)  # fmt: skip
    assert ended.code == 0, ended.err
    sequence = "plain" if more == ("--plain",) else "round"
    how = f"graph: {sequence}{HOW[version]}"
    assert f"rounds   {how}" in ended.err
    stats = json.loads(ended.out)["stats"]
    each = 1 if version == OLD_DRIVER else 1 / stats["rounds"]
    assert f"ran      {how}: {each:.2f} launches and {each:.2f} host reads a round, counted" \
        in ended.err  # fmt: skip
    assert re.search(r"memory   arena .* on NVIDIA Fake \(\S+ GiB free\)\n", ended.err)
    assert re.search(r"upload   \S+ MiB, \S+ GB/s  \d\.\d s\n", ended.err)
    assert "program by program: draft " in ended.err
    found = json.loads(ended.out)
    assert found["ids"] == text(7, 30)
    assert stats["launches"] == stats["host_reads"] == round(each * stats["rounds"]) > 0
    assert stats["peak_memory_bytes"] >= load_manifest(cuda_artifact).weight_bytes


def test_eager_says_so_and_gives_the_same_text(cuda_artifact: Path, gpu: FakeDriver) -> None:
    ended = call("memra-run", cuda_artifact, *WEIGHTS, "--ids", "5,6,7", "-n", "30", "--eager",
                 "--stats", "--json")  # fmt: skip
    assert ended.code == 0, ended.err
    assert "rounds   eager: kernel by kernel, graphs are off (--eager), depth " in ended.err
    assert "0.00 launches and 1.00 host reads a round, counted" in ended.err
    assert json.loads(ended.out)["ids"] == text(7, 30)


def test_bench_measures_a_cuda_artifact(
    cuda_artifact: Path, gpu: FakeDriver, tmp_path: Path
) -> None:
    ended = call("memra-bench", cuda_artifact, *WEIGHTS, "--target", TARGET, "--ids", "5,6,7",
                 "--repeat", "2", "--max-new", "8", "--context", "1500", "--json",
                 "--csv", tmp_path / "b.csv")  # fmt: skip
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["machine"] == "NVIDIA Fake"
    assert found["floor"]["memory_gb_s"] == pytest.approx(4000)
    assert found["per_round"] == {"launches_ratio": 1.0, "reads_ratio": 1.0}
    launches = load_manifest(cuda_artifact).launches
    for program in found["programs"]:
        if program["name"] != "prefill":  # timed as the host sees it
            assert program["time"]["median_ms"] == pytest.approx(
                1e-3 * len(launches[program["name"]])
            )
    assert [f["accepted_tokens"] for f in found["forced"]] == [0, 1, 2, 3, 4, 5]
    assert len(found["kernels"]) == sum(
        len({e.symbol for e in launches[name]})
        for name in ("plain_step", "verify", "draft", "prefill")
    )
    assert [c["context_tokens"] for c in found["contexts"]] == [1500] * 5
    assert (tmp_path / "b.csv").is_file()

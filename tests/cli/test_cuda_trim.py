"""A trimmed head on a driver made of host memory: what learning does to a GPU in use."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from cuda_host import OVERRIDES, TARGET
from fake_cuda import FakeDriver, next_token

from memra_compiler.compile import CompileOptions, compile_spec, load, lower
from memra_runtime.artifact import load_manifest
from memra_runtime.device import cuda_driver
from memra_runtime.device.cuda import CudaDevice
from memra_runtime.model import load_model
from memra_runtime.session import Session
from tiny_pair import TINY_DRAFT, TINY_SPEC, TINY_TARGET


def text(prompt_end: int, count: int) -> list[int]:
    """What the fake target says after a token."""
    found = [next_token(prompt_end)]
    while len(found) < count:
        found.append(next_token(found[-1]))
    return found


def test_a_trimmed_head_learns_between_launches(
    poor_ranks: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is allocated, no graph is captured anew, and learning reads nothing from the GPU."""
    overrides = OVERRIDES | {"drafter.head.trim": f"{{ranks: {poor_ranks}, spare: 100}}"}
    options = CompileOptions(target=TARGET, overrides=overrides, cache=kernel_cache)
    artifact = compile_spec(TINY_SPEC, tmp_path / "tiny.memra", options).folder
    spec, files = load(TINY_SPEC, options)
    fake = FakeDriver(lower(spec, files, target=TARGET), load_manifest(artifact))
    monkeypatch.setattr(cuda_driver, "driver", fake)
    model = load_model(artifact, TINY_TARGET, TINY_DRAFT)
    device, trim = model.device, model.trim
    assert isinstance(device, CudaDevice)
    assert trim is not None
    for turn in range(2):  # the second time, all is captured and nothing is new
        session = Session(device, trim=trim)
        held, used, before = fake.held_bytes, trim.used, (device.launches, device.reads)
        fake.launched.clear()
        session.prime([5, 6, 7], 100)
        with monkeypatch.context() as patch:
            patch.setattr(cuda_driver.Memory, "read", None)  # all that is learned from is mirrored
            assert list(session.generate(100)) == text(7, 100)
        launches, reads = device.launches - before[0], device.reads - before[1]
        assert reads == launches + 1, "the prompt was read with no graph"
        assert fake.held_bytes == held
        assert (trim.used > used) == (turn == 0)
        repacked = [name for name in fake.launched if name.startswith("repack")]
        assert bool(repacked) == (turn == 0)
    assert {5, 6, 7, *text(7, 100)} <= set(trim.ids[: trim.used].tolist())
    assert device.plane("head_ids").tolist() == trim.ids.tolist()
    assert device.plane("head_rows").tolist() == [trim.used]
    del device, session, model, trim
    gc.collect()
    assert fake.held_bytes == 0

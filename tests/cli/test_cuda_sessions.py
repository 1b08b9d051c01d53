"""Sessions on the CUDA device, on a driver made of host memory: copies, arenas, graphs, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from cli_tools import WEIGHTS, call
from fake_cuda import TOTAL_BYTES, FakeDriver, next_token

from memra_runtime.device.cuda import CudaDevice, DeviceBytes
from memra_runtime.errors import MemraError
from memra_runtime.model import Model, another_model, load_model
from memra_runtime.session import Session, read_session, save_session
from memra_runtime.session.snapshot import row_spans
from tiny_pair import TINY_DRAFT, TINY_TARGET

#: A driver without nodes of several bodies: the host repeats the rounds of a burst.
OLD_DRIVER = 12040


def loaded(artifact: Path) -> Model:
    """No fixture: pytest would hold it for longer than the fake driver is there."""
    found = load_model(artifact, TINY_TARGET, TINY_DRAFT)
    assert isinstance(found.device, CudaDevice)
    return found


def said(last: int, count: int) -> list[int]:
    """What the fake target says after a token."""
    found = [next_token(last)]
    while len(found) < count:
        found.append(next_token(found[-1]))
    return found


def fill(device: CudaDevice, tokens: int, seed: int) -> bytes:
    """Write random bytes into the rows of a text; the fake kernels leave none."""
    rng = np.random.default_rng(seed)
    spans = row_spans(device.manifest, tokens)
    size = sum(size for _, size in spans)
    data = rng.integers(0, 256, size, np.uint8)
    at = 0
    for offset, part in spans:
        device._arena.write(offset, data[at : at + part])
        at += part
    return data.tobytes()


def rows(device: CudaDevice, tokens: int) -> bytes:
    return device.keep(row_spans(device.manifest, tokens)).bytes().tobytes()


def test_a_snapshot_is_a_copy_on_the_device(cuda_artifact: Path, gpu: FakeDriver) -> None:
    model = loaded(cuda_artifact)
    session, device = Session(model.device), model.device
    session.prime([5, 6, 7])
    for _ in session.burst(9):
        pass
    count = len(session.committed)
    data = fill(device, count, seed=1)
    device.plane("hidden")[...] = np.arange(256)
    state, held = device.state.tolist(), gpu.held_bytes
    snapshot = session.snapshot()
    assert isinstance(snapshot.rows, DeviceBytes)
    assert gpu.held_bytes - held == len(data) < model.manifest.arena_bytes / 4
    text = list(session.committed)

    session.prime([9, 9, 9, 9])
    fill(device, count, seed=2)
    device.plane("hidden")[...] = 0
    session.restore(snapshot)
    assert rows(device, count) == data
    assert device.plane("hidden").tolist() == list(range(256))
    assert device.state.tolist() == state
    assert session.committed == text
    assert list(session.generate(30)) == said(text[-1], 30)


@pytest.mark.parametrize("version", [OLD_DRIVER, 13000])
def test_demoted_sessions_run_the_plain_graph(
    cuda_artifact: Path, gpu: FakeDriver, version: int
) -> None:
    """One launch and one read a burst, as in rounds; a plain step never drafts."""
    gpu.version = version
    session = Session(loaded(cuda_artifact).device)
    session.prime([5, 6, 7])
    for _ in session.burst(9):
        pass
    device, text = session.device, list(session.committed)
    drafted, before = device.get("total_drafted"), (device.launches, device.reads)
    session.demote()
    gpu.launched.clear()
    found = [token for tokens in session.burst(40) for token in tokens]
    assert found == said(text[-1], 40)
    assert device.get("total_drafted") == drafted
    launches = 40 if version == OLD_DRIVER else 1
    assert (device.launches - before[0], device.reads - before[1]) == (launches, launches)
    plain = {entry.symbol for entry in device.manifest.launches["plain_step"]}
    assert plain <= set(gpu.launched)
    draft = {entry.symbol for entry in device.manifest.launches["draft"]}
    others = {e.symbol for n, es in device.manifest.launches.items() if n != "draft" for e in es}
    assert not (draft - others) & set(gpu.launched)
    session.promote()
    assert next(session.burst(1))[0] == next_token(found[-1])
    assert device.get("total_drafted") > drafted


@pytest.mark.parametrize("version", [OLD_DRIVER, 13000])
def test_two_texts_take_turns_on_one_model(
    cuda_artifact: Path, gpu: FakeDriver, version: int
) -> None:
    gpu.version = version
    model = loaded(cuda_artifact)
    held = gpu.held_bytes
    other = another_model(model)
    assert gpu.held_bytes - held == model.manifest.arena_bytes  # weights are shared
    sessions = [Session(model.device), Session(other.device)]
    prompts = [[5, 6, 7], [80, 81]]
    found: list[list[int]] = [[], []]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.prime(prompt)
    for width in (1, 7, 3, 40):
        for session, tokens in zip(sessions, found, strict=True):
            tokens += [token for burst in session.burst(width) for token in burst]
    for session, prompt, tokens in zip(sessions, prompts, found, strict=True):
        assert tokens == said(prompt[-1], len(tokens))
        assert session.committed == prompt + tokens
    assert model.device.state.tolist() != other.device.state.tolist()


def test_what_does_not_fit_is_refused_before_it_is_allocated(
    cuda_artifact: Path, gpu: FakeDriver
) -> None:
    model = loaded(cuda_artifact)
    session = Session(model.device)
    session.prime([5, 6, 7])
    held = gpu.held_bytes
    gpu._sizes[0] = TOTAL_BYTES - held - 1000  # another process takes nearly all
    try:
        with pytest.raises(MemraError, match=r"another text .* needs \d+\.\d MiB, 0\.0 MiB are"):
            another_model(model)
        with pytest.raises(MemraError, match="a snapshot of 3 tokens needs"):
            session.snapshot()
    finally:
        del gpu._sizes[0]
    assert gpu.held_bytes == held


def test_a_saved_session_is_taken_up_by_another_process(
    cuda_artifact: Path, gpu: FakeDriver, tmp_path: Path
) -> None:
    model = loaded(cuda_artifact)
    session = Session(model.device)
    session.prime([5, 6, 7])
    list(session.generate(20))
    count = len(session.committed)
    data = fill(model.device, count, seed=3)
    save_session(tmp_path / "s", session.snapshot(), model.manifest)
    again = loaded(cuda_artifact)
    taken = Session(again.device)
    taken.restore(read_session(tmp_path / "s", again.manifest))
    assert rows(again.device, count) == data
    assert list(taken.generate(9)) == list(session.generate(9))


@pytest.mark.parametrize("how", [(), ("--plain",)])
def test_run_saves_and_goes_on(
    cuda_artifact: Path, gpu: FakeDriver, tmp_path: Path, how: tuple[str, ...]
) -> None:
    file = tmp_path / "s"
    first = call("memra-run", cuda_artifact, *WEIGHTS, "--ids", "5,6,7", "-n", "12", "--json",
                 "--save-session", file, *how)  # fmt: skip
    assert first.code == 0, first.err
    then = call("memra-run", cuda_artifact, *WEIGHTS, "--session", file, "-n", "9", "--json",
                "--strict", *how)  # fmt: skip
    assert then.code == 0, then.err
    assert json.loads(first.out)["ids"] + json.loads(then.out)["ids"] == said(7, 21)
    assert "repeated on the GPU" in then.err

"""A round that ends its own chain runs in four ways on a GPU, and each decides the same.

In a burst and alone as a graph of conditional nodes; under an older driver as a graph of all its
drafts, of which some go unused; and kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from cli_tools import WEIGHTS, call
from fake_cuda import FakeDriver, in_place, next_token

from memra_compiler.compile import CompileOptions, compile_spec, load, lower
from memra_compiler.ir.graph import Module
from memra_runtime.artifact import slot
from memra_runtime.model import load_opened, open_model
from memra_runtime.session import Policy, Session
from tiny_pair import TINY_DRAFT, TINY_SPEC, TINY_TARGET

TARGET = "cuda:sm_90a"
OVERRIDES = {
    "runtime.activations": "int8",
    "runtime.kv": "f16",
    "round.confidence.next_round": "0.2",
    "round.confidence.in_round.when": "always",
}
OLD_DRIVER, NEW_DRIVER = 12040, 13000
TOKENS, PROMPT = 60, [5, 6, 7]
#: Counters that tell how a round was run, not what it did.
OWN = ("step", "more", "burst_end", "rows")
FORMS = ("burst", "graph", "old", "eager")
GATES: dict[str, dict[str, Any]] = {
    "off": {"cut_below": 0.0, "late_below": 0.0},
    "late": {"cut_below": 0.0, "late_below": 0.6},
    "keep": {"cut_below": 0.5},
    "drop": {"cut_below": 0.5, "cut_drops": True},
    "skip": {"cut_below": 0.5, "cut_drops": True, "cut_first": True},
    "deep": {"cut_below": 0.5, "cut_always": False, "floor_boundary": 20},
    "both": {"cut_below": 0.9, "late_below": 0.8, "floor_short": 3},
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("cut") / "tiny.memra"
    options = CompileOptions(target=TARGET, overrides=OVERRIDES, cache=kernel_cache)
    return compile_spec(TINY_SPEC, folder, options).folder


@pytest.fixture(scope="module")
def module() -> Module:
    spec, files = load(TINY_SPEC, CompileOptions(target=TARGET, overrides=OVERRIDES))
    return lower(spec, files, target=TARGET)


@pytest.fixture
def gpu(artifact: Path, module: Module) -> Iterator[FakeDriver]:
    with in_place(module, artifact) as fake:
        yield fake


def run(artifact: Path, gpu: FakeDriver, form: str, gates: dict[str, Any]) -> dict[str, Any]:
    """Run a text in one form, with three drafts of four right; what it did, and what it took."""
    return run_on(loaded(artifact, gpu, form), gpu, form, gates)


def loaded(artifact: Path, gpu: FakeDriver, form: str) -> Any:
    gpu.version = OLD_DRIVER if form == "old" else NEW_DRIVER
    opened = open_model(artifact, TINY_TARGET, TINY_DRAFT)
    return load_opened(opened, graphs=form != "eager").device


def run_on(device: Any, gpu: FakeDriver, form: str, gates: dict[str, Any]) -> dict[str, Any]:
    session = Session(device, replace(Policy.of(device.manifest), **gates))
    session.prime(PROMPT, TOKENS)
    forced = device.plane("forced").copy()
    token = PROMPT[-1]
    for at in range(len(PROMPT), len(forced)):
        token = next_token(token)
        forced[at] = token if at % 4 else (token + 1) % 4096
    device.plane("forced")[...] = forced
    gpu.launched.clear()
    launches, reads = device.launches, device.reads
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        if form == "burst":
            tokens += [t for some in session.burst(TOKENS) for t in some]
        else:
            tokens += session.step()
    return {
        "tokens": tokens,
        "state": np.delete(device.state.copy(), [slot(name) for name in OWN]),
        "counters": {n: device.get(n) for n in ("rounds", "total_drafted", "cuts")},
        "drafts": sum(name.startswith("weigh_draft_") for name in gpu.launched),
        "launches": device.launches - launches,
        "reads": device.reads - reads,
    }


@pytest.mark.parametrize("gates", GATES)
def test_every_form_decides_the_same(artifact: Path, gpu: FakeDriver, gates: str) -> None:
    found = {form: run(artifact, gpu, form, GATES[gates]) for form in FORMS}
    first = found["burst"]
    want, token = [], PROMPT[-1]
    while len(want) < len(first["tokens"]):
        token = next_token(token)
        want.append(token)
    for form, one in found.items():
        assert one["tokens"] == want, form
        assert (one["state"] == first["state"]).all(), form
    counted = first["counters"]
    assert (counted["cuts"] > 0) == (gates not in ("off", "late"))
    assert found["graph"]["launches"] == found["graph"]["reads"] == counted["rounds"]
    assert first["launches"] == first["reads"] < 3
    # the chain really stops: no draft step is run that the round does not want
    made = {form: one["drafts"] for form, one in found.items()}
    dropped = counted["cuts"] if "cut_drops" in GATES[gates] else 0
    assert made["burst"] == made["graph"] == made["eager"] == counted["total_drafted"] + dropped
    assert made["old"] > made["burst"] if counted["cuts"] else made["old"] == made["burst"]
    reads = counted["rounds"] * 2 + made["eager"]
    assert found["eager"]["reads"] == reads, "a round is read when it begins, and after each draft"


@pytest.mark.parametrize("form", ["burst", "graph"])
def test_graph_serves_every_policy(artifact: Path, gpu: FakeDriver, form: str) -> None:
    """Nothing of a policy is baked into what was captured under another."""
    device = loaded(artifact, gpu, form)
    for gates in (*GATES, *reversed(GATES)):
        here, alone = (
            run_on(device, gpu, form, GATES[gates]),
            run(artifact, gpu, form, GATES[gates]),
        )
        assert (here["state"] == alone["state"]).all(), gates
        assert here["drafts"] == alone["drafts"], gates


def test_depth_is_bounded_by_the_first_doubtful_draft(artifact: Path, gpu: FakeDriver) -> None:
    free, late = (run(artifact, gpu, "burst", GATES[name]) for name in ("off", "late"))
    assert late["tokens"][:TOKENS] == free["tokens"][:TOKENS]
    assert late["counters"]["total_drafted"] < free["counters"]["total_drafted"]
    assert late["counters"]["cuts"] == free["counters"]["cuts"] == 0


@pytest.mark.parametrize(
    ("version", "more", "says"),
    [
        (NEW_DRIVER, (), "graph: round, chains ended by doubt, repeated on the GPU"),
        (OLD_DRIVER, (), "graph: round, chains ended by doubt only after all their drafts are made:"
                         " the driver is older than CUDA 12.8 (one launch"),
        (NEW_DRIVER, ("--eager",), "eager: kernel by kernel, a host read a draft, graphs are off"),
        (NEW_DRIVER, ("--plain",), "graph: plain, repeated on the GPU"),
    ],
)  # fmt: skip
def test_run_says_how_chains_end(
    artifact: Path, gpu: FakeDriver, version: int, more: tuple[str, ...], says: str
) -> None:
    gpu.version = version
    ended = call("memra-run", artifact, *WEIGHTS, "--ids", "5,6,7", "-n", "30", "--stats", *more)
    assert ended.code == 0, ended.err
    assert f"rounds   {says}" in ended.err
    assert ("chains were ended by doubt" in ended.err) == (more != ("--plain",))

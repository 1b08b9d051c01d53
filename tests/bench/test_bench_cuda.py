"""memra-bench on a GPU, without one: a CUDA artifact's launches, a CPU that runs its programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.artifact import Manifest, load_manifest
from memra_runtime.bench import BenchResult, Options, files, run, run_bench
from memra_runtime.bench.costs import cost, launch_bytes, program
from memra_runtime.bench.measure import Floor, Times
from memra_runtime.bench.report import render
from memra_runtime.bench.results import (
    ContextResult,
    Counted,
    Fit,
    ForcedResult,
    KernelResult,
    ProgramResult,
    RoundResult,
    StreamResult,
)
from memra_runtime.bench.timers import CallTimer
from memra_runtime.errors import MemraError
from memra_runtime.model import Model
from tiny_pair import TINY_SPEC

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")

IDS = (2, 651, 1902, 17, 40)


class FakeGpu:
    """The CPU device under the manifest of a CUDA artifact of the same spec."""

    whole = True

    def __init__(self, device: Any, manifest: Manifest) -> None:
        self._device = device
        # chunks of a prompt have as many rows as the CPU's programs take
        rows = {p.name: p.rows for p in device.manifest.programs}
        shapes = {p.id: p.shape for p in device.manifest.planes}
        self.manifest = replace(
            manifest,
            programs=tuple(replace(p, rows=rows[p.name]) for p in manifest.programs),
            planes=tuple(replace(p, shape=shapes.get(p.id, p.shape)) for p in manifest.planes),
        )
        self.launches = self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def runs(self, sequence: str) -> str:
        return f"graph: {sequence} (one launch and one host read)"

    def launch(self, name: str) -> None:
        self._device.launch(name)
        self.launches += 1
        self.reads += 1


class FakeTimer(CallTimer):
    """Every launch of a kernel takes two microseconds."""

    name = "NVIDIA Fake"

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.name = "NVIDIA Fake"

    def kernels(self, program: str, at: Sequence[int], rows: int) -> float:
        return 2e-6 * len(at)

    def copy_gb_s(self) -> float:
        return 4000.0


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Manifest:
    folder = tmp_path_factory.mktemp("bench") / "tiny.memra"
    options = CompileOptions(
        target="cuda:sm_90a", overrides={"runtime.activations": "int8"}, cache=kernel_cache
    )
    return load_manifest(compile_spec(TINY_SPEC, folder, options).folder)


@pytest.fixture(scope="module")
def result(manifest: Manifest, tiny_model: Model) -> BenchResult:
    device: Any = FakeGpu(tiny_model.device, manifest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "timer_for", FakeTimer)
        return run_bench(
            device, Options(IDS, max_new=8, repeat=3, stream_repeat=1, contexts=(64, 1500))
        )


@pytest.mark.parametrize("name", ["plain_step", "verify", "draft", "prefill"])
def test_bytes_of_launches_add_up_to_the_program_at_every_context(
    manifest: Manifest, name: str
) -> None:
    for context in (1, 64, 1024, 2048):
        parts = launch_bytes(manifest, name, context)
        assert all(part >= 0 for part in parts)
        assert sum(parts) == cost(manifest, name, program(manifest, name).rows, context).bytes


def test_every_launch_is_in_one_kernel(result: BenchResult, manifest: Manifest) -> None:
    for name in ("plain_step", "verify", "draft"):
        entries = manifest.launches[name]
        found = [k for k in result.kernels if k.program == name]
        assert sum(k.launches_count for k in found) == len(entries)
        assert {k.name for k in found} == {entry.symbol for entry in entries}
        assert sum(k.bytes for k in found) == sum(launch_bytes(manifest, name, len(IDS)))
        assert all(a.time_ms >= b.time_ms for a, b in pairwise(found))
    assert any(k.of for k in result.kernels)


def test_kernels_are_held_to_the_copy(result: BenchResult) -> None:
    for k in result.kernels:
        assert k.launch_us == pytest.approx(2)
        assert k.bandwidth_gb_s == pytest.approx(k.bytes / k.time_ms / 1e6)
        assert k.floor_share_ratio == pytest.approx(k.bandwidth_gb_s / 4000)


def test_floor_of_a_gpu_is_its_copy_alone(result: BenchResult, manifest: Manifest) -> None:
    assert result.floor == Floor(4000.0, manifest.weight_bytes, manifest.arena_bytes)
    assert not result.pinned
    for p in result.programs:
        assert p.floor_ms == pytest.approx(p.bytes / 4000e6)
        assert p.launches_count == len(manifest.launches[p.name])


def test_rounds_are_counted(result: BenchResult) -> None:
    assert result.per_round == Counted(1.0, 1.0)
    assert result.rounds_run == "graph: round (one launch and one host read)"


def test_contexts_compare_with_their_plain_step_and_with_the_short_one(
    result: BenchResult, manifest: Manifest
) -> None:
    found = [(c.context_tokens, c.sequence, c.depth_tokens) for c in result.contexts]
    wanted = [("plain", 0), *(("round", k) for k in (0, 1, 3, 5))]
    assert found == [(n, *w) for n in (64, 1500) for w in wanted]
    for c in result.contexts:
        plain = next(p for p in result.contexts
                     if (p.context_tokens, p.sequence) == (c.context_tokens, "plain"))  # fmt: skip
        assert c.plain_ratio == pytest.approx(c.time.median_ms / plain.time.median_ms)
        if c.sequence == "plain":
            moved = cost(manifest, "plain_step", 1, c.context_tokens).bytes
            assert c.floor_ms == pytest.approx(moved / 4000e6)
            assert c.growth_ratio == pytest.approx(c.time.median_ms / result.plain_step_ms)


def test_report_fits_a_page_and_defines_what_only_a_gpu_has(result: BenchResult) -> None:
    text = render(result)
    assert max(map(len, text.splitlines())) <= 110
    for word in ("kernel", "of floor", "x short", "gaps", "launches"):
        assert text.count(word) >= 2, word
    for part in ("NVIDIA Fake", "kernel of verify, 6 rows", "as one graph: "):
        assert part in text
    assert "NumPy" not in text
    assert "one core" not in text


def test_csv_and_json_hold_the_kernels(result: BenchResult, tmp_path: Path) -> None:
    files.write_csv(result, tmp_path / "b.csv")
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"kernel", "context"} <= {r["section"] for r in rows}
    places = [(r["section"], r["item"], r["quantity"]) for r in rows]
    assert len(set(places)) == len(places)
    assert len(json.loads(json.dumps(result.to_json()))["kernels"]) == len(result.kernels)


def test_plot_names_the_gpu(result: BenchResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files.write_plot(result, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_a_forced_round_that_goes_on_elsewhere_ends_the_bench(
    manifest: Manifest, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(FakeGpu):
        def launch(self, name: str) -> None:
            super().launch(name)
            if name == "round" and self.get("accepted") == 5:
                self.put({"pending": 0})

    device: Any = Wrong(tiny_model.device, manifest)
    monkeypatch.setattr(run, "timer_for", FakeTimer)
    with pytest.raises(MemraError, match="5 of 5 drafts forced right gives another text"):
        run_bench(device, Options(IDS, max_new=8, repeat=1, stream_repeat=1))


def test_page_of_a_gpu(golden: Callable[[str, str], None]) -> None:
    """The tables as they are read, on numbers made up."""
    t = Times(5.962, 5.95, 6.1, 20)
    page = BenchResult(
        "gemma4_31b", "cuda:sm_90a", "NVIDIA H200", False, 1, 512, 64, 20,
        Floor(4290.0, 18_940_000_000, 2_900_000_000),
        (
            ProgramResult("draft", 1, 71, Times(0.15, 0.149, 0.16, 100), 514_000_000, 9 * 10**8,
                          3426.0, 6000.0, 0.12, 1.25),
            ProgramResult("plain_step", 1, 615, t, 17_640_000_000, 61 * 10**9, 2958.7, 10231.0,
                          4.112, 1.45),
            ProgramResult("accept", 1, 1, Times(0.003, 0.003, 0.004, 20), 2048, 0, 0.7, 0.0,
                          0.0001, 30.0),
        ),
        (RoundResult(5, 0.75, 6.41, 0.02, 0.13, 7.31, 1.23, 4.71, 1.55, 0.23, 0.046),),
        Fit(5.962, 0.04, 0.262, 0.15, 0.112, 0.02),
        (ForcedResult(0, Times(7.33, 7.3, 7.4, 20), 136.0, 0.81),
         ForcedResult(5, Times(7.34, 7.3, 7.4, 20), 817.0, 4.87)),
        0.001,
        (StreamResult("plain", 167.7, 167.0, 168.0, 1.0, 0.0, 1.0, 63),),
        2711.0, 5.962, "graph: round (one launch and one host read)", Counted(1.0, 1.0),
        (
            KernelResult("plain_step", 1, "gated_linear_9f3a12c4", "ffn_gate", 60, 2.04, 34.0,
                         7_803_000_000, 3825.0, 0.8916),
            KernelResult("plain_step", 1, "softcap_c4e5f844", "", 1, 0.012, 12.0, 2_100_000, 175.0,
                         0.0408),
            KernelResult("plain_step", 1, "attention_77ab01de", "", 10, 0.06, 6.0, 0, 0.0, 0.0),
        ),
        (ContextResult(16384, "plain", 0, Times(6.604, 6.6, 6.7, 20), 4.3, 1.54, 1.0, 1.108),
         ContextResult(16384, "round", 5, Times(8.53, 8.5, 8.6, 20), 4.9, 1.74, 1.29, 1.167)),
    )  # fmt: skip
    golden("bench/cuda.txt", render(page) + "\n")

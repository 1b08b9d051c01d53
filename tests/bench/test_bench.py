"""memra-bench: its numbers agree with each other. Absolute speeds are nobody's promise."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memra_compiler.ops.kv_rows import cache_values
from memra_runtime.artifact import Manifest
from memra_runtime.bench import BenchResult, Options, files, run_bench
from memra_runtime.bench.costs import cost, program, readers
from memra_runtime.bench.measure import Times, quiet_core
from memra_runtime.bench.report import render
from memra_runtime.bench.run import chosen_depths
from memra_runtime.cli.bench import main
from memra_runtime.errors import MemraError
from memra_runtime.model import Model
from memra_runtime.session import Policy, Session
from tiny_pair import TINY_DRAFT, TINY_TARGET

UNITS = (
    "_ms",
    "_us",
    "_gb_s",
    "_gflop_s",
    "_tok_s",
    "_tokens",
    "_count",
    "_ratio",
    "bytes",
    "flops",
)
IDS = (2, 651, 1902, 17, 40)


@pytest.fixture(scope="module")
def result(tiny_model: Model) -> BenchResult:
    return run_bench(tiny_model.device, Options(IDS, max_new=24, repeat=5, stream_repeat=1))


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document with its key."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def test_every_number_has_a_unit_in_its_key(result: BenchResult) -> None:
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert [k for k, _ in numbers(data) if not k.endswith(UNITS)] == []


def test_columns_of_a_round_add_up(result: BenchResult) -> None:
    assert [r.depth_tokens for r in result.rounds] == [0, 1, 3, 5]
    for r in result.rounds:
        total = r.draft_ms + r.verify_ms + r.rest_ms + r.gaps_ms
        assert total == pytest.approx(r.round_ms)
        assert r.plain_ratio == pytest.approx(r.round_ms / result.plain_step_ms)
        assert (r.draft_ms > 0) == (r.depth_tokens > 0)


def test_break_even_follows_from_the_ratio(result: BenchResult) -> None:
    assert result.rounds[0].break_even_acceptance_ratio is None
    for r in result.rounds[1:]:
        share = r.break_even_acceptance_ratio
        assert share is not None
        assert share * r.depth_tokens == pytest.approx(max(0, r.plain_ratio - 1))


def test_programs_state_what_they_move(result: BenchResult) -> None:
    names = [(p.name, p.rows_count) for p in result.programs if p.flops]
    verify = [("verify", n) for n in range(1, 7)]
    assert names == [("draft", 1), *verify, ("plain_step", 1), ("prefill", 8)]
    for p in result.programs:
        assert p.bytes > 0
        assert 0 < p.time.min_ms <= p.time.median_ms <= p.time.max_ms
        assert p.bandwidth_gb_s == pytest.approx(p.bytes / p.time.median_ms / 1e6)
        assert p.over_floor_ratio == pytest.approx(p.time.median_ms / p.floor_ms)


def test_verify_costs_more_with_each_row_and_one_row_costs_a_plain_step(
    tiny_model: Model,
) -> None:
    manifest = tiny_model.manifest
    costs = [cost(manifest, "verify", rows, 100) for rows in range(1, 7)]
    assert costs[0] == cost(manifest, "plain_step", 1, 100)
    assert all(a.bytes < b.bytes and a.flops < b.flops for a, b in pairwise(costs))


@pytest.mark.parametrize("kv", ["f32", "q8_0"])
def test_a_full_context_costs_what_the_manifest_says(
    kv: str, tiny_model: Model, kv8_model: Model
) -> None:
    manifest: Manifest = (kv8_model if kv == "q8_0" else tiny_model).manifest
    for name in ("draft", "plain_step", "verify", "prefill"):
        entry = program(manifest, name)
        full = cost(manifest, name, entry.rows, 2048)
        assert (full.bytes, full.flops) == (entry.bytes, entry.flops)
        assert cost(manifest, name, entry.rows, 100).bytes < entry.bytes


def test_8_bit_caches_move_the_bytes_they_hold(tiny_model: Model, kv8_model: Model) -> None:
    """Of the full layers, 100 positions: a key and a value of 128 floats, or of 144 bytes."""
    for model, row in ((tiny_model, 512), (kv8_model, 144)):
        near, far = (cost(model.manifest, "plain_step", 1, n) for n in (1000, 1100))
        assert far.bytes - near.bytes == 100 * 2 * row
        assert far.flops - near.flops == 100 * 4 * 4 * 128


def test_other_contexts_of_8_bit_caches_are_filled_with_numbers(kv8_model: Model) -> None:
    options = Options(IDS, max_new=8, repeat=2, stream_repeat=1, contexts=(300,))
    found = run_bench(kv8_model.device, options).contexts
    assert {c.context_tokens for c in found} == {300}
    assert np.isfinite(kv8_model.device.value("verify", "target.logits")[0]).all()
    cache = cache_values(kv8_model.device.plane("target.layers.5.v"))
    assert np.isfinite(cache).all()
    assert 0 < np.abs(cache[:, 1000]).max() < 1


def test_drafter_layers_read_the_caches_they_are_wired_to(tiny_model: Model) -> None:
    planes = [r.plane.id for r in readers(tiny_model.manifest, "drafter")]
    assert planes == ["target.layers.4.k"] * 3 + ["target.layers.5.k"]


def test_forced_rounds_cover_every_acceptance(result: BenchResult) -> None:
    assert [f.accepted_tokens for f in result.forced] == [0, 1, 2, 3, 4, 5]
    for f in result.forced:
        assert f.speed_tok_s == pytest.approx(1e3 * (f.accepted_tokens + 1) / f.time.median_ms)


def test_streams_compare_with_plain(result: BenchResult) -> None:
    modes = [s.mode for s in result.streams]
    assert modes == ["plain", "depth 0", "depth 1", "depth 3", "depth 5", "spec policy"]
    assert result.streams[0].speedup_ratio == 1.0
    for s in result.streams[:2]:
        assert (s.acceptance_ratio, s.tokens_per_round_ratio, s.rounds_count) == (0.0, 1.0, 23)
    assert all(s.tokens_per_round_ratio >= 1 for s in result.streams)


def test_fit_describes_the_rounds(result: BenchResult) -> None:
    fit = result.fit
    assert fit.draft_step_ms + fit.verify_row_ms == pytest.approx(fit.per_draft_ms)
    for r in result.rounds[1:]:
        at = fit.plain_ms + fit.fixed_ms + fit.per_draft_ms * r.depth_tokens
        assert abs(at - r.round_ms) <= fit.residual_ms + 1e-9


def test_report_defines_its_numbers_and_fits_a_page(result: BenchResult) -> None:
    text = render(result)
    assert max(map(len, text.splitlines())) <= 110
    for word in ("GB/s", "Gflop/s", "gaps", "break even", "x floor", "tokens a round", "fixed"):
        assert text.count(word) >= 2, word  # in a table and in its definition


def test_csv_holds_every_number(result: BenchResult, tmp_path: Path) -> None:
    files.write_csv(result, tmp_path / "b.csv")
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {r["section"] for r in rows} == {
        "floor", "fit", "program", "round", "forced", "stream", "prompt",
        "per round",
    }  # fmt: skip
    assert [r["quantity"] for r in rows if not r["quantity"].endswith(UNITS)] == []
    (found,) = [r["value"] for r in rows if (r["item"], r["quantity"]) == ("depth 3", "round_ms")]
    assert float(found) == result.rounds[2].round_ms


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(MemraError, match=r'pip install "memra\[bench\]"'):
        files.require_plot()


def test_plot_draws_and_writes_a_csv_beside_it(
    result: BenchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    files.write_plot(result, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "b.csv").is_file()


def test_default_depths_stop_at_what_is_compiled() -> None:
    policy = Policy(4, 4, True, 1, 1, 0)
    assert chosen_depths((), policy) == (0, 1, 3, 4)
    assert chosen_depths((2, 0, 2), policy) == (0, 2)
    with pytest.raises(MemraError, match="depth 5 is not between 0 and 4"):
        chosen_depths((5,), policy)


def test_core_and_collector_are_restored() -> None:
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    with quiet_core() as core:
        assert before is None or os.sched_getaffinity(0) == {core}
    assert before is None or os.sched_getaffinity(0) == before


def test_times_are_in_milliseconds() -> None:
    assert Times.of([0.003, 0.001, 0.002]) == Times(2.0, 1.0, 3.0, 3)


def test_a_text_that_differs_ends_the_bench(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Session.generate

    def generate(self: Session, max_new: int, *, sequence: str = "round") -> Iterator[int]:
        shift = sequence == "round"
        return ((t + shift) % 4096 for t in right(self, max_new, sequence=sequence))

    monkeypatch.setattr(Session, "generate", generate)
    with pytest.raises(MemraError, match="gives another text than plain decoding"):
        run_bench(tiny_model.device, Options(IDS, max_new=8, repeat=1, stream_repeat=1))


def run_command(*arguments: str) -> SimpleNamespace:
    with pytest.raises(SystemExit) as done:
        main(list(arguments))
    return SimpleNamespace(code=done.value.code)


def test_command_prints_json(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "numbers.csv"
    done = run_command(
        str(tiny_artifact), "--weights", str(TINY_TARGET), "--draft", str(TINY_DRAFT), "--quiet",
        "--json", "--repeat", "2", "--max-new", "8", "--depths", "2", "--ids", "2,7",
        "--csv", str(table), "--context", "1500",
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (done.code, err) == (0, "")
    data = json.loads(out)
    assert data["context_tokens"] == 2
    assert [r["depth_tokens"] for r in data["rounds"]] == [2]
    found = [(c["context_tokens"], c["sequence"], c["depth_tokens"]) for c in data["contexts"]]
    assert found == [(1500, "plain", 0), (1500, "round", 2)]
    assert data["contexts"][0]["floor_ms"] > data["programs"][1]["floor_ms"]
    assert data["per_round"] == {"launches_ratio": 1.0, "reads_ratio": 0.0}
    assert table.is_file()


def test_weights_whose_text_makes_no_sense_can_be_measured(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "odd.gguf"
    data, key = TINY_TARGET.read_bytes(), b"gemma4.attention.sliding_window"
    at = data.index(key) + len(key)
    assert data[at : at + 4] == bytes([4, 0, 0, 0])  # a uint32
    odd.write_bytes(data[: at + 4] + bytes([7, 0, 0, 0]) + data[at + 8 :])
    done = run_command(
        str(tiny_artifact), "--weights", str(odd), "--draft", str(TINY_DRAFT), "--ids", "2,7",
        "--repeat", "1", "--max-new", "2", "--depths", "0",
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert done.code == 0, err
    assert re.search(r"^odd      `\S+` contradicts .* has 7; only speed is measured$", err, re.M), (
        err
    )
    assert "plain_step" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "4"], "error[threads]: programs for `cpu` run on one thread, not 4"),
        (["--target", "cuda:sm_80"], "error[target]: the artifact was compiled for `cpu`, not"),
        (["--set", "round.depth.max=3"], "error[set]: an artifact is compiled"),
        (["--depths", "1,x"], "error[depth]: `x` is not a draft depth"),
        (["--context", "long"], "error[context]: `long` is not a number of tokens"),
        (["--context", "4,2043"], "error[context-full]: there is no room for a round behind 2,043"),
        (["--repeat", "0"], "error[usage]"),
        (["--prompt", "a", "--ids", "1"], "error[usage]: only one prompt can be given"),
    ],
)
def test_command_refuses(
    arguments: list[str],
    message: str,
    tiny_artifact: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = ("--weights", str(TINY_TARGET), "--draft", str(TINY_DRAFT))
    done = run_command(str(tiny_artifact), *files, *arguments)
    assert done.code == 2
    assert message in capsys.readouterr().err


def test_command_loads_no_matplotlib() -> None:
    if "matplotlib" in sys.modules:
        pytest.skip("another test has loaded it")
    run_command("--help")
    assert "matplotlib" not in sys.modules

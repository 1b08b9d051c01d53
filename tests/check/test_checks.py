"""The bundled pair passes every check, and every red arm is caught."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import memra_runtime.check
from memra_runtime.check import Options, Report, run_checks
from memra_runtime.check.report import NOT_CAUGHT, Arm
from memra_runtime.check.rig import Rig
from memra_runtime.check.rows import ring_edges
from memra_runtime.check.run import CHECKS
from memra_runtime.check.windows import edge_lengths
from memra_runtime.cli.check import main
from memra_runtime.model import Model, load_model
from tiny_pair import TINY_DRAFT, TINY_TARGET

#: Checks of a pair whose head is not trimmed.
WHOLE = [name for name in CHECKS if name != "trim"]


@pytest.fixture(scope="module")
def report(tiny_model: Model) -> Report:
    return run_checks(tiny_model, Options(quick=True, max_new=64))


def test_bundled_pair_passes_every_check(report: Report) -> None:
    assert [(c.name, c.status) for c in report.checks] == [(n, "PASS") for n in WHOLE]
    assert report.passed


def test_pair_with_8_bit_caches_passes_every_check(kv8_model: Model) -> None:
    """Cache rows are compared as they are stored: values, scales and zeros."""
    report = run_checks(kv8_model, Options(quick=True, max_new=48))
    assert [(c.name, c.status) for c in report.checks] == [(n, "PASS") for n in WHOLE]
    assert all(arm.caught_by for arm in report.red_arms)
    assert report.passed


def test_trimmed_pair_passes_every_check(trimmed_artifact: Path) -> None:
    """One more check, one more red arm: a row that is taken for a token."""
    model = load_model(trimmed_artifact, TINY_TARGET, TINY_DRAFT)
    report = run_checks(model, Options(quick=True, max_new=48))
    assert [(c.name, c.status) for c in report.checks] == [(n, "PASS") for n in CHECKS]
    caught = {arm.name: arm.caught_by for arm in report.red_arms}
    assert caught["skip_remap"] == ("trim", "wiring")
    assert all(caught.values())
    assert report.passed


def test_every_red_arm_is_caught_by_a_named_check(report: Report) -> None:
    caught = {arm.name: arm.caught_by for arm in report.red_arms}
    assert caught == {
        "skip_rollback": ("stream", "forced"),
        "shift_kv_target": ("wiring",),
        "wrong_carry_row": ("forced", "wiring"),
    }


def test_declared_wiring_accepts_more_than_each_arm(report: Report) -> None:
    assert [v.arm for v in report.wiring] == ["shift_kv_target", "wrong_carry_row"]
    for verdict in report.wiring:
        assert verdict.declared > verdict.accepted
        assert verdict.different > 0
        assert verdict.example


def test_every_check_says_what_it_counted(report: Report) -> None:
    for outcome in report.checks:
        assert outcome.counts, outcome.name
        assert min(outcome.counts.values()) > 0, outcome.name


def test_report_reads_well_and_is_json(report: Report) -> None:
    text = report.render()
    for name in [*WHOLE, "skip_rollback", "sigma", "Speculation changes nothing but speed"]:
        assert name in text
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["passed"] is True
    assert len(data["checks"]) == len(WHOLE)


def test_built_in_prompts_cover_one_token_and_a_turned_ring(tiny_model: Model) -> None:
    rig = Rig(tiny_model, Options())
    lengths = {p.name: len(p.ids) for p in rig.prompts}
    assert len(lengths) == 6
    assert lengths["one token"] == 1
    assert lengths["long"] > max(ring_edges(tiny_model.manifest))


def test_edge_lengths_straddle_window_and_ring(tiny_model: Model) -> None:
    found = edge_lengths(tiny_model.manifest, 5, quick=False)
    assert found == [*range(122, 139)]  # 128 - 6 .. 128 + 2 and 136 - 6 .. 136 + 2


@pytest.mark.parametrize("passed", [True, False])
def test_command_prints_json_and_ends_with_0_or_1(
    tiny_artifact: Path,
    report: Report,
    passed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = replace(report, red_arms=(Arm("skip_rollback", "", NOT_CAUGHT),))
    monkeypatch.setattr(memra_runtime.check, "run_checks", lambda *_: report if passed else failed)
    arguments = [str(tiny_artifact), "--weights", str(TINY_TARGET), "--draft", str(TINY_DRAFT)]
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--prompt", "x = [", "--json", "--quiet"])
    out, err = capsys.readouterr()
    assert (done.value.code, err) == (0 if passed else 1, "")
    assert json.loads(out)["passed"] is passed


def test_command_refuses_an_empty_prompt(
    tiny_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main([str(tiny_artifact), "--prompt", ""])
    assert done.value.code == 2
    assert "error[prompt]: a prompt is empty" in capsys.readouterr().err

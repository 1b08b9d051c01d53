"""The bundle of scheduled kernels gives a machine without TVM what TVM gives: needs no GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import scheduled_bundle
from gpu_driver import ARCH
from scheduled_bundle import Bundled, rendered, scheduled
from scheduled_cases import CAP, CASES, everything

from memra_compiler.ops.cuda import Scheduled


def test_bundle_holds_what_tvm_would_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [everything()[0], CAP]
    made = [scheduled(op, ARCH, *types) for op, types in chosen]
    monkeypatch.setattr(scheduled_bundle, "FILE", tmp_path / "scheduled.json")
    scheduled_bundle.write((op, ARCH, types) for op, types in chosen)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tvm" else found(name)
    )
    scheduled_bundle._bundle.cache_clear()
    for (op, types), wanted in zip(chosen, made, strict=True):
        for got, want in zip(scheduled(op, ARCH, *types), wanted, strict=True):
            assert isinstance(got, Bundled)
            assert isinstance(want, Scheduled)
            assert rendered(got, "x") == rendered(want, scheduled_bundle.NAME)
            assert (got.rule, got.grid, got.block) == (want.rule, want.grid, want.block)
    with pytest.raises(KeyError):  # nothing else is in it
        scheduled(CASES["fallback-1x1"].op, ARCH, *CASES["fallback-1x1"].types)
    scheduled_bundle._bundle.cache_clear()


def test_cases_are_taken_by_their_rules() -> None:
    for name, case in CASES.items():
        assert [one.rule for one in scheduled(case.op, ARCH, *case.types)] == [case.rule], name

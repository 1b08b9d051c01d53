"""Every mistake ends with one report that says what to do, and leaves nothing behind."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from bad_input_tools import Case, Workshop
from bad_inputs import CASES
from cli_tools import Ended, call, launch

#: A kernel that was compiled before the mistake was noticed may stay in the cache.
CACHE_ENTRY = re.compile(r"[0-9a-f]{64}\.\w+")


def test_table_names_each_mistake_once() -> None:
    assert [name for name, count in Counter(c.name for c in CASES).items() if count > 1] == []
    assert len(CASES) >= 40


@pytest.fixture
def workshop(tmp_path: Path, tiny_artifact: Path) -> Workshop:
    return Workshop(tmp_path, tiny_artifact)


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file below a folder with its size and time of change, but for whole cache entries."""
    return {
        p: (p.stat().st_size, p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file() and not CACHE_ENTRY.fullmatch(p.name)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_ends_in_one_report(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = list(case.typed(workshop))
    if case.command == "memra-compile" and typed:
        if "-o" not in typed:
            typed += ["-o", tmp_path / "out.cpu.memra"]
        if "--cache" not in typed:
            typed += ["--cache", tmp_path / "cache"]
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path), files(workshop.artifact)
    ended = run(case, typed)
    problem = f"{case.command} {' '.join(map(str, typed))}\n{ended.err}"
    assert ended.code == 2, problem
    assert ended.out == "", problem
    assert "Traceback" not in ended.err, problem
    assert 1 <= ended.err.count("error[") <= case.reports, problem
    assert f"error[{case.code}" in ended.err, problem
    assert [part for part in case.says if part not in ended.err] == [], problem
    assert (files(tmp_path), files(workshop.artifact)) == before, problem


def run(case: Case, typed: list[str | Path]) -> Ended:
    if not case.launched:
        return call(case.command, *typed)
    env = {"PATH": ""} if case.code == "no-linker" else {}
    return launch(case.command, *typed, env=env)

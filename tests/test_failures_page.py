"""docs/failures.md: every failure has its row, and every test that is named there exists."""

from __future__ import annotations

import ast
import re

from tiny_pair import ROOT

PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
#: Numbered failures of rounds and sessions.
ROWS = 44


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_failure_has_a_row_that_says_what_stops_it() -> None:
    rows = re.findall(r"^\| ([\d., ]+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert [number for number, _, _ in rows[:ROWS]] == [str(n + 1) for n in range(ROWS)]
    assert all(len(failure) > 10 and len(why) > 20 for _, failure, why in rows[:ROWS])


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 60
    known = {path: functions_of(path) for path, _ in NAMED if (ROOT / path).is_file()}
    missing = [f"{path}::{name}" for path, name in NAMED if name not in known.get(path, ())]
    assert missing == []


def test_every_case_that_is_named_exists() -> None:
    """Damages of memra-check and mistakes of the command line, in parentheses behind their test."""
    faults = (ROOT / "tests/check/test_faults.py").read_text(encoding="utf-8")
    inputs = (ROOT / "tests/cli/bad_inputs.py").read_text(encoding="utf-8")
    named = re.findall(r"test_damage_turns_its_check_red` \(([^)]+)\)", PAGE)
    assert len(named) == 3
    for case in ", ".join(named).split(", "):
        assert f'"{case}"' in faults, case
    assert '"rope_factors_missing"' in inputs

"""Every refused spec: its full report, where it points, and that no library words leak."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_specs import BAD, GOLDEN, Bad, places

LEAKS = ("Input should be", "input_value", "type=", "http", "pydantic", "validation error", "Field")


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_spec_is_refused_in_full(bad: Bad, tmp_path: Path) -> None:
    error = bad.report(tmp_path)

    assert (GOLDEN / f"{bad.name}.txt").read_text(encoding="utf-8") == f"{error}\n"
    assert bad.at == places(error)
    assert [word for word in LEAKS if word in str(error)] == []


def test_every_golden_text_has_its_spec() -> None:
    assert sorted(bad.name for bad in BAD) == sorted(path.stem for path in GOLDEN.glob("*.txt"))

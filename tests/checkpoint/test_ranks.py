"""Ranks files and maps of trimmed heads: every mistake is told, with its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memra_runtime.checkpoint import map_ids, ranks_digest, read_ranks
from memra_runtime.errors import MemraError, Position

VOCAB = 100


def written(folder: Path, text: str) -> Path:
    path = folder / "ranks.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_ids_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "# counted over some text\n7\n99\n0\n# and more\n12\n")
    assert read_ranks(path, VOCAB) == (7, 99, 0, 12)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("5\nseven\n", 2, "`seven` is not a token id"),
        ("5\n-1\n", 2, "`-1` is not a token id"),
        ("5 6\n", 1, "`5 6` is not a token id"),
        ("5\n6.0\n", 2, "`6.0` is not a token id"),
        ("5\n٣\n", 2, "is not a token id"),
        ("5\n\n6\n", 2, "an empty line"),
        ("5\n100\n", 2, "token id 100 is outside the vocabulary of 100"),
        ("# from here\n5\n8\n5\n", 4, "token id 5 is there twice: in line 2, too"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, what: str) -> None:
    with pytest.raises(MemraError) as raised:
        read_ranks(written(tmp_path, text), VOCAB)
    (found,) = raised.value.diagnostics
    assert isinstance(found.place, Position)
    assert found.place.line == line
    assert what in found.message


def test_all_bad_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(MemraError) as raised:
        read_ranks(written(tmp_path, "x\n" * 10), VOCAB)
    assert len(raised.value.diagnostics) == 7
    assert "4 more bad lines" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "holds no token id"),
        ("# nothing yet\n", "holds no token id"),
        ("".join(f"{i}\n" for i in range(64)), "ascending order"),
    ],
)
def test_a_file_that_ranks_nothing_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(MemraError, match=what):
        read_ranks(written(tmp_path, text), VOCAB)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemraError, match="cannot read the ranks file"):
        read_ranks(tmp_path / "none.txt", VOCAB)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(MemraError, match="cannot read the ranks file"):
        read_ranks(tmp_path / "bytes.txt", VOCAB)


def test_both_kinds_of_map_say_the_same() -> None:
    ids = np.array([4, 90, 7, 99], np.int64)
    assert map_ids(ids, "absolute", VOCAB, "here") == (4, 90, 7, 99)
    assert map_ids(ids - np.arange(4), "offset", VOCAB, "here") == (4, 90, 7, 99)


@pytest.mark.parametrize(
    ("values", "kind", "what"),
    [
        ([0, 1, 100], "absolute", "row 2 would be token 100, outside"),
        ([0, -1, 2], "absolute", "row 1 would be token -1, outside"),
        ([5, 7, 5], "absolute", "token 5 belongs to rows 0 and 2"),
        ([0, 0, 98], "offset", "row 2 would be token 100, outside"),
        ([5, 4, 9], "offset", "token 5 belongs to rows 0 and 1"),
    ],
)
def test_a_wrong_map_is_refused(values: list[int], kind: str, what: str) -> None:
    with pytest.raises(MemraError, match=what):
        map_ids(np.array(values, np.int64), kind, VOCAB, "d2t")


def test_the_other_kind_is_suggested_where_it_fits() -> None:
    with pytest.raises(MemraError, match="make sense as `kind: offset`"):
        map_ids(np.array([3, 3, 3], np.int64), "absolute", VOCAB, "d2t")
    with pytest.raises(MemraError, match="belong to another model"):
        map_ids(np.array([300, 300, 300], np.int64), "absolute", VOCAB, "d2t")


def test_the_digest_knows_the_order() -> None:
    assert ranks_digest([1, 2]) != ranks_digest([2, 1])
    assert ranks_digest((1, 2)) == ranks_digest(np.array([1, 2], np.int32).tolist())

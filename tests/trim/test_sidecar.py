"""The sidecar of learned tokens: kept whole, merged, refused where it is not ours."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from memra_runtime.errors import MemraError
from memra_runtime.sidecar import Sidecar

PROCESSES, EACH = 4, 25


def sidecar(folder: Path) -> Sidecar:
    return Sidecar(folder / "ranks.txt.learned", "a" * 64, 4096)


def test_what_is_added_is_read_in_order(tmp_path: Path) -> None:
    file = sidecar(tmp_path)
    assert file.read() == []
    assert file.add([], 10) == (0, 0)
    assert not file.path.exists(), "nothing learned leaves no file"
    assert file.add([5, 9, 5, 7], 10) == (3, 3)
    assert file.add([7, 1], 10) == (1, 4)
    assert file.read() == [5, 9, 7, 1]
    assert [p.name for p in tmp_path.iterdir()] == [file.path.name], "nothing is left beside it"


def test_it_never_holds_more_than_fits(tmp_path: Path) -> None:
    file = sidecar(tmp_path)
    assert file.add(range(8), 5) == (5, 5)
    assert file.add([100], 5) == (0, 5)
    assert file.read() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("# memra learned ids 1", "# something else", "first line"),
        (" vocab=4096", "", "first line"),
        ("\n9\n", "\n8\n", "its ids are not those"),
        ("\n9\n", "\n", "its ids are not those"),
        ("\n9\n", "\nnine\n", "no token id"),
        ("\n9\n", "\n9\n10\n", "its ids are not those"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, old: str, new: str, what: str) -> None:
    file = sidecar(tmp_path)
    file.add([5, 9, 7], 10)
    text = file.path.read_text()
    assert old in text
    file.path.write_text(text.replace(old, new))
    for use in (file.read, lambda: file.add([1], 10)):
        with pytest.raises(MemraError, match=f"(?s)corrupt.*{what}.*delete it"):
            use()
    assert file.path.read_text() == text.replace(old, new), "a refused file is left alone"


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = sidecar(tmp_path)
    file.path.write_bytes(b"\xff\x00")
    with pytest.raises(MemraError, match="corrupt"):
        file.read()


def test_a_file_of_another_head_is_refused(tmp_path: Path) -> None:
    file = sidecar(tmp_path)
    file.add([5, 9, 7], 10)
    for other in (replace(file, ranks="b" * 64), replace(file, vocab=5000)):
        with pytest.raises(MemraError, match="foreign"):
            other.read()
        with pytest.raises(MemraError, match="foreign"):
            other.add([1], 10)


def test_ids_twice_or_outside_are_refused_even_with_a_right_digest(tmp_path: Path) -> None:
    file = sidecar(tmp_path)
    for ids in ([5, 5], [4096]):
        file._replace(ids)
        with pytest.raises(MemraError, match="twice or outside"):
            file.read()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(MemraError, match="cannot save what was learned"):
        sidecar(tmp_path / "none").add([1], 10)


def _add_one_by_one(folder: Path, start: int) -> None:
    for i in range(EACH):
        sidecar(folder).add([start + i], PROCESSES * EACH)


def test_no_process_loses_what_another_has_learned(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_add_one_by_one, args=(tmp_path, 1000 * i)) for i in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    wanted = {1000 * i + j for i in range(PROCESSES) for j in range(EACH)}
    assert set(sidecar(tmp_path).read()) == wanted
    assert [p.name for p in tmp_path.iterdir()] == ["ranks.txt.learned"]

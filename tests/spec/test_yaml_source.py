"""YAML 1.2 scalars, positions of keys and values, and files that are no YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from memra_compiler.spec.yaml_source import plain_scalar, read_yaml
from memra_runtime.errors import MemraError, Position

SCALARS = [
    ("1e-5", 1e-5), ("1E3", 1000.0), ("-.5", -0.5), ("3.", 3.0), ("12", 12), ("-7", -7), ("+7", 7),
    ("010", 10), ("0o17", 15), ("0xff", 255), ("1_000", "1_000"), ("1:30", "1:30"), ("off", "off"),
    ("yes", "yes"), ("No", "No"), ("true", True), ("FALSE", False), ("tRue", "tRue"), ("~", None),
    ("", None), ("Null", None), ("2026-01-01", "2026-01-01"), ("=", "="), ("1.2.3", "1.2.3"),
    (".inf", float("inf")), ("-.inf", float("-inf")), ("9" * 200, "9" * 200), ("e5", "e5"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_plain_scalar_follows_yaml_1_2(text: str, value: object) -> None:
    found = plain_scalar(text)

    assert (found, type(found)) == (value, type(value))


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_positions_of_keys_and_values(tmp_path: Path) -> None:
    text = "# first\na: 1\nb:\n  - {c: é, d: [x, yes]}\n"
    document = read_yaml(write(tmp_path, text), "a.yaml")

    assert document.data == {"a": 1, "b": [{"c": "é", "d": ["x", "yes"]}]}
    assert document.keys[("b", 0, "d")].place == Position("a.yaml", 4, 12)
    assert document.values[("b", 0, "d", 1)].place == Position("a.yaml", 4, 19)
    assert document.values[("b", 0, "d", 1)].width == 3
    assert document.values[("a",)].source == "a: 1"


def test_quotes_keep_text_and_aliases_repeat_a_value(tmp_path: Path) -> None:
    document = read_yaml(write(tmp_path, "a: \"1\"\nb: &x {c: 2}\nd: *x\ne: 'null'\n"))

    assert document.data == {"a": "1", "b": {"c": 2}, "d": {"c": 2}, "e": "null"}
    assert document.values[("d", "c")].place == document.values[("b", "c")].place


def test_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    document = read_yaml(write(tmp_path, b"\xef\xbb\xbfa: 1\r\nb: two\r\n"))

    assert document.data == {"a": 1, "b": "two"}


def test_value_that_contains_itself_is_reported(tmp_path: Path) -> None:
    document = read_yaml(write(tmp_path, "a: &x [*x]\n"))

    assert [found.message for found in document.problems] == ["this value contains itself"]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (b"a: \xff\xfe\n", "encoding", "this file is not UTF-8 text: byte 3 is 0xff"),
        (b"a: 1\x00\n", "yaml", "this is not YAML text: it has a control character"),
        (b"a: b: c\n", "yaml", "not valid YAML: mapping values are not allowed in this context"),
        (b"? [a]\n: 1\n", "yaml", "a key must be a name"),
        (b"a: " + b"[" * 70 + b"]" * 70, "yaml", "this file is nested too deeply or too large"),
        (b"[" * 5000, "yaml", "not valid YAML"),
    ],
)
def test_unreadable_text_is_one_clear_error(
    tmp_path: Path, text: bytes, code: str, message: str
) -> None:
    try:
        problems = tuple(read_yaml(write(tmp_path, text)).problems)
    except MemraError as error:
        problems = error.diagnostics

    assert [found.code for found in problems] == [code]
    assert message in problems[0].message


def test_aliases_cannot_blow_a_file_up(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]

    with pytest.raises(MemraError, match="nested too deeply or too large"):
        read_yaml(write(tmp_path, "\n".join(lines)))


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "near.yaml").write_text("a: 1\n")

    with pytest.raises(MemraError) as caught:
        read_yaml(tmp_path / "far.yaml", "far.yaml")

    assert str(caught.value) == (
        "error[no-file]: there is no such spec file\n"
        "  --> far.yaml\n"
        "hint: spec files in that folder: near.yaml"
    )


def test_folder_is_not_a_spec(tmp_path: Path) -> None:
    with pytest.raises(MemraError, match="this is a folder, not a spec file"):
        read_yaml(tmp_path)

"""Every --help ends with an example that works from the root of the repository."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from cli_tools import MODULES, ROOT, call, launch


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose cache the examples share."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("command", MODULES)
def test_help_shows_defaults_and_an_example_that_works(
    command: str, home: Path, tmp_path: Path
) -> None:
    shown = call(command, "--help")
    assert (shown.code, shown.err) == (0, "")
    if command != "memra-inspect":
        assert "[default: " in shown.out
    _, _, end = shown.out.partition("Example, from the root of the repository:\n")
    examples = [line.strip() for line in end.splitlines() if line.startswith("    memra-")]
    assert examples
    os.symlink(ROOT / "model_specs", tmp_path / "model_specs")  # the rest is written beside it
    for example in examples:
        name, *typed = shlex.split(example)
        ended = launch(name, *typed, cwd=tmp_path, env={"HOME": str(home)})
        assert (ended.code, bool(ended.out)) == (0, True), ended.err


@pytest.mark.parametrize("command", MODULES)
def test_version_is_told(command: str) -> None:
    assert call(command, "--version").out == f"{command} 0.1.0\n"

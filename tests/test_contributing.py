"""The example of CONTRIBUTING.md is real: the patch applies, and the suite checks the new kind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATCH = ROOT / "docs" / "examples" / "gated_attention.patch"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the example needs, with the patch applied."""
    copy = tmp_path_factory.mktemp("contributing")
    ignore = shutil.ignore_patterns("__pycache__", "*.gguf")
    for part in ("memra_compiler", "runtime", "schedules", "tests/layers", "tests/ops"):
        shutil.copytree(ROOT / part, copy / part, ignore=ignore)
    for file in ("pyproject.toml", "tests/conftest.py", "tests/tiny_pair.py"):
        shutil.copy(ROOT / file, copy / file)
    applied = subprocess.run(
        ["git", "apply", str(PATCH)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr
    return copy


def test_patch_adds_one_layer_and_one_op() -> None:
    added = [line[6:] for line in PATCH.read_text().splitlines() if line.startswith("+++ b/")]
    assert added == [
        "memra_compiler/layers/gated_attention.py",
        "memra_compiler/ops/sigmoid_mul.py",
    ]


def test_suite_checks_the_new_kind_without_a_list(patched: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "gated_attention or sigmoid_mul",
               "-p", "no:cacheprovider", "tests/layers", "tests/ops"]  # fmt: skip
    places = ":".join(str(patched / part) for part in ("", "runtime", "schedules"))
    environment = {"PYTHONPATH": places, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=patched, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "no tests ran" not in done.stdout


def test_page_shows_the_patch() -> None:
    """The lines shown in CONTRIBUTING.md are those of the patch."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    shown = page.split("```python\n", 1)[1].split("```", 1)[0].strip().splitlines()
    patch = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith("+")]
    assert all(line in patch for line in shown)

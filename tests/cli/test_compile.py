"""memra-compile: output, progress, and that a second run has nothing to do."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
from cli_tools import DRAFT, SPEC, TARGET, call, launch

from memra_runtime.artifact import load_manifest


def test_compile_prints_only_the_path_on_stdout(tmp_path: Path, kernel_cache: Path) -> None:
    folder = tmp_path / "a.cpu.memra"
    first = call("memra-compile", SPEC, "-o", folder, "--cache", kernel_cache)
    assert (first.code, first.out) == (0, f"{folder}\n")
    labels = [line.split()[0] for line in first.err.splitlines()]
    assert labels == ["plan", "lower", "link", "target", "kernels", "arena", "weights", "largest"]
    count = len(load_manifest(folder).kernels)
    assert f"lower    {count} kernels, " in first.err
    second = call("memra-compile", SPEC, "-o", folder, "--cache", kernel_cache)
    assert (second.code, second.out) == (0, f"{folder}\n")
    assert f"kernels  {count}: up to date" in second.err


def test_quiet_compile_says_nothing_on_stderr(tmp_path: Path, kernel_cache: Path) -> None:
    ended = call("memra-compile", SPEC, "-o", tmp_path / "a", "--cache", kernel_cache, "--quiet")
    assert (ended.code, ended.out, ended.err) == (0, f"{tmp_path / 'a'}\n", "")


def test_compile_json_names_artifact_and_weights(tmp_path: Path, kernel_cache: Path) -> None:
    folder = tmp_path / "a"
    ended = call("memra-compile", SPEC, "-o", folder, "--cache", kernel_cache, "--json")
    expected = {
        "artifact": str(folder), "fresh": True, "weights": str(TARGET), "draft": str(DRAFT)
    }  # fmt: skip
    assert json.loads(ended.out) == expected


def test_set_changes_the_artifact(tmp_path: Path, kernel_cache: Path) -> None:
    folder = tmp_path / "a"
    ended = call(
        "memra-compile", SPEC, "-o", folder, "--cache", kernel_cache,
        "--set", "round.depth.max=2", "--set", "runtime.max_context=512",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    spec = load_manifest(folder).spec
    assert (spec["round"]["depth"]["max"], spec["runtime"]["max_context"]) == (2, 512)


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.alone
def test_second_compile_does_no_work_and_is_quick(tmp_path: Path, kernel_cache: Path) -> None:
    typed = (SPEC, "-o", tmp_path / "a", "--cache", kernel_cache)
    assert launch("memra-compile", *typed).code == 0
    files = times(tmp_path), times(kernel_cache)
    used, walls = resource.getrusage(resource.RUSAGE_CHILDREN), []
    for _ in range(2):
        start = time.perf_counter()
        assert "up to date" in launch("memra-compile", *typed).err
        walls.append(time.perf_counter() - start)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (times(tmp_path), times(kernel_cache)) == files
    assert min(walls) < 2.0
    assert (now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) / 2 < 2.0


def test_compile_refuses_without_the_compilers_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ("memra_compiler", "a_package_that_is_not_there")
    monkeypatch.setattr("memra_runtime.cli.app._COMPILER_NEEDS", needs)
    for command, rest in (("memra-compile", ()), ("memra-run", ("-p", "a")), ("memra-inspect", ())):
        ended = call(command, SPEC, *rest)
        assert ended.code == 2
        assert ended.err == (
            "error[no-compiler]: compiling needs the compiler, and `a_package_that_is_not_there` "
            "is not installed\n"
            'hint: install it: pip install "memra[compile]"\n'
            "hint: or give an artifact (NAME.TARGET.memra) that was compiled elsewhere\n"
        )

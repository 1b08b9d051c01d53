"""The artifact: what is in it, when it is built again, and that it is whole or absent."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memra_compiler.codegen import build
from memra_compiler.codegen.cache import KernelCache
from memra_compiler.codegen.kernels import Progress
from memra_compiler.codegen.toolchain import Linker
from memra_compiler.compile import CompileOptions, compile_spec, load, lower, spec_facts
from memra_compiler.ir.text import parse_module
from memra_compiler.ops.base import discover
from memra_runtime.artifact import load_manifest
from memra_runtime.errors import MemraError

SPEC = Path(__file__).parent.parent.parent / "model_specs" / "tiny" / "gemma4_tiny.yaml"

#: Conversions of half precision that LLVM may call; defined weakly in every object that does.
HELPERS = {"__extendhfsf2", "__truncsfhf2"}


@pytest.fixture
def options(kernel_cache: Path) -> CompileOptions:
    """Options whose kernels the bundled artifact has compiled already."""
    return CompileOptions(cache=kernel_cache)


@pytest.fixture
def copy(tiny_artifact: Path, tmp_path: Path) -> Path:
    """An artifact of the bundled spec that a test may break."""
    folder = tmp_path / "tiny.cpu.memra"
    shutil.copytree(tiny_artifact, folder)
    return folder


def stopped(by: type[BaseException]) -> Progress:
    """A progress report that stops the build at its first kernel."""

    def progress(*_: object) -> None:
        raise by

    return progress


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its relative name."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_every_kernel_and_program_has_its_source(tiny_artifact: Path) -> None:
    manifest = load_manifest(tiny_artifact)
    sources = {p.name for p in (tiny_artifact / "sources").iterdir()}
    assert sources == {f"{kernel}.tir" for kernel in manifest.kernels} | {"programs.tir"}
    text = (tiny_artifact / "sources" / "programs.tir").read_text()
    for name in (*manifest.sequences, *(f"run_{p.name}" for p in manifest.programs)):
        assert f"def {name}(arena: T.handle, weights: T.handle)" in text


def test_library_exports_the_programs_and_sequences(tiny_artifact: Path) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    manifest = load_manifest(tiny_artifact)
    command = [nm, "-D", "--defined-only", "--format=posix", str(tiny_artifact / build.LIBRARY)]
    listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    symbols = {line.split()[0] for line in listing.splitlines()}
    entries = {s.removeprefix("__tvm_ffi_") for s in symbols if s.startswith("__tvm_ffi_")}
    assert entries == {*manifest.sequences, *(f"run_{p.name}" for p in manifest.programs)}
    others = {s for s in symbols if not s.startswith("__tvm_ffi_")}
    assert others - HELPERS == set(manifest.kernels)


def test_artifact_holds_its_module(tiny_artifact: Path) -> None:
    spec, files = load(SPEC, CompileOptions())
    text = (tiny_artifact / build.IR_TEXT).read_text(encoding="utf-8")
    assert parse_module(text, discover()) == build.without_folders(lower(spec, files))


def test_manifest_agrees_with_the_module(tiny_artifact: Path) -> None:
    manifest = load_manifest(tiny_artifact)
    module = lower(*load(SPEC, CompileOptions()))
    assert [w.id for w in manifest.weights] == list(module.weights)
    assert {p.id: p.offset for p in manifest.planes} == {
        n: module.arena[f"@{n}"] for n in module.planes
    }
    assert manifest.arena_bytes == module.arena[""]
    assert {p.name: p.fault for p in manifest.programs} == {
        p.name: p.fault for p in module.programs.values()
    }
    assert set(manifest.kernels) == {node.kernel for _, node in module.nodes()}


def test_second_compile_does_no_work(copy: Path, options: CompileOptions) -> None:
    def facts() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in copy.rglob("*")}

    before = facts()
    compiled = compile_spec(SPEC, copy, options, stopped(AssertionError))
    assert not compiled.fresh
    assert facts() == before


def test_other_folder_links_known_kernels_to_the_same_bytes(
    tiny_artifact: Path, tmp_path: Path, options: CompileOptions
) -> None:
    told: list[bool] = []
    folder = tmp_path / "other.memra"
    compiled = compile_spec(SPEC, folder, options, lambda *event: told.append(bool(event[3])))
    assert compiled.fresh
    assert told
    assert all(told)
    assert tree(folder) == tree(tiny_artifact)


@pytest.mark.parametrize("name", [build.LIBRARY, build.IR_TEXT, "manifest.json"])
def test_damaged_artifact_is_built_again(
    name: str, copy: Path, tiny_artifact: Path, options: CompileOptions
) -> None:
    with (copy / name).open("ab") as file:
        file.write(b"\0damage")
    assert compile_spec(SPEC, copy, options).fresh
    assert tree(copy) == tree(tiny_artifact)


def test_changed_spec_is_built_again(copy: Path, options: CompileOptions) -> None:
    spec = copy.parent / "tiny.yaml"
    text = SPEC.read_text().replace("weights: gemma4", f"weights: {SPEC.parent}/gemma4")
    spec.write_text(text.replace("initial: 1", "initial: 1").replace("max: 5", "max: 4"))
    before = load_manifest(copy)
    compiled = compile_spec(spec, copy, options)
    assert compiled.fresh
    assert compiled.manifest.spec_digest != before.spec_digest


def test_old_content_does_not_survive(copy: Path, options: CompileOptions) -> None:
    (copy / "sources" / "forgotten.tir").write_text("old")
    (copy / build.LIBRARY).unlink()
    compile_spec(SPEC, copy, options)
    assert not (copy / "sources" / "forgotten.tir").exists()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_stopped_build_leaves_nothing(
    stop: type[BaseException], tmp_path: Path, options: CompileOptions
) -> None:
    with pytest.raises(stop):
        compile_spec(SPEC, tmp_path / "deep" / "new.memra", options, stopped(stop))
    assert [p for p in tmp_path.rglob("*") if p.name != "deep"] == []


def test_stopped_build_leaves_the_old_artifact(copy: Path, options: CompileOptions) -> None:
    (copy / build.LIBRARY).write_bytes(b"damaged")
    before = tree(copy)
    with pytest.raises(KeyboardInterrupt):
        compile_spec(SPEC, copy, options, stopped(KeyboardInterrupt))
    assert tree(copy) == before
    assert list(copy.parent.iterdir()) == [copy]


def test_failed_link_leaves_nothing(tmp_path: Path, kernel_cache: Path) -> None:
    spec, files = load(SPEC, CompileOptions())
    tools = build.Toolchain(Linker(("false",), ()), KernelCache(kernel_cache))
    with pytest.raises(MemraError, match="failed"):
        build.build_artifact(
            lower(spec, files), spec_facts(spec), tmp_path / "a.memra", tools, lambda *_: None
        )
    assert list(tmp_path.iterdir()) == []


def test_build_leaves_only_the_artifact(tmp_path: Path, options: CompileOptions) -> None:
    compile_spec(SPEC, tmp_path / "a.memra", options)
    (tmp_path / "a.memra" / build.LIBRARY).unlink()
    compile_spec(SPEC, tmp_path / "a.memra", options)
    assert [p.name for p in tmp_path.iterdir()] == ["a.memra"]


def test_foreign_folder_is_left_alone(tmp_path: Path, options: CompileOptions) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(MemraError, match="exists and is not an artifact; it is left alone"):
        compile_spec(SPEC, folder, options)
    assert tree(tmp_path) == {"photos/cat.jpg": b"meow"}


def test_file_in_the_way_is_left_alone(tmp_path: Path, options: CompileOptions) -> None:
    place = tmp_path / "note.memra"
    place.write_text("mine")
    with pytest.raises(MemraError, match="exists and is not an artifact"):
        compile_spec(SPEC, place, options)
    assert place.read_text() == "mine"


def test_empty_folder_is_filled(tmp_path: Path, options: CompileOptions) -> None:
    (tmp_path / "empty.memra").mkdir()
    assert compile_spec(SPEC, tmp_path / "empty.memra", options).fresh

"""The kernel cache: what makes a kernel another kernel, and that a known one is never compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import memra_compiler
from memra_compiler.codegen import cache, kernels
from memra_compiler.codegen.cache import KernelCache, compiler_digest, content_key
from memra_compiler.codegen.cpu import KernelSpec, compile_kernel
from memra_compiler.codegen.toolchain import host_cpu
from memra_compiler.ir.graph import Module
from memra_compiler.ir.text import parse_module
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.activation import Add
from memra_compiler.ops.base import discover
from memra_compiler.passes.select_kernels import select_kernels
from memra_runtime import artifact

TEXT = """\
module toy
weight $t : f32[8, 32] from target "t"
weight $w : FORMAT[64, 32] from target "w"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
program p rows T<=4 from rows {
  %ids : i32[T<=4] = read_tokens(@batch, @state) {chain = False, limit = 4} label "ids"
  %x : f32[T<=4, 32] = embed(%ids, $t) {scale = 1.0} label "x"
  %y : f32[T<=4, 64] = linear(%x, $w) label "y"
  %z : f32[T<=4, 64] = linear(%x, $w) label "z"
}
"""
X = TensorType((Sym("T", 16), 64))
ADD = KernelSpec("add_test", Add(), (X, X, X), 0)


def toy(format: str = "q8_0") -> Module:
    return select_kernels(parse_module(TEXT.replace("FORMAT", format), discover()))


class Compiler:
    """Stands for `compile_kernel` and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, spec: KernelSpec, cpu: str) -> tuple[bytes, str]:
        self.asked.append(spec.op.name)
        return f"{spec.symbol} {cpu}".encode(), f"# {spec.symbol}"

    def run(self, module: Module, folder: Path, cpu: str = "here") -> list[tuple[str, bool]]:
        """Compile a module; returns each kernel's op and whether it came from the cache."""
        self.asked.clear()
        told: list[tuple[str, bool]] = []
        result = kernels.compile_kernels(
            module,
            cpu,
            KernelCache(folder),
            lambda name, done, total, cached: told.append((name.split("_")[0], cached)),
        )
        assert [k.name for k in result] == list(kernels.kernel_specs(module))
        assert all(k.object.read_bytes() == f"{k.name} {cpu}".encode() for k in result)
        return told


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(kernels, "compile_kernel", compiler)
    return compiler


def test_equal_nodes_share_a_kernel(compiler: Compiler, tmp_path: Path) -> None:
    compiler.run(toy(), tmp_path)
    assert compiler.asked == ["read_tokens", "embed", "linear"]


def test_second_compile_compiles_nothing(compiler: Compiler, tmp_path: Path) -> None:
    first = compiler.run(toy(), tmp_path)
    second = compiler.run(toy(), tmp_path)
    assert compiler.asked == []
    assert [cached for _, cached in first] == [False] * 3
    assert [cached for _, cached in second] == [True] * 3


def test_other_types_compile_what_reads_them(compiler: Compiler, tmp_path: Path) -> None:
    compiler.run(toy(), tmp_path)
    compiler.run(toy("q4_0"), tmp_path)
    assert compiler.asked == ["linear"]


def test_other_row_bound_compiles_nothing(compiler: Compiler, tmp_path: Path) -> None:
    compiler.run(toy(), tmp_path)
    wider = TEXT.replace("T<=4", "T<=9").replace("limit = 4", "limit = 9")
    wider = wider.replace("FORMAT", "q8_0")
    compiler.run(select_kernels(parse_module(wider, discover())), tmp_path)
    assert compiler.asked == []


def test_other_processor_compiles_everything(compiler: Compiler, tmp_path: Path) -> None:
    compiler.run(toy(), tmp_path)
    compiler.run(toy(), tmp_path, cpu="elsewhere")
    assert len(compiler.asked) == 3


def test_other_compiler_compiles_everything(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.run(toy(), tmp_path)
    monkeypatch.setattr(cache, "compiler_digest", lambda: "changed")
    compiler.run(toy(), tmp_path)
    assert len(compiler.asked) == 3


def test_half_an_entry_is_compiled_again(compiler: Compiler, tmp_path: Path) -> None:
    compiler.run(toy(), tmp_path)
    next((tmp_path / "kernels").rglob("*.o")).unlink()
    compiler.run(toy(), tmp_path)
    assert len(compiler.asked) == 1


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources that the compiler's digest looks at."""
    root = Path(memra_compiler.__file__).parent
    for package in ("ops", "codegen", "ir", "passes"):
        shutil.copytree(root / package, tmp_path / package)
    shutil.copy(artifact.__file__, tmp_path / "artifact.py")
    monkeypatch.setattr(memra_compiler, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(artifact, "__file__", str(tmp_path / "artifact.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("ops/linear.py", True),
        ("codegen/cpu.py", True),
        ("ir/types.py", True),
        ("artifact.py", True),  # the slots of the device block are compiled into kernels
        ("passes/plan_memory.py", False),  # its result is in the text of the module
    ],
)
def test_source_decides_the_key(sources: Path, file: str, counts: bool) -> None:
    before = compiler_digest.__wrapped__()
    with (sources / file).open("a") as out:
        out.write("# changed\n")
    assert (compiler_digest.__wrapped__() != before) == counts


def test_new_op_file_changes_the_key(sources: Path) -> None:
    before = compiler_digest.__wrapped__()
    (sources / "ops" / "another.py").write_text("")
    assert compiler_digest.__wrapped__() != before


def test_key_separates_its_parts() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("a") == content_key("a")


def test_entry_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KernelCache(tmp_path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("abcd", ".o", b"half")
    assert store.get("abcd", ".o") is None
    monkeypatch.undo()
    store.put("abcd", ".o", b"whole")
    assert store.get("abcd", ".o") == b"whole"
    assert store.get("abcd", ".tir") is None


def test_object_bytes_are_deterministic() -> None:
    """Same input, same bytes: in this process, and in others whatever they hash strings to."""
    code, text = compile_kernel(ADD, host_cpu())
    assert (code, text) == compile_kernel(ADD, host_cpu())
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_kernel_cache import ADD, compile_kernel, host_cpu\n"
        "sys.stdout.buffer.write(compile_kernel(ADD, host_cpu())[0])\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(command, capture_output=True, check=True, env=env)
    assert other.stdout == code


def test_source_of_a_kernel_is_readable() -> None:
    _, text = compile_kernel(replace(ADD, symbol="named"), host_cpu())
    assert "def named(rows: T.int32" in text
    assert str(Path.home()) not in text

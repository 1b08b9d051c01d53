"""CUDA artifacts without a GPU: what is in them, and that verify and the plain step run the same
kernels."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
import pytest

from memra_compiler.codegen import cuda_tools
from memra_compiler.codegen.cuda import KernelError, compile_cuda, render
from memra_compiler.compile import CompileOptions, compile_spec, load, lower
from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_linear import LinearParams, PlainParams
from memra_compiler.ops.cuda_state import NoParams, PositionsParams, positions_launches
from memra_compiler.ops.cuda_wide import WideParams
from memra_compiler.ops.linear import PRODUCTS
from memra_compiler.ops.state import Positions
from memra_runtime.artifact import STATE, LaunchEntry, Manifest, load_manifest
from memra_runtime.errors import MemraError

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "model_specs" / "tiny" / "gemma4_tiny.yaml"
OVERRIDES = {"runtime.activations": "int8", "runtime.kv": "f16"}

#: What may differ between the attentions of one row and of several: how many rows and pairs a block
#: takes, and what follows from it. All else decides bits.
ROW_LINES = re.compile(
    r"// attention: |extern \"C\"|kMaxRows = |// rows of a step|// tiles of 16|<= \d+\);$"
)


def options(arch: str, cache: Path) -> CompileOptions:
    return CompileOptions(target=f"cuda:{arch}", overrides=OVERRIDES, cache=cache)


@cache
def module(arch: str) -> Module:
    """What the artifact of `arch` was generated from."""
    target = f"cuda:{arch}"
    spec, files = load(TINY, CompileOptions(target=target, overrides=OVERRIDES))
    return lower(spec, files, target=target)


@dataclass(frozen=True)
class Built:
    """A CUDA artifact of the bundled spec."""

    arch: str
    folder: Path
    manifest: Manifest
    cache: Path

    def launches(self) -> Iterator[LaunchEntry]:
        for entries in self.manifest.launches.values():
            yield from entries
        yield from self.manifest.repacks

    def source(self, symbol: str) -> str:
        return (self.folder / "sources" / f"{symbol}.cu").read_text(encoding="utf-8")

    def cubin(self, symbol: str) -> bytes:
        return (self.folder / "kernels" / f"{symbol}.cubin").read_bytes()


@pytest.fixture(scope="module", params=ARCHS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> Built:
    """The artifact of each architecture, compiled once."""
    folder = tmp_path_factory.mktemp("cuda") / f"tiny.{request.param}.memra"
    compile_spec(TINY, folder, options(request.param, kernel_cache))
    return Built(request.param, folder, load_manifest(folder), kernel_cache)


def test_every_launch_has_its_cubin_and_source(built: Built) -> None:
    used = {entry.symbol for entry in built.launches()}
    assert used == set(built.manifest.kernels)
    assert {p.stem for p in (built.folder / "kernels").iterdir()} == used
    assert {p.stem for p in (built.folder / "sources").iterdir()} == used
    assert set(built.manifest.files) == {*(f"kernels/{s}.cubin" for s in used), "module.mir"}
    for symbol in used:
        cubin = built.cubin(symbol)
        assert cubin[:4] == b"\x7fELF"
        assert symbol.encode() in cubin


def test_every_operand_lies_where_the_module_put_it(built: Built) -> None:
    manifest = built.manifest
    for entry in built.launches():
        for kind, place in entry.operands:
            if kind == "weight":
                assert 0 <= place < len(manifest.weights)
            elif kind == "graph":  # the two conditional nodes of a burst
                assert entry.symbol.startswith("again_")
                assert place in (0, 1)
            else:
                assert kind == "arena"
                assert 0 <= place < manifest.arena_bytes
                assert place % 64 == 0
    for program in module(built.arch).programs.values():
        for name, type in program.values.items():
            end = module(built.arch).arena[f"{program.name}/%{name}"] + type.nbytes
            assert end <= manifest.arena_bytes
    ids = {w.id for w in manifest.weights}
    assert {entry.weight for entry in manifest.repacks} <= ids
    assert all(w.device_bytes >= 0 for w in manifest.weights)
    assert manifest.weight_bytes == sum(w.device_bytes for w in manifest.weights)


def test_launches_of_a_program_state_its_bytes_once(built: Built) -> None:
    for program in built.manifest.programs:
        entries = built.manifest.launches[program.name]
        assert sum(entry.bytes for entry in entries) == program.bytes
    assert all(entry.bytes == 0 for entry in built.manifest.repacks)


def test_every_program_says_where_its_rows_come_from(built: Built) -> None:
    manifest = built.manifest
    assert set(manifest.rows_from) == set(manifest.launches) == {p.name for p in manifest.programs}
    assert set(manifest.rows_from.values()) <= {"", *STATE}
    assert {manifest.rows_from[name] for name in ("verify", "prefill")} == {"rows"}


def test_verify_runs_the_kernels_of_the_plain_step(built: Built) -> None:
    """Node by node the same machine code, or an attention that differs in row limits only."""
    plain, verify = (built.manifest.launches[name] for name in ("plain_step", "verify"))
    rows = module(built.arch).programs["verify"].rows.bound
    for one, many in zip(plain, verify, strict=True):
        assert one.block == many.block
        if one.symbol == many.symbol:
            assert one.shared_bytes == many.shared_bytes
        else:
            assert one.symbol.split("_")[:-1] == many.symbol.split("_")[:-1] == ["attention"]
            ours, theirs = (built.source(e.symbol).splitlines() for e in (one, many))
            for a, b in zip(ours, theirs, strict=True):
                assert a == b or (ROW_LINES.search(a) and ROW_LINES.search(b)), (a, b)
        if one.symbol.startswith(("linear", "gated_linear")):
            assert one.grid == many.grid
        else:  # a grid may have more blocks for more rows, and no other reason to differ
            for few, more in zip(one.grid, many.grid, strict=True):
                assert few <= more <= few * rows
        weights = [[o for o in e.operands if o[0] == "weight"] for e in (one, many)]
        assert weights[0] == weights[1]


def products(of: Module) -> Iterator[tuple[Program, Node, TensorType]]:
    """Every output of a matrix product."""
    for program, node in of.nodes():
        if isinstance(node.op, PRODUCTS):
            yield from ((program, node, program.values[name]) for name in node.outputs)


def test_planes_are_left_only_to_readers_that_add_them(built: Built) -> None:
    some = False
    for program, node, type in products(module(built.arch)):
        assert type.layout.startswith("planes")
        names = {f"%{name}" for name in node.outputs}
        operands = [
            (reader.op, reader.op.operand(i).name)
            for reader in program.nodes
            for i, operand in enumerate(reader.inputs)
            if operand in names
        ]
        added = all(operand in op.adds_planes for op, operand in operands)
        if not added or names & {f"%{name}" for name in program.results}:
            assert type.layout == "planes1"
        some |= type.planes > 1
    assert some, "no product splits K: the test sees nothing"


def test_kernels_leave_as_many_planes_as_their_readers_expect(built: Built) -> None:
    arch = ARCHS[built.arch]
    for program, node, type in products(module(built.arch)):
        types = module(built.arch).operand_types(program, node)
        outputs = tuple(program.values[name] for name in node.outputs)
        for launch in node.op.lower_cuda(arch, *types, *outputs):
            if isinstance(launch.params, LinearParams | WideParams):
                assert launch.params.geometry.splits == type.planes
            else:
                assert isinstance(launch.params, PlainParams)
                assert type.planes == 1


def test_sources_say_what_they_are_and_name_no_folder(built: Built) -> None:
    for symbol in built.manifest.kernels:
        text = built.source(symbol)
        first, second, *_ = text.splitlines()
        if symbol.startswith("repack_"):
            assert re.fullmatch(r"// repack \w+\[[\d, ]+\] tiles16", first)
        else:
            op = symbol.rpartition("_")[0]
            assert re.fullmatch(rf"// {op}: .*\w+\[.*", first), first
            assert re.fullmatch(r"// first used by [\w.]+( at gemma4_tiny\.yaml:\d+:\d+)?", second)
        assert text.count(f"{symbol}(") == 1
        for folder in (ROOT, Path.home(), built.folder.parent):
            assert str(folder) not in text
            assert str(folder).encode() not in built.cubin(symbol)
        assert all(len(line) <= 100 for line in text.splitlines()[2:])


def test_float_activations_read_weights_as_stored(kernel_cache: Path, tmp_path: Path) -> None:
    """No kernel reads tiles for them: nothing is repacked, and prompts have TVM's products."""
    plain = {"runtime.activations": "f32"}
    made = CompileOptions(target="cuda:sm_90a", overrides=plain, cache=kernel_cache)
    manifest = compile_spec(TINY, tmp_path / "f32.memra", made).manifest
    assert manifest.repacks == ()
    for program, rule in (("prefill", True), ("plain_step", False), ("verify", False)):
        entries = [e for e in manifest.launches[program] if "linear" in e.symbol]
        texts = [(tmp_path / "f32.memra/sources" / f"{e.symbol}.cu").read_text() for e in entries]
        assert texts
        assert all(("memra_schedules/gemm.py" in text) == rule for text in texts), program


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_second_build_compiles_nothing_and_is_the_same(built: Built, tmp_path: Path) -> None:
    told: list[bool] = []
    again = tmp_path / "again.memra"
    made = options(built.arch, built.cache)
    compiled = compile_spec(TINY, again, made, lambda *event: told.append(event[3]))
    assert compiled.fresh
    assert len(told) == len(built.manifest.kernels)
    assert all(told)
    assert tree(again) == tree(built.folder)
    assert not compile_spec(TINY, again, made, lambda *_: pytest.fail("work was done")).fresh


def test_cold_build_elsewhere_has_the_same_bytes(
    kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever folder it is run from: neither sources nor cubins know where they were made."""
    known = compile_spec(TINY, tmp_path / "known.memra", options("sm_90a", kernel_cache))
    monkeypatch.chdir(tmp_path)
    told: list[bool] = []
    cold = options("sm_90a", tmp_path / "cache")
    other = compile_spec(TINY, Path("other.memra"), cold, lambda *event: told.append(event[3]))
    assert not any(told)
    assert tree(other.folder) == tree(known.folder)


def test_unchanged_artifact_is_known_without_tvm(kernel_cache: Path, tmp_path: Path) -> None:
    """Importing TVM takes a second: what is up to date is not scheduled again."""
    compile_spec(TINY, tmp_path / "a.memra", options("sm_90a", kernel_cache))
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from memra_compiler.compile import CompileOptions, compile_spec\n"
        f"made = CompileOptions(target='cuda:sm_90a', overrides={OVERRIDES!r}, "
        f"cache=Path({str(kernel_cache)!r}))\n"
        f"done = compile_spec(Path({str(TINY)!r}), Path({str(tmp_path / 'a.memra')!r}), made)\n"
        "print(done.fresh, 'tvm' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("part", ["templates_digest", "rules_digest"])
def test_changed_template_or_rule_is_an_artifact_out_of_date(
    kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    made = options("sm_90a", kernel_cache)
    compile_spec(TINY, tmp_path / "a.memra", made)
    monkeypatch.setattr(cuda_tools, part, lambda: "changed")
    told: list[bool] = []
    assert compile_spec(TINY, tmp_path / "a.memra", made, lambda *e: told.append(e[3])).fresh
    assert all(told), "the kernels themselves are known by their text"


# -- rendering and compiling -----------------------------------------------------------------------


def test_wrong_template_variable_is_refused() -> None:
    (launch,) = positions_launches(Positions("rows"), ARCHS["sm_80"])
    assert isinstance(launch.params, PositionsParams)
    with pytest.raises(jinja2.UndefinedError, match="'kind' is undefined"):
        render(dataclasses.replace(launch, params=NoParams()), "positions")


def test_compile_error_names_its_kernel_and_line() -> None:
    source = 'extern "C" __global__ void norm_1() {\n  nonsense;\n}\n'
    with pytest.raises(KernelError) as error:
        compile_cuda(source, "norm_1", ARCHS["sm_89"])
    assert str(error.value).startswith("norm_1 does not compile for sm_89:\nnorm_1.cu(2): error:")
    assert "nonsense" in str(error.value)


def test_missing_compiler_is_an_error_of_the_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MemraError) as error:
        compile_spec(TINY, tmp_path / "a.memra", options("sm_90a", tmp_path))
    assert str(error.value) == (
        "error[no-nvrtc]: compiling for CUDA needs the NVRTC wheels, which are not installed\n"
        'hint: pip install "memra[cuda]"'
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.alone
def test_31b_compiles_in_a_minute_and_again_in_seconds(tmp_path: Path) -> None:
    spec, made = ROOT / "model_specs" / "gemma4_31b.yaml", options("sm_90a", tmp_path / "cache")
    start = time.perf_counter()
    cold = compile_spec(spec, tmp_path / "cold.memra", made)
    middle = time.perf_counter()
    warm = compile_spec(spec, tmp_path / "cold.memra", made)
    end = time.perf_counter()
    assert cold.fresh
    assert not warm.fresh
    assert middle - start < 60
    assert end - middle < 3

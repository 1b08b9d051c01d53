"""Who may import whom, and what every module owes its reader. The rules are tables."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memra_compiler.ops.base import discover
from memra_compiler.passes.pipeline import PASSES

ROOT = Path(__file__).parent.parent
PACKAGES = {"memra_compiler": ROOT, "memra_runtime": ROOT / "runtime"}

#: Of the runtime, the compiler sees only this: the format where the two meet.
MEETING = {"memra_runtime.artifact", "memra_runtime.errors", "memra_runtime.checkpoint"}

#: Area -> areas it may import, besides itself. `*`: anything but a `cli`.
MAY_IMPORT: dict[str, set[str]] = {
    "memra_compiler.ir": MEETING,
    "memra_compiler.ops": MEETING | {"memra_compiler.ir"},
    "memra_compiler.layers": MEETING | {"memra_compiler.ops", "memra_compiler.ir"},
    "memra_compiler.drafters": MEETING
    | {"memra_compiler.layers", "memra_compiler.ops", "memra_compiler.ir"},
    "memra_compiler.rounds": MEETING
    | {"memra_compiler.drafters", "memra_compiler.layers", "memra_compiler.ops",
       "memra_compiler.ir"},
    "memra_compiler.spec": MEETING
    | {"memra_compiler.rounds", "memra_compiler.drafters", "memra_compiler.layers"},
    "memra_compiler.passes": MEETING | {"memra_compiler.ops", "memra_compiler.ir"},
    "memra_compiler.codegen": MEETING | {"memra_compiler", "memra_compiler.ops",
                                         "memra_compiler.ir"},
    "memra_compiler.interpret": MEETING | {"memra_compiler.ops", "memra_compiler.ir"},
    "memra_compiler.compile": MEETING
    | {"memra_compiler.spec", "memra_compiler.rounds", "memra_compiler.passes",
       "memra_compiler.codegen", "memra_compiler.ir"},
    "memra_compiler.cli": MEETING
    | {"memra_compiler.*", "memra_runtime.cli"},  # the console they share
    "memra_runtime.errors": set(),
    "memra_runtime.files": set(),
    "memra_runtime.artifact": {"memra_runtime.errors"},
    "memra_runtime.checkpoint": {"memra_runtime.errors"},
    "memra_runtime.tokenizer": {"memra_runtime.checkpoint", "memra_runtime.errors"},
    "memra_runtime.device": {"memra_runtime.artifact", "memra_runtime.errors"},
    "memra_runtime.sidecar": {"memra_runtime.checkpoint", "memra_runtime.artifact",
                              "memra_runtime.errors", "memra_runtime.files"},
    "memra_runtime.trim": {"memra_runtime.sidecar", "memra_runtime.device",
                           "memra_runtime.checkpoint", "memra_runtime.artifact",
                           "memra_runtime.errors"},
    "memra_runtime.session": {"memra_runtime.trim", "memra_runtime.device",
                              "memra_runtime.artifact", "memra_runtime.errors",
                              "memra_runtime.files"},
    "memra_runtime.model": {"memra_runtime.trim", "memra_runtime.device",
                            "memra_runtime.tokenizer", "memra_runtime.checkpoint",
                            "memra_runtime.artifact", "memra_runtime.errors"},
    "memra_runtime.check": {"memra_runtime.*"},
    "memra_runtime.bench": {"memra_runtime.*"},
    "memra_runtime.cli": {"memra_runtime.*"},
}  # fmt: skip

#: Imports that exist for the type checker only, under `if TYPE_CHECKING`.
TYPES_ONLY = {
    ("memra_compiler.ir", "memra_compiler.ops"),
    ("memra_compiler.rounds", "memra_compiler.spec"),
}

#: Packages that only some modules may import; a prefix names a folder.
ONLY_IN = {
    "jinja2": ("memra_runtime.tokenizer.chat", "memra_compiler.codegen"),
    "tvm": ("memra_compiler.ops", "memra_compiler.codegen"),
    "pydantic": ("memra_compiler.spec", "memra_compiler.layers", "memra_compiler.drafters",
                 "memra_compiler.rounds"),
    "yaml": ("memra_compiler.spec", "memra_compiler.cli"),
    "tokenizers": ("memra_runtime.tokenizer",),
    "tvm_ffi": ("memra_runtime.device", "memra_compiler.codegen"),
    "cuda": ("memra_runtime.device", "memra_compiler.codegen"),
    "torch": (),
    "transformers": (),
}  # fmt: skip
STANDARD_LIBRARY_ONLY = ("memra_runtime.artifact", "memra_runtime.errors", "memra_compiler.ir")


@dataclass(frozen=True)
class Source:
    """One module of the product."""

    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def area(self) -> str:
        return ".".join(self.name.split(".")[:2])


@dataclass(frozen=True)
class Import:
    """`source` imports `module`; `typing` if only for the type checker."""

    source: Source
    module: str
    line: int
    typing: bool

    @property
    def area(self) -> str:
        return ".".join(self.module.split(".")[:2])

    def __str__(self) -> str:
        return f"{self.source.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def sources() -> Iterator[Source]:
    for package, root in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(p for p in parts if p != "__init__")
            yield Source(name, path, ast.parse(text), text.count("\n"))


def imports(source: Source) -> Iterator[Import]:
    guarded = {
        id(inner)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(source.tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.path}:{node.lineno}: relative import"
            assert node.module is not None
            modules = [node.module]
            if node.module in PACKAGES:  # `from memra_runtime import artifact`
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            yield Import(source, module, node.lineno, id(node) in guarded)


ALL = list(sources())
IMPORTS = [found for source in ALL for found in imports(source)]


def permitted(found: Import) -> bool:
    allowed = MAY_IMPORT.get(found.source.area, set())
    if found.area in allowed or found.area == found.source.area:
        return True
    if found.typing and (found.source.area, found.area) in TYPES_ONLY:
        return True
    package, _, area = found.area.partition(".")
    return f"{package}.*" in allowed and area != "cli"


def test_imports_point_one_way() -> None:
    wrong = [str(i) for i in IMPORTS if i.module.split(".")[0] in PACKAGES and not permitted(i)]
    assert wrong == []


def test_every_area_has_a_rule() -> None:
    assert {s.area for s in ALL} - set(PACKAGES) <= set(MAY_IMPORT)


def test_rules_have_no_circle() -> None:
    """The table itself must be a one-way street."""

    def below(area: str, seen: tuple[str, ...] = ()) -> None:
        assert area not in seen, " -> ".join((*seen, area))
        for other in MAY_IMPORT.get(area, set()):
            if not other.endswith("*"):
                below(other, (*seen, area))

    for area in MAY_IMPORT:
        below(area)


def test_nobody_imports_a_command_line() -> None:
    wrong = [
        str(i) for i in IMPORTS if i.area.endswith(".cli") and not i.source.area.endswith("cli")
    ]
    assert wrong == []


def test_runtime_never_imports_the_compiler() -> None:
    theirs = [i for i in IMPORTS if i.source.name.startswith("memra_runtime")]
    assert [str(i) for i in theirs if i.module.startswith("memra_compiler")] == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_package_is_imported_only_where_it_may(package: str) -> None:
    allowed = ONLY_IN[package]
    wrong = [str(i) for i in IMPORTS
             if i.module.split(".")[0] == package and not i.typing
             and not i.source.name.startswith(tuple(allowed) or ("\0",))]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("area", STANDARD_LIBRARY_ONLY)
def test_area_uses_the_standard_library_only(area: str) -> None:
    wrong = [str(i) for i in IMPORTS
             if i.source.area == area
             and i.module.split(".")[0] not in {*sys.stdlib_module_names, *PACKAGES}]  # fmt: skip
    assert wrong == []


def test_product_reads_no_environment_variables() -> None:
    """Whatever steers memra is in a spec or on a command line. (`NO_COLOR` is rich's to read.)"""
    wrong = [
        f"{source.name}:{node.lineno}"
        for source in ALL
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"})
        or (isinstance(node, ast.alias) and node.name in {"environ", "getenv"})
    ]
    assert wrong == []


def test_no_module_is_over_600_lines() -> None:
    assert {s.name: s.lines for s in ALL if s.lines > 600} == {}


def test_every_public_thing_has_a_docstring() -> None:
    """Modules, and classes and functions at their top level."""
    missing = []
    for source in ALL:
        if source.tree.body and not ast.get_docstring(source.tree):
            missing.append(source.name)
        missing += [
            f"{source.name}.{node.name}"
            for node in source.tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
    assert missing == []


def test_every_op_is_discovered() -> None:
    """Each `@op("name")` in `ops/` is registered, and nothing else is."""
    declared = {
        decorator.args[0].value
        for source in ALL
        if source.area == "memra_compiler.ops"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "op"
        and isinstance(decorator.args[0], ast.Constant)
    }  # fmt: skip
    assert declared == {n for n in discover() if not n.startswith("test_")}


def test_every_pass_is_in_the_pipeline() -> None:
    """`passes/NAME.py` holds the function NAME, and the pipeline has it."""
    names = {s.path.stem for s in ALL if s.area == "memra_compiler.passes"}
    assert names - {"__init__", "pipeline"} == {step.__name__ for step in PASSES}
    for step in PASSES:
        assert step.__module__ == f"memra_compiler.passes.{step.__name__}"

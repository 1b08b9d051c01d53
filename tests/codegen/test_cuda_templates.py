"""The folder `templates` as a whole: nothing in it is unused, undeclared or unread."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jinja2.meta
import pytest
from test_cuda_kernels import KERNELS
from test_cuda_linear import PAIRS

from expert_cases import small_cases
from memra_compiler.codegen.cuda import (
    LIBRARY,
    TEMPLATES,
    compile_cuda,
    environment,
    include_paths,
    render,
)
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, AnyLaunch, Launch
from memra_compiler.ops.cuda_linear import (
    FORMATS,
    embed_launches,
    linear_launches,
    repack_launches,
)
from memra_compiler.ops.cuda_wide import wide_launches

FILES = sorted(p for p in TEMPLATES.rglob("*") if p.is_file() and p.parent.name != "__pycache__")
KERNEL_TEMPLATES = [p for p in FILES if p.suffix == ".j2"]
HEADERS = [p for p in FILES if p.suffix == ".cuh"]


def names(paths: list[Path]) -> set[str]:
    return {p.relative_to(TEMPLATES).as_posix() for p in paths}


def products() -> Iterator[Launch]:
    """Every form of the matrix kernels: tiled, wide and plain, alone, in groups, of experts."""
    for arch in (ARCHS["sm_80"], ARCHS["sm_90a"]):
        for name, kind in PAIRS:
            weight = TensorType((32, 256), name)
            x = TensorType((8, 256), kind)
            yield from linear_launches(arch, x, [weight, weight], ())
            yield from linear_launches(arch, x, [weight, weight], (), act="silu")
            yield repack_launches(arch, weight)[0]
            yield from wide_launches(arch, TensorType((64, 256), kind), [weight], ())
        for name in FORMATS:
            odd = TensorType((24, 256), name)
            yield from linear_launches(arch, TensorType((8, 256), "f32"), [odd], ())
            yield from embed_launches(arch, 8, odd, 2.0)
        for case in small_cases():
            yield from case.launches(arch)


@cache
def launches() -> tuple[AnyLaunch, ...]:
    """One launch at least of every kernel there is, scheduled ones too."""
    others = (
        launch
        for arch in (ARCHS["sm_80"], ARCHS["sm_90a"])
        for make in KERNELS.values()
        for launch in make(arch)
    )
    return *products(), *others


def templated() -> list[Launch]:
    """Those that are rendered from a template."""
    return [launch for launch in launches() if isinstance(launch, Launch)]


def test_folder_holds_templates_and_headers_only() -> None:
    """What pyproject.toml packages: `**/*.j2` and `lib/*.cuh`."""
    assert {p for p in FILES if p.suffix == ".cuh"} == set(LIBRARY.iterdir())
    assert names(FILES) - names(KERNEL_TEMPLATES) - names(HEADERS) == {"__init__.py"}
    assert all(p.name.endswith(".cu.j2") for p in KERNEL_TEMPLATES)


def test_no_template_is_orphaned() -> None:
    assert {launch.template for launch in templated()} == names(KERNEL_TEMPLATES)


@pytest.mark.parametrize("template", sorted(names(KERNEL_TEMPLATES)))
def test_variables_of_a_template_are_the_fields_of_its_parameters(template: str) -> None:
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    used = jinja2.meta.find_undeclared_variables(environment().parse(text)) - {"symbol"}
    used -= set(re.findall(r"set (\w+) = namespace\(", text))  # Jinja's own counts them as free
    fields = {frozenset(one.variables()) for one in templated() if one.template == template}
    assert fields == {frozenset(used)}


def included(text: str) -> set[str]:
    """Names in quotes: headers of ours; those of CUDA stand in angle brackets."""
    return set(re.findall(r'^#include "(.*)"$', text, re.M))


def test_every_header_is_included_by_some_kernel() -> None:
    reached: set[str] = set()
    found = {name for one in launches() for name in included(render(one, "kernel")[1])}
    while found:
        reached |= found
        texts = [(LIBRARY / name).read_text(encoding="utf-8") for name in found]
        found = {name for text in texts for name in included(text)} - reached
    assert reached == {p.name for p in HEADERS}


def test_every_header_is_guarded_and_explained() -> None:
    for path in HEADERS:
        first, *_ = text = path.read_text(encoding="utf-8").splitlines()
        assert first.startswith("// "), path.name
        assert "#pragma once" in text, path.name


def test_every_template_begins_with_what_it_does() -> None:
    for one in launches():
        assert render(one, "kernel")[1].startswith("// "), one


def test_lines_are_no_wider_than_a_hundred_columns() -> None:
    """Of a template, once rendered: a Jinja expression may be longer than what it stands for."""
    for path in HEADERS:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 100, f"{path.name}:{number}"
    for one in launches():
        for line in render(one, "a_kernel_of_some_length")[1].splitlines():
            assert len(line) <= 100, f"{one}: {line}"


def test_library_is_the_first_place_for_headers() -> None:
    """A wheel of CUDA may not shadow a header of ours."""
    assert include_paths()[0] == str(LIBRARY)


def test_compiler_writes_into_no_bytes_that_python_shares() -> None:
    """NVRTC fills buffers in place; an empty log is one byte, and Python has one b" " for all."""
    compile_cuda('extern "C" __global__ void nothing() {}', "nothing", ARCHS["sm_80"])
    assert bytes([0x20])[0] == 0x20

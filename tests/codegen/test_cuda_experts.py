"""Kernels of experts without a GPU: geometry, and what the compiler makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_cuda_linear import PAIRS, resources

from expert_cases import Case, small_cases
from memra_compiler.codegen.cuda import render
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch
from memra_compiler.ops.cuda_experts import ExpertsParams, experts_sum_order
from memra_compiler.ops.cuda_linear import FORMATS, REGISTERS
from memra_compiler.ops.experts import ExpertsDown, ExpertsGated

#: gemma4 26B-A4B: 128 experts, 8 of them active.
CASE_26B = Case("gated", ("q4_0",), "a8", 6, 128, 8, 2816, 704)
HALVES = ("gated", "down")
#: A few values of the second eight rows may live in memory across the main loop.
FEW_BYTES = 24


def cases_26b() -> list[Case]:
    """Both halves in every format that fits."""
    return [
        replace(CASE_26B, half=half, formats=(name,), kind=kind)
        for half in HALVES
        for name, kind in PAIRS
        if (2816 if half == "gated" else 704) % FORMATS[name].unit_inputs == 0
    ]


def params_of(case: Case, arch: CudaArch) -> ExpertsParams:
    (launch,) = case.launches(arch, planes=True)
    assert isinstance(launch.params, ExpertsParams), case.label
    return launch.params


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_geometry_fits_and_covers_k(arch: CudaArch) -> None:
    for case in cases_26b():
        p = params_of(case, arch)
        g, units = p.geometry, p.work.inputs // FORMATS[case.formats[0]].unit_inputs
        assert p.shared_bytes <= arch.shared_bytes, case.label
        assert g.warps * g.slice_units >= units > (g.warps - 1) * g.slice_units, case.label
        assert p.outputs // 16 % g.tiles == 0, case.label
        assert 2 <= g.stages <= 8, case.label
        assert g.stage_units <= g.slice_units, case.label


def test_rows_have_no_say_in_how_k_is_cut() -> None:
    for arch in ARCHS.values():
        for case in cases_26b():
            one, *others = (
                experts_sum_order(case.op, arch, *replace(case, rows=rows).operands)
                for rows in (1, 6, 16, 64)
            )
            assert others == [one] * 3, case.label


def test_shapes_that_do_not_tile_are_read_as_stored() -> None:
    mixed = replace(CASE_26B, formats=("q4_0", "q8_0"))
    half_pieces = replace(CASE_26B, half="down", inner=96)
    floats = replace(CASE_26B, kind="f32")
    for case in (mixed, half_pieces, floats):
        types = case.laid_out(ARCHS["sm_90a"])
        assert {t.layout for t in types[-len(case.formats) :]} == {"plain"}
        (launch,) = case.launches(ARCHS["sm_90a"], planes=True)
        assert launch.template == "experts/plain.cu.j2"


#: Registers on sm_90a, with some slack as in test_cuda_linear.
HOT = {
    ("gated", "q4_0", "a8"): 96,
    ("down", "q4_0", "a8"): 120,
    ("gated", "q8_0", "a8"): 96,
    ("down", "q8_0", "a8"): 80,
    ("gated", "q6_k", "a8"): 104,
    ("gated", "q4_0", "bf16"): 128,
    ("down", "q4_0", "bf16"): 168,
}


@pytest.mark.parametrize("key", HOT, ids="-".join)
def test_hot_kernels_do_not_spill(key: tuple[str, str, str]) -> None:
    half, name, kind = key
    case = replace(CASE_26B, half=half, formats=(name,), kind=kind)
    (launch,) = case.launches(ARCHS["sm_90a"], planes=True)
    registers, spilled = resources(launch, "experts", ARCHS["sm_90a"])
    assert spilled == 0
    assert registers <= HOT[key]
    assert registers * launch.block <= REGISTERS


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_every_format_compiles(arch: CudaArch) -> None:
    """For sixteen rows, which take most registers."""
    for case in cases_26b():
        if case.half == "gated" or case.formats == ("q4_0",):
            (launch,) = replace(case, rows=16).launches(arch, planes=True)
            assert resources(launch, "experts", arch)[1] <= FEW_BYTES, case.label


def test_first_half_settles_what_the_second_reads_early() -> None:
    """Whoever starts after the first half finds the choice of experts done."""
    release, wait = "release_next_kernel<kDep", "wait_for_previous_kernel<kDep"
    for case in small_cases():
        (launch,) = case.launches(ARCHS["sm_90a"], planes=True)
        _, text = render(launch, "experts")
        assert (text.index(wait) < text.index(release)) == case.gated, case.label
    assert ExpertsGated.settles
    assert ExpertsDown.reads_early == ("ids",)


def test_planes_take_no_scratch() -> None:
    case = replace(CASE_26B, half="down")
    assert case.scratch(planes=True) == 0
    assert case.scratch() == 8 * 8 * 2816
    assert case.out(planes=True) == TensorType((6, 2816), "f32", "planes8")

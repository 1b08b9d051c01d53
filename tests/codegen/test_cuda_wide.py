"""The matrix kernels of prompts without a GPU: geometry, launches, and what the compiler makes."""

from __future__ import annotations

import re

import pytest
from test_cuda_linear import FEW_BYTES, HOPPER, PAIRS, SHAPES_31B
from test_cuda_linear import SHAPES as NARROW_SHAPES

from memra_compiler.codegen.cuda import compile_cuda, render
from memra_compiler.ir.errors import OpError
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_linear import FORMATS, PlainParams
from memra_compiler.ops.cuda_wide import WIDE_ROWS, WideParams, wide_launches, wide_planes

SHAPES = {**NARROW_SHAPES, "one tile": (64, (16,), False)}


def launches(
    name: str,
    kind: str,
    shape: tuple[int, tuple[int, ...], bool],
    arch: CudaArch = HOPPER,
    rows: int = WIDE_ROWS,
) -> tuple[Launch, ...]:
    inputs, outputs, gated = shape
    x = TensorType((rows, inputs), kind)
    weights = [TensorType((n, inputs), name) for n in outputs]
    return wide_launches(arch, x, weights, (), act="gelu_tanh" if gated else None)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_every_shape_has_a_geometry(arch: CudaArch) -> None:
    for label, shape in SHAPES.items():
        for name, kind in PAIRS:
            if shape[0] % FORMATS[name].unit_inputs:
                continue
            (launch,) = launches(name, kind, shape, arch)
            p = launch.params
            g = p.geometry
            units = shape[0] // FORMATS[name].unit_inputs
            where = f"{label} {name} {kind} {arch.name} {g}"
            assert launch.shared_bytes <= arch.shared_bytes - 1024, where
            assert (g.splits - 1) * g.split_units < units <= g.splits * g.split_units, where
            assert g.groups <= g.split_units, where
            assert launch.block == 32 * g.warps <= 384, where
            assert p.stages >= 2, where
            assert p.stage_units % g.groups == 0, where
            assert g.splits == 1 or not p.gated, where
            assert launch.grid[0] * g.block_tiles >= p.work.tiles * g.splits, where


@pytest.mark.parametrize(("name", "kind"), PAIRS)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_rows_do_not_change_how_inputs_are_cut(arch: CudaArch, name: str, kind: str) -> None:
    for shape in SHAPES.values():
        if shape[0] % FORMATS[name].unit_inputs == 0:
            cuts = {
                launches(name, kind, shape, arch, rows)[0].params.geometry
                for rows in (9, 16, 31, 64)
            }
            assert len(cuts) == 1


def test_formats_take_a_launch_each() -> None:
    x = TensorType((64, 512), "a8")
    q4, q6 = TensorType((32, 512), "q4_k"), TensorType((32, 512), "q6_k")
    group = wide_launches(HOPPER, x, [q4, q6, q4], ())
    assert [[m.index for m in launch.params.matrices] for launch in group] == [[0, 2], [1]]
    assert wide_planes(HOPPER, x, [q4, q6, q4]) == 1
    gated = wide_launches(HOPPER, x, [q4, q6], (), act="silu")
    assert [launch.params.act for launch in gated] == ["", "silu"]
    assert [launch.params.reads_out for launch in gated] == [False, True]
    assert wide_planes(HOPPER, x, [q4, q4], "silu") == 1


def test_planes_follow_the_splits() -> None:
    x = TensorType((64, 21504), "a8")
    w = TensorType((5376, 21504), "q4_0")
    (launch,) = wide_launches(HOPPER, x, [w], ())
    assert wide_planes(HOPPER, x, [w]) == launch.params.geometry.splits > 1
    single = TensorType((64, 5376), "f32", layout="planes1")
    (launch,) = wide_launches(HOPPER, x, [w], [single])
    assert launch.params.geometry.splits == 1


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (TensorType((65, 128), "a8"), TensorType((32, 128), "q4_0"), "up to 64 rows"),
        (TensorType((16, 256), "a8"), TensorType((32, 128), "q4_0"), "do not fit"),
        (TensorType((64, 128)), TensorType((24, 128), "q4_0"), "rows of a8 or bf16, got f32"),
    ],
)
def test_what_does_not_fit_is_refused(x: TensorType, w: TensorType, message: str) -> None:
    with pytest.raises(OpError, match=message):
        wide_launches(HOPPER, x, [w], ())


@pytest.mark.parametrize(
    ("kind", "name", "outputs"),
    [("a8", "q4_0", 24), ("a8", "bf16", 32), ("bf16", "f32", 32)],
)
def test_what_does_not_tile_is_left_to_the_plain_kernel(kind: str, name: str, outputs: int) -> None:
    x, odd = TensorType((64, 256), kind), TensorType((outputs, 256), name)
    (launch,) = wide_launches(HOPPER, x, [odd], ())
    assert isinstance(launch.params, PlainParams)
    assert launch.params.plane_rows == 64
    gate, up = wide_launches(HOPPER, x, [odd, odd], (), act="silu")
    assert (gate.params.matrix, up.params.matrix) == (1, 0)
    assert wide_planes(HOPPER, x, [odd, odd]) == 1
    assert resources(launch, HOPPER)[1] == 0


def test_a_group_of_which_one_does_not_tile_splits_nothing() -> None:
    x = TensorType((64, 21504), "bf16")
    tiles, odd = TensorType((5376, 21504), "q4_0"), TensorType((24, 21504), "q4_0")
    assert wide_planes(HOPPER, x, [tiles]) > 1
    first, last = wide_launches(HOPPER, x, [odd, tiles], ())
    assert (first.params.geometry.splits, last.params.out) == (1, 0)
    assert wide_planes(HOPPER, x, [odd, tiles]) == 1


def resources(launch: Launch, arch: CudaArch) -> tuple[int, int]:
    """Registers and spilled bytes of a compiled launch."""
    symbol, source = render(launch, "wide")
    log: list[str] = []
    compile_cuda(source, symbol, arch, log=log)
    registers = re.search(r"Used (\d+) registers", log[0])
    spills = re.search(r"(\d+) bytes spill stores", log[0])
    assert registers, log[0]
    assert spills, log[0]
    return int(registers[1]), int(spills[1])


#: Bytes that the hot kernels may keep in memory across the main loop.
SPILLED = {"a8": 0, "bf16": FEW_BYTES}


@pytest.mark.parametrize("kind", SPILLED)
@pytest.mark.parametrize("shape", SHAPES_31B)
def test_hot_kernels_do_not_spill(shape: str, kind: str) -> None:
    (launch,) = launches("q4_0", kind, SHAPES_31B[shape])
    registers, spilled = resources(launch, HOPPER)
    assert spilled <= SPILLED[kind]
    # a scheduler's registers are shared by whole warps
    assert registers * 32 * -(-launch.block // 128) <= 16384


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_format_compiles(name: str, kind: str, arch: CudaArch) -> None:
    for rows in (16, 64):
        (launch,) = launches(name, kind, (1024, (256, 48), False), arch, rows)
        assert resources(launch, arch)[1] <= FEW_BYTES


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
@pytest.mark.parametrize("kind", SPILLED)
def test_every_form_compiles(arch: CudaArch, kind: str) -> None:
    x = TensorType((24, 256), kind)
    q4, q8 = TensorType((48, 256), "q4_0"), TensorType((48, 256), "q8_0")
    forms = [
        *wide_launches(arch, x, [q4, q4], (), act="silu"),
        *wide_launches(arch, x, [q4, q8], (), act="gelu_tanh"),
        *wide_launches(arch, x, [q4, q8, q4], ()),
        *wide_launches(arch, TensorType((64, 64), kind), [TensorType((16, 64), "q4_0")], ()),
    ]
    for launch in forms:
        assert resources(launch, arch)[1] <= FEW_BYTES


def test_text_is_deterministic_and_holds_the_geometry() -> None:
    (first,) = launches("q4_0", "a8", SHAPES_31B["down"])
    (again,) = launches("q4_0", "a8", SHAPES_31B["down"])
    assert render(first, "wide") == render(again, "wide")
    _, source = render(first, "wide")
    assert isinstance(first.params, WideParams)
    assert f"constexpr int kSplits = {first.params.geometry.splits};" in source
    assert max(map(len, source.splitlines())) <= 100

"""The matrix kernels without a GPU: layouts, geometry, and what the compiler makes of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from memra_compiler.codegen.cuda import compile_cuda, render
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_layouts import (
    a8_quantise,
    a8_reference,
    bf16_reference,
    bf16_round,
    repack_reference,
)
from memra_compiler.ops.cuda_linear import (
    FORMATS,
    Geometry,
    LinearParams,
    Work,
    embed_launches,
    geometry,
    linear_launches,
    repack_launches,
    split_planes,
    weight_layout,
)
from memra_compiler.ops.formats import dequantise, random_bytes
from memra_schedules import records

HOPPER = ARCHS["sm_90a"]
TILED = [name for name, format in FORMATS.items() if format.classes]


def half(word: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(word).view(np.float16).astype(np.float64)


class Tiles:
    """Reads a tiled matrix by the addresses that the kernels use, one row and column at a time."""

    def __init__(self, data: np.ndarray, type: TensorType) -> None:
        self.data, self.name = data, type.dtype
        self.outputs, self.inputs = type.max_shape
        self.format = FORMATS[type.dtype]

    def weight(self, row: int, column: int) -> float:
        format = self.format
        units = self.inputs // format.unit_inputs
        unit = row // 16 * units + column // format.unit_inputs
        at = self.data[unit * format.unit_bytes : (unit + 1) * format.unit_bytes]
        g, side = row % 8, row % 16 // 8
        piece = column // 64 % format.unit_pieces
        block, sixteen, t, e = column % 64 // 32, column % 32 // 16, column % 16 // 4, column % 4
        read = getattr(self, f"_{self.name}")
        return float(read(at, g, side, piece, block, sixteen, t, e))

    def _nibble(self, at, g, side, piece, block, sixteen, t, e) -> int:
        byte = at[piece * 512 + (4 * g + t) * 16 + (2 * block + sixteen) * 4 + e]
        return int(byte) >> 4 * side & 15

    def _scale(self, at, first, g, side, block) -> float:
        place = first + g * 8 + side * 4 + block * 2
        return half(at[place : place + 2])[0]

    def _q4_0(self, at, g, side, *rest) -> float:
        return self._scale(at, 512, g, side, rest[1]) * (self._nibble(at, g, side, *rest) - 8)

    def _q8_0(self, at, g, side, piece, block, sixteen, t, e) -> float:
        q = at[block * 512 + (4 * g + t) * 16 + (2 * sixteen + side) * 4 + e]
        return self._scale(at, 1024, g, side, block) * q.view(np.int8)

    def _q6_k(self, at, g, side, piece, block, sixteen, t, e) -> float:
        byte = at[2048 + piece * 256 + (4 * g + t) * 8 + block * 4 + e]
        q = self._nibble(at, g, side, piece, block, sixteen, t, e)
        q |= (int(byte) >> 2 * (2 * sixteen + side) & 3) << 4
        s = at[3072 + piece * 64 + g * 8 + side * 4 + 2 * block + sixteen].view(np.int8)
        d = half(at[3328 + g * 4 + side * 2 :][:2])[0]
        return float(np.float32(d) * np.float32(s)) * (q - 32)

    def _q4_k(self, at, g, side, piece, block, sixteen, t, e, fifth=0) -> float:
        head = at[len(at) - 256 + (g + 8 * side) * 16 :][:16]
        bits = int.from_bytes(head[4:].tobytes(), "little")
        s = bits >> 6 * (4 * piece + block) & 63
        n = bits >> 6 * (4 * piece + 2 + block) & 63
        q = self._nibble(at, g, side, piece, block, sixteen, t, e) | fifth << 4
        d, m = half(head[:4])
        return d * s * q - m * n

    def _q5_k(self, at, g, side, piece, block, sixteen, t, e) -> float:
        byte = at[2048 + piece * 128 + (4 * g + t) * 4 + e]
        fifth = int(byte) >> (4 * block + 2 * sixteen + side) & 1
        return self._q4_k(at, g, side, piece, block, sixteen, t, e, fifth)

    def _half_bytes(self, at, g, side, piece, block, sixteen, t, e) -> np.ndarray:
        word = 2 * (e // 2) + side
        place = (2 * block + sixteen) * 512 + (4 * g + t) * 16 + word * 4 + e % 2 * 2
        return at[place : place + 2]

    def _f16(self, *args) -> float:
        return half(self._half_bytes(*args))[0]

    def _bf16(self, *args) -> float:
        return float(
            (self._half_bytes(*args).view(np.uint16).astype(np.uint32) << 16).view("f4")[0]
        )


@pytest.mark.parametrize("name", TILED)
def test_tiled_layout_holds_every_weight(name: str) -> None:
    type = TensorType((32, 512), name)
    stored = random_bytes(type, np.random.default_rng(1))
    tiles = repack_reference(stored, type)
    assert len(tiles) == type.nbytes
    expected = dequantise(stored, type)
    reader = Tiles(tiles, type)
    actual = [[reader.weight(r, c) for c in range(512)] for r in range(32)]
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-7)


def test_a8_layout_holds_every_value() -> None:
    x = np.random.default_rng(2).standard_normal((11, 192)).astype(np.float32)
    x[3, 32:64] = 0
    data = a8_reference(x)
    q, d = a8_quantise(x)
    assert len(data) == 2 * 192 // 64 * 640
    for row in range(11):
        tile = data[row // 8 * 1920 :][:1920]
        for k in range(192):
            lane = row % 8 * 4 + k % 16 // 4
            at = (k // 64 * 32 + lane) * 16 + k % 64 // 16 * 4 + k % 4
            assert tile[at].view(np.int8) == q[row, k]
        for b in range(6):
            at = 3 * 512 + (b * 4 + row % 8 // 2) * 16 + row % 2 * 4
            assert tile[at : at + 4].view(np.float32)[0] == d[row, b]
            first, last = tile[at + 8 : at + 12].view(np.int16)
            values = q[row, 32 * b : 32 * b + 32].astype(int)
            assert (first, last) == (values[:16].sum(), values[16:].sum())
    assert (np.abs(q[:, :] * np.repeat(d, 32, 1) - x) <= np.repeat(d, 32, 1) * 0.5001).all()


def test_bf16_layout_holds_every_value() -> None:
    x = np.random.default_rng(3).standard_normal((3, 128)).astype(np.float32)
    words = bf16_reference(x).view(np.uint16)
    assert len(words) == 8 * 128
    values = (words.astype(np.uint32) << 16).view(np.float32)
    for row in range(3):
        for k in range(128):
            at = (k // 32 * 32 + row * 4 + k % 16 // 4) * 8 + k % 32 // 16 * 4 + k % 4
            assert values[at] == bf16_round(x)[row, k]


#: (K, outputs of each matrix, gated): every matrix of the supported models.
SHAPES_31B = {
    "qkv": (5376, (8192, 4096, 4096), False),
    "qkv_full": (5376, (16384, 2048), False),
    "o": (8192, (5376,), False),
    "o_full": (16384, (5376,), False),
    "gate_up": (5376, (21504, 21504), True),
    "down": (21504, (5376,), False),
    "head": (5376, (262144,), False),
}
SHAPES = {
    **{f"31b {name}": shape for name, shape in SHAPES_31B.items()},
    "drafter in": (10752, (1024,), False),
    "drafter q": (1024, (8192,), False),
    "drafter q full": (1024, (16384,), False),
    "drafter o": (8192, (1024,), False),
    "drafter o full": (16384, (1024,), False),
    "drafter gate_up": (1024, (8192, 8192), True),
    "drafter out": (1024, (5376,), False),
    "drafter head": (1024, (262144,), False),
    "12b qkv": (3840, (4096, 2048, 2048), False),
    "12b qkv_full": (3840, (8192, 512), False),
    "12b o": (4096, (3840,), False),
    "12b o_full": (8192, (3840,), False),
    "12b gate_up": (3840, (15360, 15360), True),
    "12b down": (15360, (3840,), False),
    "tiny 128": (128, (128,), False),
    "tiny 256": (256, (256, 128, 128), False),
    "tiny 512": (512, (4096,), False),
    "tiny 1024": (1024, (256,), False),
    "tiny gate_up": (256, (1024, 1024), True),
    "odd": (64 * 97, (16,), False),
}


#: Every weight format with every class of activations that it tiles for.
PAIRS = [(name, kind) for name, format in FORMATS.items() for kind in format.classes]


def launches(name, kind, inputs, outputs, gated, arch=HOPPER, rows=8):
    x = TensorType((rows, inputs), kind)
    weights = [TensorType((n, inputs), name) for n in outputs]
    return linear_launches(arch, x, weights, (), act="gelu_tanh" if gated else None)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
@pytest.mark.parametrize("rows", [8, 16])
def test_every_shape_has_a_geometry(arch, rows: int) -> None:
    for label, (inputs, outputs, gated) in SHAPES.items():
        for name, kind in PAIRS:
            if inputs % FORMATS[name].unit_inputs:
                continue
            (launch,) = launches(name, kind, inputs, outputs, gated, arch, rows)
            g = launch.params.geometry
            units = inputs // FORMATS[name].unit_inputs
            where = f"{label} {name} {kind} {arch.name} {g}"
            assert launch.shared_bytes <= arch.shared_bytes, where
            assert g.splits * g.warps * g.slice_units >= units, where
            assert (g.splits * g.warps - 1) * g.slice_units < units, where
            assert g.warps <= 16, where
            assert g.stages >= 2, where
            assert g.stage_units <= g.slice_units, where
            assert g.splits == 1 or not gated, where
            assert g.held or (kind == "bf16" and (rows == 16 or FORMATS[name].unit_pieces > 1)), (
                where
            )


def test_layout_falls_back_to_plain() -> None:
    cases = {
        ("q4_0", 32, 96): "plain",
        ("q4_0", 24, 128): "plain",
        ("q4_0", 32, 128): "tiles16",
        ("q6_k", 32, 256): "tiles16",
        ("q6_k", 8, 256): "plain",
        ("f32", 32, 128): "plain",
        ("bf16", 32, 128): "tiles16",
    }
    for (name, outputs, inputs), layout in cases.items():
        assert weight_layout(HOPPER, TensorType((outputs, inputs), name)) == layout


def test_mixed_formats_take_a_launch_each() -> None:
    x = TensorType((8, 256), "a8")
    q4, q6 = TensorType((32, 256), "q4_k"), TensorType((16, 256), "q6_k")
    odd = TensorType((8, 256), "q8_0")
    group = linear_launches(HOPPER, x, [q4, q6, q4, odd], ())
    assert [launch.template for launch in group] == ["linear/linear.cu.j2"] * 2 + [
        "linear/plain.cu.j2"
    ]
    assert [m.index for m in group[0].params.matrices] == [0, 2]
    assert split_planes(HOPPER, x, [q4, q6, q4, odd]) == 1
    gated = linear_launches(HOPPER, x, [q4, TensorType((32, 256), "q6_k")], (), act="silu")
    assert [launch.params.act for launch in gated] == ["", "silu"]
    assert gated[1].params.reads_out


def resources(launch: Launch, name: str, arch) -> tuple[int, int]:
    """Registers and spilled bytes of a compiled launch."""
    symbol, source = render(launch, name)
    log: list[str] = []
    compile_cuda(source, symbol, arch, log=log)
    registers = re.search(r"Used (\d+) registers", log[0])
    spills = re.search(r"(\d+) bytes spill stores", log[0])
    assert registers, log[0]
    assert spills, log[0]
    return int(registers[1]), int(spills[1])


#: Registers of the kernels that move most bytes, on sm_90a. None may spill. A change of these
#: numbers is a change worth a look, not an error: allow some slack.
HOT = {
    ("q4_0", "qkv"): 96,
    ("q4_0", "qkv_full"): 96,
    ("q4_0", "o"): 136,
    ("q4_0", "o_full"): 104,
    ("q4_0", "gate_up"): 120,
    ("q4_0", "down"): 128,
    ("q8_0", "qkv"): 80,
    ("q8_0", "o"): 80,
    ("q8_0", "gate_up"): 120,
    ("q8_0", "down"): 128,
    ("q6_k", "head"): 128,
    ("q6_k", "down"): 128,
}
#: The same of bf16 rows.
HOT_BF16 = {
    ("q4_0", "qkv"): 128,
    ("q4_0", "o"): 136,
    ("q4_0", "gate_up"): 128,
    ("q4_0", "down"): 128,
    ("q8_0", "gate_up"): 128,
    ("q6_k", "head"): 112,
    ("bf16", "qkv"): 120,
    ("bf16", "gate_up"): 128,
    ("bf16", "down"): 104,
    ("f16", "gate_up"): 136,
}


#: Elsewhere a value or two may live in memory across the main loop.
FEW_BYTES = 16


@pytest.mark.parametrize(
    ("kind", "name", "shape", "limit"),
    [("a8", *key, n) for key, n in HOT.items()]
    + [("bf16", *key, n) for key, n in HOT_BF16.items()],
)
def test_hot_kernels_do_not_spill(kind: str, name: str, shape: str, limit: int) -> None:
    (launch,) = launches(name, kind, *SHAPES_31B[shape])
    registers, spilled = resources(launch, name, HOPPER)
    assert spilled == 0
    assert registers <= limit
    g = launch.params.geometry
    assert registers * 32 * g.warps * g.resident_blocks <= 65536


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_slices_that_registers_do_not_hold_compile(arch) -> None:
    """Sixteen rows, or a product that may not split, of bf16 against blocks of 256."""
    for name in ("q6_k", "q4_k", "q5_k"):
        wide = TensorType((16, 5376), "bf16")
        gate = TensorType((21504, 5376), name)
        long = TensorType((1024, 10752), name)
        out = TensorType((8, 1024), layout="planes1")
        forms = [
            *linear_launches(arch, wide, [gate, gate], (), act="silu"),
            *linear_launches(arch, TensorType((8, 10752), "bf16"), [long], [out]),
        ]
        for launch in forms:
            assert not launch.params.geometry.held
            assert resources(launch, name, arch)[1] <= FEW_BYTES


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_compiles(name: str, arch) -> None:
    compiled = []
    for kind in FORMATS[name].classes:
        compiled += launches(name, kind, 768, (48,), False, arch)
    if FORMATS[name].classes:
        compiled.append(repack_launches(arch, TensorType((48, 768), name))[0])
    plain = TensorType((8, 768), name)
    compiled += linear_launches(arch, TensorType((8, 768), "f32"), [plain], ())
    compiled += embed_launches(arch, 8, plain, 2.0)
    for launch in compiled:
        assert resources(launch, name, arch)[1] <= FEW_BYTES


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_every_form_compiles(arch) -> None:
    x = TensorType((8, 256), "a8")
    tiled = TensorType((32, 256), "q4_0")
    odd = TensorType((24, 256), "q4_0")
    ragged = TensorType((16, 64 * 97), "q4_0")
    forms = [
        *linear_launches(arch, x, [tiled, tiled], (), act="silu"),
        *linear_launches(arch, x, [tiled, TensorType((32, 256), "q8_0")], (), act="gelu_tanh"),
        *linear_launches(arch, x, [tiled, tiled, odd], ()),
        *linear_launches(arch, x, [odd, odd], (), act="silu"),
        *linear_launches(arch, TensorType((16, 256), "a8"), [tiled], ()),
        *linear_launches(arch, TensorType((8, 64 * 97), "a8"), [ragged], ()),
        *embed_launches(arch, 8, tiled, 1.0),
    ]  # fmt: skip
    for launch in forms:
        assert resources(launch, "form", arch)[1] <= FEW_BYTES


def test_text_is_deterministic_and_holds_the_geometry() -> None:
    (first,) = launches("q4_0", "a8", 5376, (8192, 4096, 4096), False)
    (again,) = launches("q4_0", "a8", 5376, (8192, 4096, 4096), False)
    assert render(first, "linear") == render(again, "linear")
    _, source = render(first, "linear")
    assert isinstance(first.params, LinearParams)
    assert f"constexpr int kWarps = {first.params.geometry.warps};" in source
    assert max(map(len, source.splitlines())) <= 100


def test_repack_counts_its_bytes() -> None:
    for name in TILED:
        type = TensorType((262144, 5376), name)
        launch, size = repack_launches(HOPPER, type)
        assert size == type.nbytes
        assert launch.grid[0] == math.ceil(size / FORMATS[name].unit_bytes / 4)


@pytest.mark.parametrize("arch", [a for a in ARCHS.values() if records(a.name)], ids=str)
def test_every_tuned_record_covers_its_matrix_and_fits(arch: CudaArch) -> None:
    for record in records(arch.name):
        work, g = Work(**record["work"]), Geometry(**record["geometry"])
        units = work.inputs // FORMATS[work.format].unit_inputs
        workers = g.splits * g.warps
        assert (workers - 1) * g.slice_units < units <= workers * g.slice_units, record
        assert g.stage_units <= g.slice_units, record
        assert (g.shared_bytes(work) + 1024) * g.blocks <= arch.shared_bytes, record
        assert g.splits == 1 or work.may_split, record
        assert geometry(arch, work) == g, record


def test_a_record_without_splits_also_serves_products_that_may_not_split() -> None:
    """Matrices whose reader adds no planes once missed their record, and nobody was told."""
    arch, tuned = HOPPER, [r for r in records("sm_90a") if r["geometry"]["splits"] == 1]
    wanted = [Work(**r["work"]) for r in tuned if r["work"]["may_split"]]
    own = {Work(**r["work"]) for r in tuned}
    wanted = [w for w in wanted if replace(w, may_split=False) not in own]
    assert wanted
    for work in wanted:
        assert geometry(arch, replace(work, may_split=False)) == geometry(arch, work)

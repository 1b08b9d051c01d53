"""Rows of a head that is in use on a GPU: they land where kernels read, and nothing else moves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the extra `cuda` is not installed")
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_layouts import repack_reference
from memra_compiler.ops.cuda_linear import repack_launches, weight_layout
from memra_compiler.ops.formats import random_bytes
from memra_runtime.artifact import HEAD_GROUP, HeadEntry, LaunchEntry, WeightEntry
from memra_runtime.device import cuda_upload
from memra_runtime.device.cuda_upload import RowWriter

ARCH, ROWS, WIDTH = ARCHS["sm_90a"], 5 * HEAD_GROUP, 512
#: (format, inputs): the last has no tiles and lies as it is stored.
HEADS = [("q8_0", WIDTH), ("q4_0", 192), ("q6_k", WIDTH), ("bf16", 128), ("f32", 96)]


class HostMemory:
    """Stands in for pinned memory and for memory of the device."""

    def __init__(self, size: int, doing: str = "") -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.address = self.bytes.ctypes.data


class HostStream:
    """Copies at once."""

    def copy_in(self, address: int, data: HostMemory, size: int) -> None:
        ctypes.memmove(address, data.address, size)

    def wait(self, doing: str = "") -> None:
        pass


def repack(type: TensorType, grid: list[tuple[int, ...]]) -> Callable[..., Any]:
    """A stand-in for `Kernel`: what the repacking launch does to one group."""

    class Repack:
        def __init__(self, function: Any, name: str, shape: Any, pointers: list[int]) -> None:
            self.shape, self.pointers = shape, pointers

        def launch(self, stream: HostStream, rows: int) -> None:
            grid.append(self.shape.grid)
            group = TensorType((HEAD_GROUP, *type.max_shape[1:]), type.dtype)
            stored = (ctypes.c_uint8 * group.nbytes).from_address(self.pointers[0])
            tiled = repack_reference(np.frombuffer(stored, np.uint8), group)
            ctypes.memmove(self.pointers[1], tiled.ctypes.data, tiled.nbytes)

    return Repack


@pytest.mark.parametrize(("dtype", "width"), HEADS)
def test_written_rows_are_those_of_a_head_that_was_loaded_with_them(
    monkeypatch: pytest.MonkeyPatch, dtype: str, width: int
) -> None:
    type = TensorType((ROWS, width), dtype)
    tiled = weight_layout(ARCH, type) == "tiles16"
    assert tiled == (dtype != "f32")
    rng = np.random.default_rng(0)
    rows = random_bytes(type, rng).view(np.uint8).reshape(ROWS, -1)

    def laid_out() -> np.ndarray:
        flat = rows.reshape(-1)
        return repack_reference(flat, type) if tiled else flat

    device = HostMemory(laid_out().nbytes)
    device.bytes[:] = laid_out()
    repacks, grids = (), list[tuple[int, ...]]()
    if tiled:
        launch, _ = repack_launches(ARCH, type)
        repacks = (LaunchEntry("repack", launch.grid, launch.block, 0, False, weight="head"),)
    weight = WeightEntry("head", "draft", (), (ROWS, width), dtype, rows.nbytes,
                         device_bytes=device.bytes.nbytes)  # fmt: skip
    manifest: Any = SimpleNamespace(
        weights=(weight,), head=HeadEntry("head", ROWS), repacks=repacks
    )
    for name, stand_in in (("PinnedBuffer", HostMemory), ("Memory", HostMemory),
                           ("Kernel", repack(type, grids))):  # fmt: skip
        monkeypatch.setattr(cuda_upload, name, stand_in)
    context: Any = SimpleNamespace(multiprocessors=132)
    stream: Any = HostStream()
    writer = RowWriter(manifest, [device.address], {"repack": None}, context, stream)
    for first, last in ((0, 1), (63, 65), (130, 190), (ROWS - 1, ROWS), (0, ROWS)):
        before = device.bytes.copy()
        new = random_bytes(TensorType((last - first, width), dtype), rng).view(np.uint8)
        rows[first:last] = new.reshape(last - first, -1)
        assert not np.array_equal(before, laid_out())
        writer.write(rows, first, last)
        assert np.array_equal(device.bytes, laid_out()), (first, last)
    assert tiled == bool(grids)
    if tiled:
        (grid,) = set(grids)
        whole, _ = repack_launches(ARCH, type)
        assert grid[0] * (ROWS // HEAD_GROUP) == whole.grid[0]

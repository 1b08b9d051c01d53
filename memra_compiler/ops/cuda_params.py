"""What the CUDA templates of this package share: element types, whole tiles of rows, checks."""

from __future__ import annotations

from typing import Any

from memra_compiler.ir.types import PIECE_BYTES, PIECE_INPUTS, TensorType
from memra_compiler.ops.base import Op, expect
from memra_compiler.ops.cuda import TILE_ROWS, CudaArch, Launch

#: C++ types of the float formats.
C_TYPES = {"f32": "float", "f16": "__half", "bf16": "__nv_bfloat16"}

#: C++ types of stored token ids.
ID_TYPES = {"i32": "int", "i64": "long long"}

#: The same of cache rows.
CACHE_TYPES = C_TYPES | {"q8_0_rows": "Q8"}

WARP = 32
#: Elements a thread reads at once.
VECTOR = 4


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def bound(type: TensorType) -> int:
    """The most rows a value can have."""
    return type.max_shape[0]


def whole_tiles(rows: int) -> int:
    """Rows of the tiles of eight that hold `rows` rows."""
    return ceil_div(rows, TILE_ROWS) * TILE_ROWS


def columns(type: TensorType) -> int:
    """Elements of one row."""
    count = 1
    for size in type.max_shape[1:]:
        count *= size
    return count


def c_type(op: Op, type: TensorType) -> str:
    """The C++ type of a float operand's elements."""
    expect(type.dtype in C_TYPES, op, f"CUDA kernels read {', '.join(C_TYPES)}, got {type}")
    return C_TYPES[type.dtype]


def cache_type(op: Op, type: TensorType) -> str:
    """The C++ type of a cache's elements."""
    known = type.dtype in CACHE_TYPES
    expect(known, op, f"CUDA kernels cache {', '.join(CACHE_TYPES)}, got {type}")
    return CACHE_TYPES[type.dtype]


def row_format(op: Op, type: TensorType) -> str:
    """The format of an output's rows: `f32`, or a namespace of templates/lib with its tiles.

    Raises: OpError where rows that lie in tiles are no whole pieces.
    """
    fits = type.dtype not in PIECE_BYTES or columns(type) % PIECE_INPUTS == 0
    expect(fits, op, f"tiles on CUDA hold whole pieces of {PIECE_INPUTS} inputs, got {type}")
    return type.dtype


def output_rows(type: TensorType) -> int:
    """Rows a launch must cover: all rows of an output's tiles, for zeros are written."""
    return whole_tiles(bound(type)) if type.dtype in PIECE_BYTES else bound(type)


def launch(
    arch: CudaArch, template: str, params: Any, grid: tuple[int, int, int], block: int,
    shared_bytes: int = 0,
) -> Launch:  # fmt: skip
    """A launch that starts early wherever the device can: every template waits by itself."""
    return Launch(template, params, grid, block, shared_bytes, arch.dependent_launch)

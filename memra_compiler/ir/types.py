"""Types of the IR: tensors with fixed or bounded dimensions, and storage formats.

Shapes are row-major, outermost first. A weight matrix is `[out, in]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memra_compiler.ir.errors import IRError

#: Bytes of one element of the plain data types. A `head_row` is an int32, too: the number of a row
#: of a trimmed head. What wants token ids wants i32, so only `token_of_row` takes one.
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "u8": 1, "head_row": 4}

#: (elements, bytes) of one block of the quantised storage formats, as llama.cpp lays them out.
BLOCK_FORMATS = {
    "q4_0": (32, 18),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}

#: Activation rows as int8 with a float32 scale per 32: scale, then the 32 values.
ACTIVATION_BLOCKS = {"a8": (32, 36)}
BLOCKS = BLOCK_FORMATS | ACTIVATION_BLOCKS

#: Elements of a block of the formats of cache rows: int8 values, then one f16 scale a block, then
#: zeros up to whole vectors of `CACHE_ALIGN` bytes. What a row of `q8_0` keeps in blocks of 34
#: bytes lies apart here, so that values are read in whole vectors on every target.
CACHE_BLOCKS = {"q8_0_rows": 32}
CACHE_ALIGN = 16
#: Formats of cached keys and values as a spec names them, where types have another name.
CACHE_DTYPES = {"q8_0": "q8_0_rows"}

#: Layout `tile8` of `a8` and `bf16`: tiles of eight rows, in pieces of 64 inputs of so many bytes,
#: as a tensor core's fragments lie. Layout `planesN` of f32: N planes of whole tiles of rows whose
#: sum is the value.
TILE_ROWS = 8
PIECE_INPUTS = 64
PIECE_BYTES = {"a8": 640, "bf16": 1024}


@dataclass(frozen=True, slots=True)
class Sym:
    """A dimension known only at run time, with its largest value: `T<=8`."""

    name: str
    bound: int

    def __str__(self) -> str:
        return f"{self.name}<={self.bound}"


Dim = int | Sym


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, element type (or storage format) and layout of a value, weight or plane."""

    shape: tuple[Dim, ...]
    dtype: str = "f32"
    layout: str = "row"

    def __post_init__(self) -> None:
        blocks = {name: block for name, (block, _) in BLOCKS.items()} | CACHE_BLOCKS
        if self.dtype not in DTYPE_BYTES and self.dtype not in blocks:
            known = ", ".join([*DTYPE_BYTES, *blocks])
            raise IRError(f"unknown dtype `{self.dtype}`; known: {known}")
        if self.dtype in blocks:
            block = blocks[self.dtype]
            last = self.shape[-1]
            if not isinstance(last, int) or last % block:
                raise IRError(f"`{self.dtype}` stores blocks of {block}, but a row has {last}")

    def __str__(self) -> str:
        dims = ", ".join(str(d) for d in self.shape)
        layout = "" if self.layout == "row" else f" {self.layout}"
        return f"{self.dtype}[{dims}]{layout}"

    @property
    def in_rows(self) -> TensorType:
        """The type without its layout: what a value is, not where a target puts it."""
        return self if self.layout == "row" else replace(self, layout="row")

    @property
    def max_shape(self) -> tuple[int, ...]:
        """The shape with each symbol at its bound."""
        return tuple(d.bound if isinstance(d, Sym) else d for d in self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one innermost row."""
        last = self.max_shape[-1] if self.shape else 1
        if self.dtype in BLOCKS:
            block, size = BLOCKS[self.dtype]
            return last // block * size
        if self.dtype in CACHE_BLOCKS:
            used = last + 2 * (last // CACHE_BLOCKS[self.dtype])
            return -(-used // CACHE_ALIGN) * CACHE_ALIGN
        return last * DTYPE_BYTES[self.dtype]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored elements: a row of blocks counts in bytes."""
        if self.dtype in DTYPE_BYTES:
            return self.max_shape
        return (*self.max_shape[:-1], self.row_bytes)

    @property
    def planes(self) -> int:
        """Partial planes of the layout `planesN`, whose sum is the value; 1 for any other."""
        return int(self.layout[len("planes") :]) if self.layout.startswith("planes") else 1

    @property
    def nbytes(self) -> int:
        """Bytes with each symbol at its bound, in the type's layout."""
        tiles = -(-self.max_shape[0] // TILE_ROWS) if self.shape else 1
        if self.layout == "tile8":
            return tiles * (self.max_shape[-1] // PIECE_INPUTS) * PIECE_BYTES[self.dtype]
        if self.layout.startswith("planes"):
            return self.planes * tiles * TILE_ROWS * self.row_bytes
        rows = 1
        for dim in self.max_shape[:-1]:
            rows *= dim
        return rows * self.row_bytes

    @property
    def elements(self) -> int:
        """Number of elements with each symbol at its bound."""
        count = 1
        for dim in self.max_shape:
            count *= dim
        return count

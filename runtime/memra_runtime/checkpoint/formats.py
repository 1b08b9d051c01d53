"""Tensor formats: ggml's and safetensors' names, and how many bytes a block of each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class TensorInfo:
    """What a weight file says of one tensor.

    Shapes: row-major as Hugging Face has them, `[out, in]` (GGUF's `ne` reversed).
    `format` is a lower-case ggml name (`q4_k`, `bf16`, `i32`); a type that we have no name for is
    listed as `ggml_type_NUMBER` with `nbytes` 0.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int


class Block(NamedTuple):
    """`elements` values of a row are stored together in `nbytes` bytes."""

    elements: int
    nbytes: int


#: Source: ggml, `ggml.h` (enum ggml_type) and `ggml-common.h` (block structures).
GGML_TYPES: dict[int, str] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1",
    10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs",
    17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s",
    23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 30: "bf16",
    34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
}  # fmt: skip

BLOCKS: dict[str, Block] = {
    "f32": Block(1, 4), "f16": Block(1, 2), "bf16": Block(1, 2), "f64": Block(1, 8),
    "i8": Block(1, 1), "i16": Block(1, 2), "i32": Block(1, 4), "i64": Block(1, 8),
    "u8": Block(1, 1), "u16": Block(1, 2), "u32": Block(1, 4), "u64": Block(1, 8),
    "bool": Block(1, 1), "f8_e4m3": Block(1, 1), "f8_e5m2": Block(1, 1), "f8_e8m0": Block(1, 1),
    "q4_0": Block(32, 18), "q4_1": Block(32, 20), "q5_0": Block(32, 22), "q5_1": Block(32, 24),
    "q8_0": Block(32, 34), "q8_1": Block(32, 36), "q2_k": Block(256, 84),
    "q3_k": Block(256, 110), "q4_k": Block(256, 144), "q5_k": Block(256, 176),
    "q6_k": Block(256, 210), "q8_k": Block(256, 292), "iq2_xxs": Block(256, 66),
    "iq2_xs": Block(256, 74), "iq3_xxs": Block(256, 98), "iq1_s": Block(256, 50),
    "iq4_nl": Block(32, 18), "iq3_s": Block(256, 110), "iq2_s": Block(256, 82),
    "iq4_xs": Block(256, 136), "iq1_m": Block(256, 56), "tq1_0": Block(256, 54),
    "tq2_0": Block(256, 66), "mxfp4": Block(32, 17), "nvfp4": Block(64, 36),
}  # fmt: skip

#: Formats that kernels and repacking read; any other is an error once a spec wants the tensor.
SUPPORTED: frozenset[str] = frozenset(
    {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "i32", "i64"}
)

#: Source: safetensors, `tensor.rs` (Dtype).
SAFETENSORS_TYPES: dict[str, str] = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32",
    "I16": "i16", "I8": "i8", "U64": "u64", "U32": "u32", "U16": "u16", "U8": "u8",
    "BOOL": "bool", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2", "F8_E8M0": "f8_e8m0",
}  # fmt: skip


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of values of a shape; 1 for a scalar."""
    total = 1
    for size in shape:
        total *= size
    return total

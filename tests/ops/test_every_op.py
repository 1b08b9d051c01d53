"""Every sample of every op, through shape rule, CPU kernel, reference and row independence."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from memra_compiler.codegen.cpu import KernelSpec, canonical, compile_kernel, link
from memra_compiler.codegen.toolchain import find_linker, host_cpu
from memra_compiler.ir.types import BLOCK_FORMATS, TensorType
from memra_compiler.ops.base import Op, Sample, discover
from memra_compiler.ops.formats import dequantise, random_bytes
from memra_compiler.ops.kv_rows import cache_values, encode_rows
from memra_compiler.ops.linear import MAX_ROWS
from memra_compiler.ops.quantise import unpack

CASES = [
    pytest.param(cls, sample, id=f"{name}-{i}")
    for name, cls in sorted(discover().items())
    for i, sample in enumerate(cls.samples())
]

#: Relative error allowed, by the coarsest type that is written.
TOLERANCE = {"f32": 2e-5, "f16": 1e-3, "bf16": 8e-3, "i32": 0, "i64": 0, "head_row": 0, "a8": 9e-3,
             "q8_0_rows": 9e-3}  # fmt: skip
STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32,
           "i64": np.int64, "head_row": np.int32}  # fmt: skip
#: Fills outputs before a run; a value no op writes.
POISON = 0xB3


def empty_rows(type: TensorType) -> np.ndarray:
    """Poisoned rows of an output, as stored."""
    shape = (MAX_ROWS, type.row_bytes) if type.dtype == "a8" else (MAX_ROWS, *type.max_shape[1:])
    storage = np.dtype(STORAGE.get(type.dtype, np.uint8))
    size = int(np.prod(shape)) * storage.itemsize
    return np.full(size, POISON, np.uint8).view(storage).reshape(shape)


def as_stored(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "a8":
        blocks = value.astype(np.float32).reshape(len(value), -1, 32)
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        data = np.rint(blocks / scale).astype(np.int8).view(np.uint8)
        return np.concatenate([scale.view(np.uint8), data], axis=-1).reshape(len(value), -1)
    if dtype == "q8_0_rows":
        return encode_rows(value)
    if dtype == "bf16":
        return (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return value.astype(STORAGE[dtype])


def as_float(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "a8":
        shape = (len(value), value.shape[1] // 36 * 32)
        return unpack(value, TensorType(shape, "a8"))
    if dtype == "q8_0_rows":
        return cache_values(value)
    if dtype == "bf16":
        return (value.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return value.astype(np.int64 if dtype in ("i32", "i64", "head_row") else np.float64)


def operands(op: Op, sample: Sample) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random operands as stored for the kernel, and as float64 for the reference."""
    rng = np.random.default_rng(7)
    given = dict(sample.values)
    stored, exact = [], []
    for i, type in enumerate(sample.types):
        operand = op.operand(i)
        if operand.name in given:
            value = np.asarray(given[operand.name](rng))
            stored.append(as_stored(value, type.dtype))
            exact.append(as_float(stored[-1], type.dtype))
        elif operand.sigil == "$":
            data = random_bytes(type, rng)
            stored.append(data)
            exact.append(dequantise(data, type))
        else:
            value = rng.standard_normal(type.max_shape)
            stored.append(as_stored(value, type.dtype))
            bytes_of_rows = type.dtype == "q8_0_rows"  # which references read themselves
            exact.append(stored[-1].copy() if bytes_of_rows else as_float(stored[-1], type.dtype))
        if type.dtype in ("i32", "head_row"):
            exact[-1] = exact[-1].astype(np.int32)
    return stored, exact


class CompiledOp:
    """An op's CPU kernel, callable on NumPy arrays."""

    def __init__(self, op: Op, types: tuple[TensorType, ...], folder: Path) -> None:
        self.op, self.outputs = op, op.infer(*types)
        wide = tuple(canonical(t) for t in (*types, *self.outputs))
        self.scratch = op.scratch_floats(*types)
        spec = KernelSpec("kernel", op, wide, self.scratch)
        code, self.text = compile_kernel(spec, host_cpu())
        (folder / "kernel.o").write_bytes(code)
        link(find_linker(), [folder / "kernel.o"], folder / "kernel.so")
        self.function = ctypes.CDLL(str(folder / "kernel.so")).kernel

    def __call__(self, rows: int, *arrays: np.ndarray) -> list[np.ndarray]:
        outputs = [empty_rows(t) for t in self.outputs]
        scratch = [np.full(self.scratch, np.nan, np.float32)] if self.scratch else []
        everything = [*arrays, *outputs, *scratch]
        self.function(ctypes.c_int(rows), *(ctypes.c_void_p(a.ctypes.data) for a in everything))
        return outputs


@pytest.mark.parametrize(("cls", "sample"), CASES)
def test_cpu_kernel_agrees_with_reference(cls: type[Op], sample: Sample, tmp_path: Path) -> None:
    op = cls(**dict(sample.attrs))
    stored, exact = operands(op, sample)
    kernel = CompiledOp(op, sample.types, tmp_path)

    outputs = kernel(sample.rows, *stored)
    expected = op.reference(sample.rows, *exact)

    assert len(outputs) == len(expected)
    for got, want, type in zip(outputs, expected, kernel.outputs, strict=True):
        assert want.shape == (sample.rows, *type.max_shape[1:])
        compare(as_float(got[: sample.rows], type.dtype), want, type.dtype)
        assert (got[sample.rows :].view(np.uint8) == POISON).all(), "rows past T were written"
    for i, (got, want, type) in enumerate(zip(stored, exact, sample.types, strict=True)):
        if op.operand(i).sigil == "@":
            got, want = as_float(got, type.dtype), cache_values(want)
            compare(got, want, type.dtype)
            if not op.operand(i).writes:
                assert (got == want).all(), "a read-only plane was written"


def compare(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    scale = max(1.0, float(np.abs(want).max())) if want.size else 1.0
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=0, atol=TOLERANCE[dtype] * scale
    )


@pytest.mark.parametrize(("cls", "sample"), CASES)
def test_row_bits_do_not_depend_on_row_count(cls: type[Op], sample: Sample, tmp_path: Path) -> None:
    """Row t of T rows has the bits it has when it is the last of t + 1 rows."""
    op = cls(**dict(sample.attrs))
    outputs = op.infer(*sample.types)
    if not op.rows_independent or not outputs or sample.rows < 2:
        assert not outputs or sample.rows == 1 or not op.rows_independent
        return
    stored, _ = operands(op, sample)
    kernel = CompiledOp(op, sample.types, tmp_path)
    whole = kernel(sample.rows, *(a.copy() for a in stored))
    for rows in range(1, sample.rows):
        part = kernel(rows, *(a.copy() for a in stored))
        for a, b in zip(part, whole, strict=True):
            assert a[:rows].tobytes() == b[:rows].tobytes()


@pytest.mark.parametrize("name", sorted(discover()))
def test_op_is_documented_and_costed(name: str) -> None:
    cls = discover()[name]
    assert cls.__doc__
    assert "Shapes:" in cls.__doc__ or (issubclass(cls, Op) and len(cls.operands) > 0)
    for sample in cls.samples():
        op = cls(**dict(sample.attrs))
        assert op.cost(sample.rows, *sample.types).bytes > 0
        assert op.numeric_class(*sample.types)


def test_block_formats_all_have_samples() -> None:
    cls = discover()["linear"]
    seen = {s.types[1].dtype for s in cls.samples()}
    assert seen >= set(BLOCK_FORMATS)

"""What ops say they compute, as tensor expressions: the same as their NumPy references.

TVM compiles each expression for the CPU, unscheduled. How CUDA kernels are made of it is tested in
`tests/schedules` and, on a GPU, in `tests/gpu/test_gpu_tvm.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_every_op import compare, operands

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops.base import Op, Sample, discover
from memra_compiler.ops.scheduled import TeFunction, te_functions

#: Blocks are decoded by functions that only CUDA has (`templates/lib/dequant.cuh`).
FORMATS = ("f32", "f16", "bf16", "i32")
DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int32": np.int32,
}
CASES = [
    pytest.param(cls, sample, id=f"{name}-{i}")
    for name, cls in sorted(discover().items())
    if cls.compute is not Op.compute
    for i, sample in enumerate(cls.samples())
    if all(type.dtype in FORMATS for type in sample.types)
]


def in_rows(op: Op, sample: Sample) -> tuple[TensorType, ...]:
    """The types of a sample, the first dimension of its values counting rows."""
    made = [
        type if op.operand(i).sigil == "$" else by_row(type) for i, type in enumerate(sample.types)
    ]
    return *made, *op.infer(*made)


def by_row(type: TensorType) -> TensorType:
    return replace(type, shape=(Sym("T", type.max_shape[0]), *type.shape[1:]))


def run(made: TeFunction, arrays: list[np.ndarray], rows: int) -> np.ndarray:
    """Compile a function for the CPU and call it."""
    import tvm

    built = tvm.compile(made.function, target="llvm")
    *inputs, result = [(str(p.ty.dtype), shape(p, rows)) for p in made.function.params[:-1]]
    given = [
        tvm.runtime.tensor(np.ascontiguousarray(a).reshape(-1).view(DTYPES[dtype]).reshape(of))
        for a, (dtype, of) in zip(arrays, inputs, strict=True)
    ]
    kind = np.dtype(DTYPES[result[0]])
    out = tvm.runtime.tensor(np.full(result[1], np.nan if kind.kind == "f" else -1, kind))
    built(*given, out, rows)
    return out.numpy()


def shape(parameter: Any, rows: int) -> list[int]:
    """The shape of a parameter, whose first dimension may be `rows`."""
    return [int(n) if hasattr(n, "value") else rows for n in parameter.ty.shape]


@pytest.mark.parametrize(("cls", "sample"), CASES)
def test_expression_agrees_with_reference(cls: type[Op], sample: Sample) -> None:
    op = cls(**dict(sample.attrs))
    given, exact = operands(op, sample)
    wanted = op.reference(sample.rows, *exact)
    for made, want in zip(te_functions(op, *in_rows(op, sample)), wanted, strict=True):
        got = run(made, given, sample.rows)
        compare(got.reshape(want.shape).astype(np.float64), want, "f32")

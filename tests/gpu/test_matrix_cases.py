"""What tests of matrix kernels give them is as large as what the kernels read. Needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_driver import ARCH
from matrix_cases import stored_rows
from test_gpu_linear import PRODUCTS, Product

from memra_compiler.codegen.cuda import compile_cuda, render
from memra_compiler.ir.types import PIECE_BYTES, TensorType


@pytest.mark.parametrize("kind", ["a8", "bf16", "f32"])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_stored_rows_fill_their_type(kind: str, rows: int) -> None:
    """The memory plan gives x as many bytes, however few rows a call has."""
    type = TensorType((16, 128), kind, "tile8" if kind in PIECE_BYTES else "row")
    assert stored_rows(np.ones((rows, 128), np.float32), type).nbytes == type.nbytes


#: Slices of x in registers, and one that is read again with every tile.
TALL = [
    case
    for case in PRODUCTS
    if case.label in ("q4_0-a8-16 rows", "q4_0-bf16-long 16 rows", "q6_k-bf16-long 16 rows")
]


@pytest.mark.parametrize("case", TALL, ids=lambda c: c.label)
def test_kernels_read_no_more_than_a_test_uploads(case: Product) -> None:
    """One row of sixteen: the kernel reads both tiles, and the compiler counts their bytes."""
    (launch,) = case.launches
    symbol, source = render(launch, case.name)
    given = stored_rows(np.ones((1, case.inputs), np.float32), case.x).nbytes
    bound = f"\nstatic_assert(kColumnTiles * Activations::kBytes == {given});\n"
    assert compile_cuda(source + bound, symbol, ARCH)

"""Every kernel that TVM schedules, on a GPU, against the op's NumPy reference.

What is checked is what `kernel_cases.py` lists: values, bounds, planes, and that a row's bits
depend on no other row and not on their number. Without TVM the sources come from the bundle.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import COUNTS, POISON, Case, check_cases, close, normal, run
from scheduled_bundle import scheduled
from scheduled_cases import CAP, CASES, PRODUCTS

from memra_compiler.ops.formats import dequantise, random_bytes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def sources(gpu: Gpu, request: pytest.FixtureRequest) -> None:
    """A bundle that is not old, where it is needed."""
    if importlib.util.find_spec("tvm") is None:
        request.getfixturevalue("bundle")


@pytest.mark.parametrize("name", CASES)
def test_kernel(gpu: Gpu, name: str) -> None:
    one = CASES[name]
    launches = scheduled(one.op, ARCH, *one.types)
    assert [launch.rule for launch in launches] == [one.rule]
    types = tuple(type.in_rows for type in one.types)
    given = one.operands(np.random.default_rng(1))
    case = Case(one.op, types, launches, given, one.planes, one.splits, tolerance=one.tolerance,
                by_row=one.by_row)  # fmt: skip
    check_cases(gpu, [case], COUNTS[case.bound])


def test_softcap_holds_what_is_not_a_number(gpu: Gpu) -> None:
    rows = np.zeros((1, 64), np.float32)
    rows[0, :4] = np.nan, np.inf, -np.inf, 1e30
    op, types = CAP
    given, out = gpu.upload(rows), gpu.upload(np.zeros_like(rows))
    gpu.run(scheduled(op, ARCH, *types), "softcap", ARCH, 1, [given, out])
    got = gpu.download(out, rows)
    gpu.free([given, out])
    assert np.isnan(got[0, 0])
    np.testing.assert_allclose(got[0, 1:4], [30, -30, 30], rtol=1e-6)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_prompts(gpu: Gpu, name: str) -> None:
    """Weights in every format, as stored; each row the same bits in any company."""
    op, types = PRODUCTS[name]
    x, *weights, _ = types
    bound, inputs = x.max_shape
    rng = np.random.default_rng(6)
    stored = [random_bytes(w, rng) for w in weights]
    values = [dequantise(data, w) for data, w in zip(stored, weights, strict=True)]
    given = normal(rng, bound, inputs) / np.float32(inputs**0.5)
    launches = scheduled(op, ARCH, *types)
    assert [launch.rule for launch in launches] == ["gemm"]
    case = Case(op, types, launches, [given, *stored])
    (whole,), _ = run(gpu, case, bound, case.operands)
    for rows in sorted({1, 17, bound - 1, bound}):
        (got,), after = run(gpu, case, rows, case.operands)
        (want,) = op.reference(rows, given.astype(np.float64), *values)
        close(got[:rows], want, 4e-5, op.name)
        assert (got[rows:].reshape(-1).view(np.uint8) == POISON).all(), "rows past T were written"
        assert got[:rows].tobytes() == whole[:rows].tobytes(), rows
        for left, right in zip(after, case.operands, strict=True):
            assert left.tobytes() == right.tobytes()

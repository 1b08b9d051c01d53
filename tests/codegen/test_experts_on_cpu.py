"""Kernels of experts, run on the CPU: what they write, for every routing, and that rows are alone.

On a GPU, tests/gpu/test_gpu_experts.py covers the sizes of real models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from templates_on_cpu import TemplatesOnCpu

from cpp_on_cpu import compiler
from expert_cases import Arrays, Case, add_planes, companies, small_cases
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_experts import top_experts_launches
from memra_compiler.ops.top_experts import TopExperts

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

HOPPER = ARCHS["sm_90a"]


@pytest.mark.parametrize("case", list(small_cases()), ids=lambda c: c.label)
def test_products_of_chosen_experts(case: Case, tmp_path: Path) -> None:
    """Against float64; in other company, a row has the same bits, and no other is written."""
    arrays, run = Arrays(case, HOPPER), TemplatesOnCpu(case.launches(HOPPER, True), tmp_path)
    weights, everyone = arrays.weights(), list(range(case.rows))
    whole = np.empty(0)
    for picked in [everyone, *companies(case.rows)[:2]]:
        planes = case.empty_out()
        run(len(picked), *arrays.values(picked), *weights, planes)
        assert np.isnan(planes[:, len(picked) :]).all()
        out = add_planes(planes)[: len(picked)]
        whole = out if picked is everyone else whole
        np.testing.assert_array_equal(out, whole[picked])
    arrays.check(whole)


def test_planes_of_slots_add_up_to_the_sum(tmp_path: Path) -> None:
    """A reader that adds planes in order has the bits of the launch that adds them."""
    case = Case("down", ("q4_0",), "a8", 5)
    arrays, planes = Arrays(case, HOPPER), case.empty_out()
    out, scratch = np.zeros((case.rows, case.width), np.float32), planes.copy()
    operands = [*arrays.values(range(5)), *arrays.weights()]
    TemplatesOnCpu(case.launches(HOPPER), tmp_path)(5, *operands, out, scratch)
    TemplatesOnCpu(case.launches(HOPPER, True), tmp_path)(5, *operands, planes)
    np.testing.assert_array_equal(add_planes(planes)[:5], out)


@pytest.mark.parametrize(("experts", "active"), [(8, 3), (128, 8), (30, 30)])
def test_choice_of_experts(experts: int, active: int, tmp_path: Path) -> None:
    """Ties, rows that are not finite, and logits that lie far apart."""
    op, rows = TopExperts(active), 6
    logits, scale = TensorType((rows, experts)), TensorType((experts,))
    rng = np.random.default_rng(experts)
    x = rng.standard_normal((rows, experts)).astype(np.float32)
    x[1] = rng.integers(-1, 2, experts)
    x[1, :2] = -0.0, 0.0
    x[2] *= 60
    x[3, 2], x[4, 1] = np.nan, -np.inf
    scales = rng.uniform(0.5, 2, experts).astype(np.float32)
    ids, shares = np.full((rows, active), -1, np.int32), np.full((rows, active), -1, np.float32)
    launches = top_experts_launches(op, HOPPER, logits, scale, *op.infer(logits, scale))
    TemplatesOnCpu(launches, tmp_path)(rows - 1, x, scales, ids, shares)
    want_ids, want = op.reference(rows - 1, x.astype(np.float64), scales.astype(np.float64))
    np.testing.assert_array_equal(ids[:-1], want_ids)
    np.testing.assert_allclose(shares[:-1], want, rtol=2e-6, atol=1e-30)
    assert (ids[-1] == -1).all()
    assert (shares[-1] == -1).all()

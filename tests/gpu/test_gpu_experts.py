"""Kernels of experts on a GPU, against float64: every format and routing, 1 to 64 rows.

Outputs are poisoned, buffers guarded, and a row has the same bits in any company and any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from matrix_cases import Named, Operands
from worst_errors import note

from expert_cases import ROUTINGS, TOLERANCE, Arrays, Case, add_planes, companies
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda_experts import top_experts_launches
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.top_experts import TopExperts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]


@dataclass(frozen=True)
class OnGpu:
    """A case whose launches are compiled before the first test."""

    case: Case
    planes: bool = True

    def named(self) -> list[Named]:
        return [(launch, "experts") for launch in self.case.launches(ARCH, self.planes)]


def cases() -> Iterator[OnGpu]:
    for name, format in FORMATS.items():
        for kind in (*format.classes, "f32"):
            for half in ("gated", "down"):
                yield OnGpu(Case(half, (name,), kind, 16, 16, 4, 512, 256))
    for routing in ROUTINGS:
        for half in ("gated", "down"):
            for rows in (16, 64):
                sizes = 24, 8, 768, 192, "silu", routing
                yield OnGpu(Case(half, ("q4_0",), "a8", rows, *sizes))
    # of the 26B, and with matrices of their own for gate and up
    for half in ("gated", "down"):
        for name, kind in (("q4_0", "a8"), ("q8_0", "a8"), ("q4_0", "bf16"), ("bf16", "bf16")):
            yield OnGpu(Case(half, (name,), kind, 6, 12, 8, 2816, 704))
    yield OnGpu(Case("gated", ("q6_k",), "a8", 6, 12, 8, 2816, 704))
    yield OnGpu(Case("gated", ("q4_0", "q4_0"), "a8", 8, 12, 8, 2816, 704))
    yield OnGpu(Case("gated", ("q4_0", "q8_0"), "a8", 5, 8, 3, 256, 64))
    yield OnGpu(Case("down", ("q4_0",), "a8", 16, 16, 4, 512, 256), planes=False)


CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.case.label}{'' if c.planes else '-sum'}")
def test_products_of_chosen_experts(gpu: Gpu, case: OnGpu) -> None:
    c, arrays = case.case, Arrays(case.case, ARCH)
    launches, everyone = c.launches(ARCH, case.planes), list(range(c.rows))
    out = c.empty_out() if case.planes else np.full((1, *c.out().max_shape), np.nan, np.float32)
    scratch = np.full(max(1, c.scratch(case.planes)), np.nan, np.float32)
    whole = np.empty(0)
    with Operands(gpu, c.label) as held:
        weights = [held.upload(w) for w in arrays.weights()]
        others = companies(c.rows)
        for picked in [everyone, *(others if c.rows <= 16 else [others[0], others[1], others[-1]])]:
            target, extra = held.upload(out), held.upload(scratch)
            values = [held.upload(v) for v in arrays.values(picked)]
            operands = [*values, *weights, target, extra]
            gpu.run(launches, "experts", ARCH, len(picked), operands)
            raw = gpu.download(target, out)
            gpu.download(extra, scratch)
            assert np.isnan(raw[:, len(picked) :]).all(), "a row that nobody asked for was written"
            got = add_planes(raw)[: len(picked)]
            whole = got if picked is everyone else whole
            same = np.array_equal(got, whole[picked])
            assert same, f"bits of a row depend on the others: {picked}"
    note(f"experts {c.half} {c.kind}", arrays.check(whole), TOLERANCE)


@pytest.mark.parametrize(("experts", "active"), [(8, 2), (128, 8), (60, 4), (512, 10)])
def test_choice_of_experts(gpu: Gpu, experts: int, active: int) -> None:
    """Ties, rows that are not finite, and logits that lie far apart."""
    op, rows = TopExperts(active), 16
    logits, scale = TensorType((rows, experts)), TensorType((experts,))
    rng = np.random.default_rng(experts)
    x = rng.standard_normal((rows, experts)).astype(np.float32)
    x[1] = rng.integers(-1, 2, experts)
    x[2] *= 60
    x[3, 2], x[4, 1] = np.nan, -np.inf
    scales = rng.uniform(0.5, 2, experts).astype(np.float32)
    ids, shares = np.full((rows, active), -1, np.int32), np.full((rows, active), -1, np.float32)
    launches = top_experts_launches(op, ARCH, logits, scale, *op.infer(logits, scale))
    with Operands(gpu, f"choice {experts}") as held:
        operands = [held.upload(a) for a in (x, scales, ids, shares)]
        gpu.run(launches, "top_experts", ARCH, rows - 1, operands)
        found, got = gpu.download(operands[2], ids), gpu.download(operands[3], shares)
    want_ids, want = op.reference(rows - 1, x.astype(np.float64), scales.astype(np.float64))
    np.testing.assert_array_equal(found[:-1], want_ids)
    np.testing.assert_allclose(got[:-1], want, rtol=2e-6, atol=1e-30)
    assert (found[-1] == -1).all()
    assert (got[-1] == -1).all()

"""Templates of the centroid head on a GPU, against the NumPy reference of each op."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from kernel_cases import Case, normal, rows_of, run

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.clusters import ID_FORMATS, ClusterLogits, TopClusters
from memra_compiler.ops.formats import WEIGHT_FORMATS, dequantise, random_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("count", "active"), [(2048, 32), (304, 5), (16, 16)])
def test_best_clusters(gpu: Gpu, count: int, active: int) -> None:
    """Ties, NaN and infinities included."""
    op, rng = TopClusters(active), np.random.default_rng(1)
    scores = rng.integers(0, count // 4, (3, count)).astype(np.float32)
    scores[1, :6] = np.nan, np.inf, -np.inf, np.nan, -3.4e38, 9
    types = rows_of(3, count), rows_of(3, active, dtype="i32")
    case = Case(op, types, op.lower_cuda(ARCH, *types), [scores])
    for rows in (1, 3):
        (found,), _ = run(gpu, case, rows, [scores])
        np.testing.assert_array_equal(found[:rows], *op.reference(rows, scores))


@pytest.mark.parametrize("ids", ID_FORMATS)
@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_cluster_logits(gpu: Gpu, form: str, ids: str) -> None:
    vocab, size, active, inputs = 4096, 128, 8, 256
    op, rng = ClusterLogits(size), np.random.default_rng(2)
    table, ordering = TensorType((vocab, inputs), form), TensorType((vocab,), ids)
    types = (rows_of(2, inputs), rows_of(2, active, dtype="i32"), ordering, table,
             rows_of(2, active * size))  # fmt: skip
    clusters = rng.permuted(np.tile(np.arange(vocab // size), (2, 1)), axis=1)[:, :active]
    tokens = rng.permutation(vocab).astype(f"int{ids[1:]}")
    x, weights = normal(rng, 2, inputs), random_bytes(table, rng)
    given = [x, clusters.astype(np.int32), tokens.view(np.uint8), weights]
    case = Case(op, types, op.lower_cuda(ARCH, *types), given)
    whole = None
    for rows in (2, 1):
        (found,), _ = run(gpu, case, rows, given)
        exact = x.astype(np.float64), given[1], tokens, dequantise(weights, table)
        (want,) = op.reference(rows, *exact)
        np.testing.assert_allclose(found[:rows], want, rtol=0, atol=3e-6 * np.abs(want).max())
        assert whole is None or found[0].tobytes() == whole[0].tobytes()
        whole = found

"""CUDA launches of the head that looks at the best clusters only."""

from __future__ import annotations

from dataclasses import dataclass

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import expect
from memra_compiler.ops.clusters import ClusterLogits, TopClusters
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.cuda_params import ID_TYPES, WARP, bound, ceil_div, columns, launch

#: Threads of a block that ranks clusters, a cluster each; and warps of one that computes logits.
RANK_THREADS = 128
LOGIT_WARPS = 4
#: Scores that fit the shared memory of any block.
MOST_CLUSTERS = 12288


@dataclass(frozen=True)
class TopClustersParams:
    """`head/top_clusters.cu.j2`."""

    count: int
    active: int
    threads: int


@dataclass(frozen=True)
class ClusterLogitsParams:
    """`head/cluster_logits.cu.j2`."""

    format: str
    header: str
    id_type: str
    inputs: int
    vocab: int
    row_bytes: int
    active: int
    size: int
    warps: int


def top_clusters_launches(
    op: TopClusters, arch: CudaArch, *types: TensorType
) -> tuple[Launch, ...]:
    """Each cluster counts those that are better: its place among the best."""
    scores = types[0]
    count, rows = columns(scores), bound(scores)
    expect(count <= MOST_CLUSTERS, op, f"at most {MOST_CLUSTERS} clusters, got {scores}")
    params = TopClustersParams(count, op.active, RANK_THREADS)
    grid = (ceil_div(count, RANK_THREADS), rows, 1)
    return (launch(arch, "head/top_clusters.cu.j2", params, grid, RANK_THREADS, 4 * count),)


def cluster_logits_launches(
    op: ClusterLogits, arch: CudaArch, *types: TensorType
) -> tuple[Launch, ...]:
    """A warp a token: its row of the table, as stored, times x."""
    x, clusters, ordering, table, _ = types
    expect(table.layout != "tiles16", op, f"reads a table as stored, got {table}")
    format, (vocab, inputs) = FORMATS[table.dtype], table.max_shape
    params = ClusterLogitsParams(
        format=format.struct,
        header=format.header,
        id_type=ID_TYPES[ordering.dtype],
        inputs=inputs,
        vocab=vocab,
        row_bytes=table.row_bytes,
        active=columns(clusters),
        size=op.size,
        warps=LOGIT_WARPS,
    )
    grid = (ceil_div(columns(clusters) * op.size, LOGIT_WARPS), bound(x), 1)
    return (launch(arch, "head/cluster_logits.cu.j2", params, grid, LOGIT_WARPS * WARP),)

"""CUDA launches of the confidence of a draft, and of what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.confidence import Confidence, WeighDraft
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_params import WARP, bound, columns, launch, whole_tiles
from memra_compiler.ops.cuda_state import ONE_BLOCK, THREADS, NoParams, vocabulary_parts


@dataclass(frozen=True)
class ConfidencePartsParams:
    """`head/confidence_parts.cu.j2`."""

    vocab: int
    parts: int
    threads: int
    splits: int
    plane_rows: int
    bounded: bool


@dataclass(frozen=True)
class ConfidenceParams:
    """`head/confidence.cu.j2`."""

    parts: int
    bounded: bool


def confidence_scratch_floats(op: Confidence, logits: TensorType) -> int:
    """Scratch of `confidence_launches`: a sum a row and part."""
    return bound(logits) * vocabulary_parts(columns(logits))


def confidence_launches(
    op: Confidence, arch: CudaArch, *types: TensorType, splits: int = 1
) -> tuple[Launch, ...]:
    """The probability of each row's choice: sums of parts of the vocabulary, then of all."""
    logits = types[0]
    vocab, rows = columns(logits), bound(logits)
    parts = vocabulary_parts(vocab)
    bounded = types[1].dtype == "head_row"
    first = ConfidencePartsParams(vocab, parts, THREADS, splits, whole_tiles(rows), bounded)
    last = ConfidenceParams(parts, bounded)
    return (
        launch(arch, "head/confidence_parts.cu.j2", first, (parts, rows, 1), THREADS),
        launch(arch, "head/confidence.cu.j2", last, (rows, 1, 1), WARP),
    )


def weigh_draft_launches(op: WeighDraft, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Note a doubtful draft, or end its chain. Takes the handles of two conditional nodes."""
    made = launch(arch, "state/weigh_draft.cu.j2", NoParams(), ONE_BLOCK, WARP)
    return (replace(made, graph_handles=2),)

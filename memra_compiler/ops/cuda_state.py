"""CUDA launches of the ops on the device block, and of the greedy choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memra_compiler.ir.types import DTYPE_BYTES, TensorType
from memra_compiler.ops.again import Again
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.base import Op, expect
from memra_compiler.ops.chain import Advance, Begin, DraftToken
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.cuda_params import (
    VECTOR,
    WARP,
    bound,
    ceil_div,
    columns,
    launch,
    whole_tiles,
)
from memra_compiler.ops.settle import Accept, AdaptDepth, Commit, Rollback
from memra_compiler.ops.state import Positions, ReadRow, ReadTokens, WriteRows

THREADS = 256
ONE_BLOCK = (1, 1, 1)
#: Parts of the vocabulary that look for their best logit, or add up, at once.
ARGMAX_PARTS = 64


@dataclass(frozen=True)
class NoParams:
    """`state/advance.cu.j2`, `accept`, `again` and `weigh_draft`."""


@dataclass(frozen=True)
class PositionsParams:
    """`state/positions.cu.j2`."""

    kind: str


@dataclass(frozen=True)
class ReadTokensParams:
    """`state/read_tokens.cu.j2`."""

    chain: bool


@dataclass(frozen=True)
class CopyRowsParams:
    """`state/copy_rows.cu.j2`; rows are `words` of type `word_type`."""

    words: int
    threads: int
    word_type: str


@dataclass(frozen=True)
class BeginParams:
    """`state/begin.cu.j2`."""

    size: int
    threads: int
    plain: bool
    cuts: bool


@dataclass(frozen=True)
class DraftTokenParams:
    """`state/draft_token.cu.j2`."""

    forced: int


@dataclass(frozen=True)
class RollbackParams:
    """`state/rollback.cu.j2`."""

    skip: bool


@dataclass(frozen=True)
class CommitParams:
    """`state/commit.cu.j2`."""

    size: int
    ring_tokens: int
    end_ids: int
    threads: int
    row_shift: int


@dataclass(frozen=True)
class AdaptDepthParams:
    """`state/adapt_depth.cu.j2`."""

    fresh: bool


def positions_launches(op: Positions, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """The position of each row, from the counters."""
    return (launch(arch, "state/positions.cu.j2", PositionsParams(op.kind), ONE_BLOCK, WARP),)


def read_tokens_launches(op: ReadTokens, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """The ids that a program reads: those of the batch or of the chain."""
    return (launch(arch, "state/read_tokens.cu.j2", ReadTokensParams(op.chain), ONE_BLOCK, WARP),)


def _copy(op: Op, arch: CudaArch, row: TensorType, elements: int, rows: int) -> tuple[Launch, ...]:
    expect(DTYPE_BYTES.get(row.dtype) == 4, op, f"copies words of 4 bytes, got {row}")
    vector = elements % VECTOR == 0
    words = elements // VECTOR if vector else elements
    threads = min(THREADS, ceil_div(words, WARP) * WARP)
    params = CopyRowsParams(words, threads, "int4" if vector else "int")
    return (
        launch(arch, "state/copy_rows.cu.j2", params, (ceil_div(words, threads), rows, 1), threads),
    )


def read_row_launches(op: ReadRow, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """One row out of a plane."""
    return _copy(op, arch, types[0], types[0].elements, 1)


def write_rows_launches(op: WriteRows, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Rows into a plane."""
    return _copy(op, arch, types[0], columns(types[0]), bound(types[0]))


def begin_launches(op: Begin, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Start a round: its token, its depth, and the hidden row the chain starts from.

    One whose chain may be cut takes the handles of two conditional nodes.
    """
    params = BeginParams(types[2].elements, THREADS, op.plain, op.cuts)
    made = launch(arch, "state/begin.cu.j2", params, ONE_BLOCK, THREADS)
    return (replace(made, graph_handles=2 if op.cuts else 0),)


def draft_token_launches(op: DraftToken, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Put the drafted token into the batch."""
    params = DraftTokenParams(types[2].elements)
    return (launch(arch, "state/draft_token.cu.j2", params, ONE_BLOCK, WARP),)


def advance_launches(op: Advance, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """One more draft step is done."""
    return (launch(arch, "state/advance.cu.j2", NoParams(), ONE_BLOCK, WARP),)


def accept_launches(op: Accept, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Count the drafts that the target would have chosen itself."""
    return (launch(arch, "state/accept.cu.j2", NoParams(), ONE_BLOCK, WARP),)


def rollback_launches(op: Rollback, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Move the position back behind the rejected rows."""
    return (launch(arch, "state/rollback.cu.j2", RollbackParams(op.skip), ONE_BLOCK, WARP),)


def commit_launches(op: Commit, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Hand over what was accepted: ring, hidden row, pending token, end of sequence."""
    *_, hidden, ring, eos = types
    params = CommitParams(hidden.elements, ring.elements, eos.elements, THREADS, op.row_shift)
    return (launch(arch, "state/commit.cu.j2", params, ONE_BLOCK, THREADS),)


def adapt_depth_launches(op: AdaptDepth, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Choose the depth of the next round."""
    return (launch(arch, "state/adapt_depth.cu.j2", AdaptDepthParams(op.fresh), ONE_BLOCK, WARP),)


def again_launches(op: Again, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
    """Does the burst go on, and how deep? Takes the handles of two conditional nodes."""
    made = launch(arch, "state/again.cu.j2", NoParams(), ONE_BLOCK, WARP)
    return (replace(made, graph_handles=2),)


@dataclass(frozen=True)
class ArgMaxPartsParams:
    """`head/argmax_parts.cu.j2`."""

    vocab: int
    parts: int
    threads: int
    splits: int
    plane_rows: int
    suppress: tuple[int, ...]
    bounded: bool = False


@dataclass(frozen=True)
class ArgMaxChoiceParams:
    """`head/argmax_choice.cu.j2`."""

    parts: int
    bounded: bool = False


def vocabulary_parts(vocab: int) -> int:
    """Parts of the vocabulary that are gone through at once."""
    return min(ARGMAX_PARTS, ceil_div(vocab, VECTOR * THREADS))


def argmax_scratch_floats(op: Op, logits: TensorType) -> int:
    """Scratch of `argmax_launches`: a key of 64 bits a row and part."""
    return 2 * bound(logits) * vocabulary_parts(columns(logits))


def argmax_launches(
    op: Op, arch: CudaArch, *types: TensorType, splits: int = 1, bounded: bool = False
) -> tuple[Launch, ...]:
    """The best id of each row: parts of the vocabulary, then the choice among them.

    `bounded`: of a trimmed head, whose rows in use the second operand counts.
    """
    logits = types[0]
    vocab, rows = columns(logits), bound(logits)
    parts = vocabulary_parts(vocab)
    suppress = op.suppress if isinstance(op, ArgMax) else ()
    first = ArgMaxPartsParams(vocab, parts, THREADS, splits, whole_tiles(rows), suppress, bounded)
    last = ArgMaxChoiceParams(parts, bounded)
    return (
        launch(arch, "head/argmax_parts.cu.j2", first, (parts, rows, 1), THREADS),
        launch(arch, "head/argmax_choice.cu.j2", last, (rows, 1, 1), WARP),
    )

"""Weight files: open one, bind its tensors to what a spec wants, and compare its metadata."""

from __future__ import annotations

from memra_runtime.checkpoint.binding import Binding, WantedTensor, bind
from memra_runtime.checkpoint.core import Checkpoint, arch_name
from memra_runtime.checkpoint.expect import Expectation, check_arch, check_metadata
from memra_runtime.checkpoint.finite import check_finite, find_nonfinite
from memra_runtime.checkpoint.formats import BLOCKS, SUPPORTED, Block, TensorInfo, elements
from memra_runtime.checkpoint.opening import open_checkpoint
from memra_runtime.checkpoint.ranks import map_ids, ranks_digest, read_ranks

__all__ = [
    "BLOCKS",
    "SUPPORTED",
    "Binding",
    "Block",
    "Checkpoint",
    "Expectation",
    "TensorInfo",
    "WantedTensor",
    "arch_name",
    "bind",
    "check_arch",
    "check_finite",
    "check_metadata",
    "elements",
    "find_nonfinite",
    "map_ids",
    "open_checkpoint",
    "ranks_digest",
    "read_ranks",
]

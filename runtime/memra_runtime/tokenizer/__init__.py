"""Text to token ids and back, from tokenizer.json or from the metadata of a GGUF file."""

from __future__ import annotations

from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.tokenizer.gguf_source import from_gguf
from memra_runtime.tokenizer.hf_source import from_folder
from memra_runtime.tokenizer.model import Tokenizer
from memra_runtime.tokenizer.pairing import check_pairing
from memra_runtime.tokenizer.stream import StreamDecoder

__all__ = ["StreamDecoder", "Tokenizer", "check_pairing", "load_tokenizer"]


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build the tokenizer that comes with a weight file.

    A GGUF file and the folder it was made from give the same ids.
    Raises: MemraError if the tokenizer is absent, damaged or of a kind that is not supported.
    """
    return from_gguf(checkpoint) if checkpoint.kind == "gguf" else from_folder(checkpoint)

"""Open whatever the user points at: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path

from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.checkpoint.gguf_file import read_gguf
from memra_runtime.checkpoint.hf_folder import read_folder
from memra_runtime.errors import fail


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder (config.json and safetensors).

    Only headers are read; tensors are mapped and come from disk when touched.
    Raises: MemraError naming the file, what was found and what to do.
    """
    place = Path(path)
    if place.is_dir():
        return read_folder(place)
    if place.suffix == ".safetensors" and place.exists():
        fail(
            "weights-folder",
            f"`{place.name}` alone does not say what model it is",
            str(place),
            hints=(f"give the folder, which also has config.json: `{place.parent}`",),
        )
    return read_gguf(place)

"""An open weight file: its metadata, its tensors, and their bytes without copying."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal

import numpy as np

from memra_runtime.checkpoint.formats import BLOCKS, TensorInfo
from memra_runtime.checkpoint.mapped import MappedFile
from memra_runtime.errors import fail

#: Spellings of one architecture: GGUF's name, from Hugging Face's and from older files.
_ARCH_NAMES = {
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
    "gemma4_assistant": "gemma4-assistant",
    "gemma4_unified_assistant": "gemma4-assistant",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
}
_WRITER_KEYS = (
    "general.name", "general.basename", "general.finetune", "general.size_label",
    "general.organization", "general.author", "general.quantized_by", "general.repo_url",
    "quantize.imatrix.file", "_name_or_path", "architectures", "transformers_version",
)  # fmt: skip
_SAMPLES = 32
_SAMPLE_BYTES = 4096


def arch_name(raw: str) -> str:
    """Return the one spelling that specs use for an architecture (`gemma4_text` -> `gemma4`)."""
    return _ARCH_NAMES.get(raw, raw)


class Checkpoint:
    """A GGUF file or a Hugging Face folder, memory-mapped; close it or use it in `with`.

    `metadata` holds the keys as the file spells them, with Python values. Arrays are lists; those
    under `tokenizer.` may have hundreds of thousands of entries and are numpy arrays or `Strings`
    (both are sequences). For a folder it is config.json with `text_config` laid over it.
    `arch` is normalised by `arch_name`; the raw string stays in `metadata`.
    """

    def __init__(
        self,
        path: Path,
        kind: Literal["gguf", "safetensors"],
        arch: str,
        metadata: Mapping[str, object],
        tensors: Mapping[str, TensorInfo],
        files: Sequence[MappedFile],
        places: Mapping[str, tuple[int, int]],
        header: bytes,
    ) -> None:
        """`places` maps a tensor to (index into `files`, offset); `digest` covers `header`."""
        self.path = path
        self.kind: Literal["gguf", "safetensors"] = kind
        self.arch = arch_name(arch)
        self.metadata: Mapping[str, object] = MappingProxyType(dict(metadata))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self._files = list(files)
        self._places = dict(places)
        self._closed = False
        self.digest = self._digest(header)

    def _digest(self, header: bytes) -> str:
        """Hash sizes, headers and a few KiB of some tensors.

        The header alone would be the same for two fine-tunes of one model. Hashing all of the
        weights would cost a full read of the file.
        """
        state = hashlib.blake2b(header, digest_size=16)
        for file in self._files:
            state.update(file.size.to_bytes(8, "little"))
        names = sorted(self._places)
        for name in names[:: max(1, len(names) // _SAMPLES)]:
            index, offset = self._places[name]
            count = min(_SAMPLE_BYTES, self.tensors[name].nbytes)
            state.update(self._files[index].bytes[offset : offset + count].tobytes())
        return state.hexdigest()

    def data(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor: a read-only uint8 view `[nbytes]` of the map, no copy.

        Raises: MemraError if there is no such tensor, or its format is not known here.
        """
        if self._closed:
            raise ValueError(f"checkpoint {self.path} is closed")
        info = self.tensors.get(name)
        if info is None:
            close = difflib.get_close_matches(name, self.tensors, n=3)
            fail(
                "tensor-missing",
                f"`{self.path.name}` has no tensor `{name}`",
                str(self.path),
                notes=(f"written by: {self.written_by}",),
                hints=(f"did you mean {' or '.join(f'`{n}`' for n in close)}?",) if close else (),
            )
        if info.format not in BLOCKS:
            fail(
                "tensor-format",
                f"tensor `{name}` is stored as `{info.format}`, which Memra cannot read",
                str(self.path),
                hints=("quantise the model again to q8_0, q6_k, q5_k, q4_k, q4_0 or bf16",),
            )
        index, offset = self._places[name]
        return self._files[index].bytes[offset : offset + info.nbytes]

    @property
    def written_by(self) -> str:
        """What the file says of its origin, or `unknown` (a file need not say)."""
        found = [
            f"{key.removeprefix('general.').lstrip('_')} {value!r}"
            for key in _WRITER_KEYS
            if (value := self.metadata.get(key))
        ]
        return ", ".join(found) or "unknown (the file does not say)"

    def close(self) -> None:
        """Unmap the files. Arrays from `data` stay valid: each keeps the map it looks into."""
        self._closed = True
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.arch}, {len(self.tensors)} tensors)"

"""Write small weight files, right or wrong on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

TINY = Path(__file__).parents[2] / "model_specs" / "tiny"
TARGET = TINY / "gemma4-tiny-q8_0.gguf"
DRAFT = TINY / "gemma4-tiny-assistant-q8_0.gguf"

_TYPES = {"u8": (0, "B"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"),
          "u64": (10, "Q"), "f64": (12, "d")}  # fmt: skip
F32, F16, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 8, 12, 13, 14, 30


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(item: object) -> bytes:
    """A metadata value: text, (type, number), or (type or `str`, list)."""
    if isinstance(item, (str, bytes)):
        return struct.pack("<I", 8) + text(item)
    assert isinstance(item, tuple)
    kind, number = item
    if kind == "str":
        body = b"".join(text(entry) for entry in number)
        return struct.pack("<IIQ", 9, 8, len(number)) + body
    code, form = _TYPES[kind]
    if isinstance(number, list):
        body = struct.pack(f"<{len(number)}{form}", *number)
        return struct.pack("<IIQ", 9, code, len(number)) + body
    return struct.pack("<I" + form, code, number)


def gguf(
    metadata: Mapping[str, object],
    tensors: Sequence[tuple[str, Sequence[int], int, bytes]] = (),
    *,
    version: int = 3,
    offsets: Sequence[int] | None = None,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; a tensor is (name, shape as Hugging Face has it, ggml type, bytes)."""
    metadata = {"general.architecture": "toy", **metadata}
    n_tensors, n_keys = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)
    for key, item in metadata.items():
        head += text(key) + value(item)
    data, starts = b"", []
    for _, _, _, raw in tensors:
        starts.append(len(data))
        data += raw + bytes(-len(raw) % alignment)
    for index, (name, shape, kind, _) in enumerate(tensors):
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, (offsets or starts)[index])
    return head + bytes(-len(head) % alignment) + data


def safetensors(
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    change: Mapping[str, Mapping[str, object]] | None = None,
) -> bytes:
    """A safetensors file; `change` overwrites fields of header entries."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        span = [len(data), len(data) + len(raw)]
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
        header[name] = {**entry, **(change or {}).get(name, {})}
        data += raw
    raw_header = json.dumps(header).encode()
    return struct.pack("<Q", len(raw_header)) + raw_header + data


def folder(path: Path, files: Mapping[str, bytes | dict[str, object]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / name).write_bytes(raw)
    return path

"""Read the header of a safetensors file: 8 bytes of length, then JSON, then the tensors.

Source: safetensors, `safetensors/src/tensor.rs` (the same checks, one error for each).
"""

from __future__ import annotations

import json
from typing import NoReturn

from memra_runtime.checkpoint.formats import BLOCKS, SAFETENSORS_TYPES, TensorInfo, elements
from memra_runtime.checkpoint.mapped import MappedFile, looks_like
from memra_runtime.errors import fail

_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS = 16


def parse_json(text: bytes | str, what: str, place: str) -> dict[str, object]:
    """Parse a JSON object; a repeated key is an error, because the last would win silently.

    Raises: MemraError for text that is no JSON object.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key {twice!r} appears twice")
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        fail("weights-damaged", f"{what} is not valid JSON: {reason}", place)
    if not isinstance(value, dict):
        fail("weights-damaged", f"{what} is not a JSON object", place)
    return value


def read_safetensors(file: MappedFile) -> tuple[dict[str, tuple[TensorInfo, int]], bytes]:
    """Return each tensor with its byte offset in the file, and the header as stored.

    Raises: MemraError naming the tensor and what is wrong with it.
    """
    name, place = file.path.name, str(file.path)

    def damaged(what: str, code: str = "weights-damaged") -> NoReturn:
        hints = ("fetch or convert the file again, and compare its checksum",)
        fail(code, f"`{name}` is damaged: {what}", place, hints=hints)

    head = file.buffer[:64]
    length = int.from_bytes(head[:8], "little")
    if len(head) < 9 or length > _MAX_HEADER or head[8:9] != b"{":
        fail(
            "weights-format",
            f"`{name}` is not a safetensors file: it is {looks_like(head)}",
            place,
            hints=("fetch the file again (with git-lfs: `git lfs pull`)",),
        )
    start = 8 + length
    if start > file.size:
        damaged(
            f"its header has {length:,} bytes, the file only {file.size:,}", "weights-truncated"
        )
    raw = file.buffer[8:start]
    header = parse_json(raw, f"the header of `{name}`", place)
    header.pop("__metadata__", None)
    found: list[tuple[int, int, TensorInfo]] = []
    for key, entry in header.items():
        try:
            begin, end, info = _entry(key, entry)
        except (TypeError, KeyError, ValueError) as error:
            damaged(f"the entry of tensor `{key}` is wrong: {error}")
        found.append((begin, end, info))
    at, previous = 0, ""
    for begin, end, info in sorted(found, key=lambda item: item[:2]):
        if begin < at:
            damaged(f"tensors `{previous}` and `{info.name}` overlap")
        if begin > at:
            damaged(f"{begin - at:,} bytes before tensor `{info.name}` belong to no tensor")
        at, previous = end, info.name
    if start + at > file.size:
        damaged(f"it has {file.size:,} bytes, its tensors need {start + at:,}", "weights-truncated")
    if start + at < file.size:
        damaged(f"{file.size - start - at:,} bytes at its end belong to no tensor")
    return {info.name: (info, start + begin) for begin, _, info in found}, raw


def _entry(key: str, entry: object) -> tuple[int, int, TensorInfo]:
    """Check one header entry. Raises: TypeError, KeyError or ValueError saying what is wrong."""
    if not isinstance(entry, dict):
        raise TypeError("it is not an object")
    for field in ("dtype", "shape", "data_offsets"):
        if field not in entry:
            raise ValueError(f"`{field}` is missing")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise TypeError("`dtype` is not a text")
    if not _sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise TypeError("`shape` is not a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise TypeError("`data_offsets` is not [begin, end]")
    form = SAFETENSORS_TYPES.get(dtype, dtype.lower())
    nbytes = offsets[1] - offsets[0]
    if dtype in SAFETENSORS_TYPES:
        needed = elements(tuple(shape)) * BLOCKS[form].nbytes
        if needed != nbytes:
            raise ValueError(f"{dtype} {shape} takes {needed:,} bytes, {nbytes:,} are given")
    return offsets[0], offsets[1], TensorInfo(key, tuple(shape), form, nbytes)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

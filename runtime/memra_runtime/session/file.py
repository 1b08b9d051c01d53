"""A session on disk: a safetensors file whose header says what it is and what it can restore.

Tensors: `tokens`, `state` and `hidden`, then the rows of every cache plane in the format of the
plane. Metadata: the artifact, spec and weights it fits, and a digest of all the rest. Any reader of
safetensors can look into it. Source of the format: safetensors, `safetensors/src/tensor.rs`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import STATE_SIZE, Manifest, PlaneEntry
from memra_runtime.device import DTYPES
from memra_runtime.device.memory import HostBytes
from memra_runtime.errors import fail
from memra_runtime.files import replaced
from memra_runtime.session.snapshot import Snapshot, cache_planes, rows_held
from memra_runtime.session.text import Text, least_kept

#: Raised whenever the meaning of a session file changes.
SESSION_VERSION = 1
#: Our types of plane elements as safetensors writes them; rows of blocks are bytes.
_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "i32": "I32", "q8_0_rows": "U8"}
_MAX_HEADER = 100 << 20
#: How the header of a session begins.
_BEGIN = b'{"__metadata__": {"memra.session"'


def save_session(path: Path, snapshot: Snapshot, manifest: Manifest) -> int:
    """Write a session, whole or not at all; returns the bytes of the file.

    Raises: MemraError where it cannot be written.
    """
    count, text = len(snapshot.text.tokens), snapshot.text
    arrays: dict[str, tuple[str, tuple[int, ...], npt.NDArray[Any]]] = {
        "tokens": ("I32", (count,), np.array(text.tokens, np.int32)),
        "state": ("I32", snapshot.state.shape, snapshot.state),
        "hidden": ("F32", snapshot.hidden.shape, snapshot.hidden),
    }
    rows, at = snapshot.rows.bytes(), 0
    for plane in cache_planes(manifest):
        shape, size = _rows_shape(plane, count)
        arrays[plane.id] = (_TYPES[plane.dtype], shape, rows[at : at + size])
        at += size
    least = max(1, least_kept(manifest, text.written))
    meta = {
        "memra.session": str(SESSION_VERSION),
        "artifact": f"{manifest.name}, {manifest.target}",
        "artifact_digest": snapshot.artifact,
        "spec_digest": manifest.spec_digest,
        "weights_fingerprint": snapshot.weights,
        "kv": str(manifest.spec["runtime"]["kv"]),
        "restores": f"the whole text of {count} tokens, or its first {least} to {count}",
        "shown": str(text.shown),
        "seams": ",".join(map(str, text.seams)),
        "written": str(text.written),
        "pending": str(snapshot.pending),
    }
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in arrays.items():
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [offset, offset + data.nbytes]}  # fmt: skip
        offset += data.nbytes
    flat = [np.ascontiguousarray(data).reshape(-1) for _, _, data in arrays.values()]
    blobs = [data.view(np.uint8) for data in flat]
    stated = meta | {"digest": _digest(meta, header, blobs)}
    raw = json.dumps({"__metadata__": stated, **header}).encode()
    raw += b" " * (-len(raw) % 8)
    try:
        with replaced(path) as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for blob in blobs:
                file.write(blob.data)
    except OSError as error:
        fail("save-session", f"the session cannot be written: {error.strerror or error}", str(path),
             hints=("give another place; a file that was there before is as it was",))  # fmt: skip
    return 8 + len(raw) + offset


def read_session(path: Path, manifest: Manifest) -> Snapshot:
    """Read a session for an artifact; nothing need be loaded yet.

    Raises: MemraError for a file that is no session, is cut short or damaged, was written by
    another version, or belongs to another artifact.
    """
    header, start, size = _read_header(path)
    meta = header.pop("__metadata__")
    if meta.get("artifact_digest") != manifest.build_key:
        fail(
            "foreign-session",
            f"the session was made with another artifact ({meta.get('artifact')}, digest "
            f"{str(meta.get('artifact_digest'))[:12]}) than `{manifest.name}` for "
            f"{manifest.target} ({manifest.build_key[:12]})",
            str(path),
            hints=("run the artifact it was made with; compiling anew makes another one",
                   "or begin anew with its text"),
        )  # fmt: skip
    try:
        wanted = _layout(manifest, int(header["tokens"]["shape"][0]))
        found = {name: (e["dtype"], tuple(e["shape"]), tuple(e["data_offsets"]))
                 for name, e in header.items()}  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        _damaged(path, "its header does not list its tensors")
    if found != wanted:
        other = sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))
        _damaged(path, f"tensor `{other[0]}` is not as the artifact has it")
    end = max(last for _, _, (_, last) in wanted.values())
    if start + end != size:
        _damaged(path, f"it has {size:,} bytes, its header says {start + end:,}")
    with path.open("rb") as file:
        file.seek(start)
        data = np.frombuffer(file.read(), np.uint8)
    digest = meta.pop("digest", "")
    blobs = [data[first:last] for _, _, (first, last) in wanted.values()]
    if len(data) != end or digest != _digest(meta, header, blobs):
        _damaged(path, "its bytes do not have the digest it states")
    tokens, state = blobs[0].view(np.int32), blobs[1].view(np.int32).copy()
    hidden = blobs[2].view(np.float32).copy()
    text = Text(
        tokens.tolist(),
        int(meta["shown"]),
        tuple(int(seam) for seam in meta["seams"].split(",")),
        int(meta["written"]),
    )
    rows = HostBytes(data[wanted["hidden"][2][1] :])
    return Snapshot(
        meta["artifact_digest"], meta["weights_fingerprint"], text, state, hidden,
        int(meta["pending"]), rows,
    )  # fmt: skip


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header with its metadata, where the data begins, and the size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= _MAX_HEADER else b""
    except OSError as error:
        fail("session-file", f"the session cannot be read: {error.strerror or error}", str(path),
             hints=("give a file that `--save-session` wrote",))  # fmt: skip
    try:
        header = json.loads(raw)
        version = header["__metadata__"]["memra.session"]
    except (ValueError, KeyError, TypeError, RecursionError):
        if raw.startswith(_BEGIN):
            _damaged(path, "its header cannot be read")
        fail("session-file", f"`{path.name}` is not a session file", str(path),
             hints=("give a file that `--save-session` wrote",))  # fmt: skip
    if version != str(SESSION_VERSION):
        fail(
            "session-file",
            f"the session has format {version}, this memra reads format {SESSION_VERSION}",
            str(path),
            hints=("begin anew with its text",),
        )
    return header, 8 + length, size


def _damaged(path: Path, what: str) -> NoReturn:
    fail("session-damaged", f"`{path.name}` is damaged: {what}", str(path),
         hints=("save the session again, or begin anew with its text",))  # fmt: skip


def _rows_shape(plane: PlaneEntry, tokens: int) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of the rows of a plane that a text uses."""
    heads, _, width = plane.shape
    shape = (heads, rows_held(plane, tokens), width)
    return shape, int(np.prod(shape)) * np.dtype(DTYPES[plane.dtype]).itemsize


def _layout(
    manifest: Manifest, tokens: int
) -> dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]:
    """What the file of a text of so many tokens holds: type, shape and bytes of each tensor."""
    width = manifest.plane("hidden").shape
    parts: list[tuple[str, str, tuple[int, ...], int]] = [
        ("tokens", "I32", (tokens,), 4 * tokens),
        ("state", "I32", (STATE_SIZE,), 4 * STATE_SIZE),
        ("hidden", "F32", width, 4 * int(np.prod(width))),
    ]
    for plane in cache_planes(manifest):
        parts.append((plane.id, _TYPES[plane.dtype], *_rows_shape(plane, tokens)))
    found, at = {}, 0
    for name, dtype, shape, size in parts:
        found[name] = (dtype, shape, (at, at + size))
        at += size
    return found


def _digest(
    meta: Mapping[str, str], header: Mapping[str, Any], blobs: list[npt.NDArray[np.uint8]]
) -> str:
    """A digest of metadata, header and data."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps([meta, header], sort_keys=True).encode())
    for blob in blobs:
        digest.update(blob.data)
    return digest.hexdigest()

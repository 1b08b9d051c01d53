"""The kernel cache: object files by the content of everything that decides them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

import memra_compiler
from memra_runtime import artifact

#: Where kernels are kept unless `--cache` says otherwise.
DEFAULT_CACHE = Path.home() / ".cache" / "memra"

#: Packages whose source decides generated code.
_SOURCES = ("ops", "codegen", "ir")


@cache
def compiler_digest() -> str:
    """Digest of the code generator itself: a changed lowering is a changed kernel.

    The artifact module belongs to it: kernels have the slots of the device block compiled in.
    """
    root = Path(memra_compiler.__file__).parent
    paths = [p for package in _SOURCES for p in sorted((root / package).glob("*.py"))]
    digest = hashlib.sha256()
    for path in (*paths, Path(artifact.__file__)):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def content_key(*parts: str) -> str:
    """Digest of texts, the compiler's own source and TVM's version."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for part in (compiler_digest(), version("apache-tvm"), *parts):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


class KernelCache:
    """A folder of blobs; entries are written aside and moved into place, so none is ever half."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "kernels"

    def path(self, key: str, suffix: str) -> Path:
        return self.folder / key[:2] / f"{key}{suffix}"

    def get(self, key: str, suffix: str) -> bytes | None:
        try:
            return self.path(key, suffix).read_bytes()
        except OSError:
            return None

    def put(self, key: str, suffix: str, data: bytes) -> Path:
        path = self.path(key, suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
        return path

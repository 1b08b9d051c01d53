"""Compile C++ that stands in for a kernel, and load it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

#: No multiply is fused with an add that the text does not fuse, and floats may be read as bits.
OPTIONS = "-std=c++20 -O1 -ffp-contract=off -fno-strict-aliasing -w -shared -fPIC -pthread"


@cache
def compiler() -> str | None:
    """A compiler of C++20 that has `_Float16`, if there is one."""
    return next((found for name in ("g++", "clang++") if (found := shutil.which(name))), None)


def build(text: str, path: Path, headers: Path) -> ctypes.CDLL:
    """The library of a text, which is written to `path`; it may include from `headers`."""
    path.write_text(text, encoding="utf-8")
    command = [str(compiler()), *OPTIONS.split(), f"-I{headers}", str(path), "-o", f"{path}.so"]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:4000]
    return ctypes.CDLL(f"{path}.so")

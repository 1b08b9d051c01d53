"""Run the command lines, in this process or as a user does, and write damaged weight files."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np

import memra_compiler.cli.compile
import memra_compiler.cli.inspect
import memra_runtime.cli.bench
import memra_runtime.cli.check
import memra_runtime.cli.run

ROOT = Path(__file__).parents[2]
TINY = ROOT / "model_specs" / "tiny"
SPEC = TINY / "gemma4_tiny.yaml"
TARGET = TINY / "gemma4-tiny-q8_0.gguf"
DRAFT = TINY / "gemma4-tiny-assistant-q8_0.gguf"
WEIGHTS = ("--weights", str(TARGET), "--draft", str(DRAFT))

MAINS: dict[str, Callable[..., NoReturn]] = {
    "memra-bench": memra_runtime.cli.bench.main,
    "memra-check": memra_runtime.cli.check.main,
    "memra-compile": memra_compiler.cli.compile.main,
    "memra-inspect": memra_compiler.cli.inspect.main,
    "memra-run": memra_runtime.cli.run.main,
}

MODULES = {
    "memra-compile": "memra_compiler.cli.compile",
    "memra-inspect": "memra_compiler.cli.inspect",
    "memra-run": "memra_runtime.cli.run",
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def call(command: str, *arguments: str | Path) -> Ended:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            MAINS[command]([str(a) for a in arguments])
        except SystemExit as done:
            code = int(done.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def launch(
    command: str, *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Ended:
    """Run a command in a process of its own, as its entry point does."""
    done = subprocess.run(
        [sys.executable, "-m", MODULES[command], *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def rewrite(
    source: Path,
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    add: Mapping[str, Any] | None = None,
    change: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Path:
    """Copy a GGUF file with other metadata values, or with tensors dropped, added or changed.

    New metadata values are texts. `change` maps a tensor's name to a function of its stored array
    (bytes for quantised ones). Of what is added, quantised bytes come with their ggml type.
    """
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    values = dict(metadata or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", arch))
    for name, item in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = item.types[-1] if item.types[0] == gguf.GGUFValueType.ARRAY else None
        value = values.get(name, item.contents())
        writer.add_key_value(name, value, item.types[0], sub_type=inner)
    for name in values.keys() - reader.fields.keys():
        writer.add_string(name, values[name])
    for tensor in reader.tensors:
        if tensor.name in drop:
            continue
        data = np.array(tensor.data)
        data = change[tensor.name](data) if change and tensor.name in change else data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    for name, data in (add or {}).items():
        stored, kind = data if isinstance(data, tuple) else (data, None)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

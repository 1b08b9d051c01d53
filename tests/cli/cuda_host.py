"""The bundled pair compiled for a GPU that nobody needs to have."""

from __future__ import annotations

from pathlib import Path

from memra_compiler.compile import CompileOptions, compile_spec, load, lower
from memra_compiler.ir.graph import Module
from tiny_pair import TINY_SPEC

TARGET = "cuda:sm_90a"
OVERRIDES = {"runtime.activations": "int8", "runtime.kv": "f16"}


def compile_for_cuda(folder: Path, cache: Path) -> Path:
    """The artifact."""
    options = CompileOptions(target=TARGET, overrides=OVERRIDES, cache=cache)
    return compile_spec(TINY_SPEC, folder, options).folder


def cuda_ir() -> Module:
    """Its module, of which the fake driver runs some ops."""
    spec, files = load(TINY_SPEC, CompileOptions(target=TARGET, overrides=OVERRIDES))
    return lower(spec, files, target=TARGET)

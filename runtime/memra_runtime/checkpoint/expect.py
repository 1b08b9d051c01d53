"""Compare what a spec says of a model with what its weight file says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memra_runtime.checkpoint.core import Checkpoint, arch_name
from memra_runtime.errors import Diagnostic, MemraError, Position

ARCH_KEYS = ("general.architecture", "model_type")
_RELATIVE = 1e-6  # GGUF stores 1e-6 as f32: 9.99999997e-07


@dataclass(frozen=True)
class Expectation:
    """A value of the spec and the keys under which weight files say the same.

    The first key that the file has is compared; a dotted key also reaches into nested objects of
    a config (`rope_parameters.full_attention.rope_theta`). `value` may be one number for a list
    in the file (all entries must equal it), and a list for one number. A key of null is absent.
    """

    keys: tuple[str, ...]
    value: object
    spec_path: str
    required: bool = False
    position: Position | None = None


def check_metadata(
    checkpoint: Checkpoint, expected: Sequence[Expectation], *, other: Checkpoint | None = None
) -> None:
    """Check all expectations; `other` is the pipeline's other model, to notice a swap.

    Raises: one MemraError with every contradiction and every required key that is absent.
    """
    problems: list[Diagnostic] = []
    for want in expected:
        place = want.position or str(checkpoint.path)
        key = next((k for k in want.keys if lookup(checkpoint.metadata, k) is not None), None)
        if key is None:
            if want.required:
                problems.append(
                    Diagnostic(
                        "metadata-missing",
                        f"`{checkpoint.path.name}` does not say {_keys(want.keys)}, which "
                        f"`{want.spec_path}` must be checked against",
                        place,
                        notes=(f"written by: {checkpoint.written_by}",),
                        hints=("convert the model again with a current converter",),
                    )
                )
            continue
        if key in ARCH_KEYS:
            problems += _arch_problem(checkpoint, want, place, other)
            continue
        difference = compare(want.value, lookup(checkpoint.metadata, key))
        if difference is not None:
            problems.append(
                Diagnostic(
                    "metadata-mismatch",
                    f"`{want.spec_path}` contradicts the weights: {difference}",
                    place,
                    notes=(f"`{key}` in {checkpoint.path}",),
                )
            )
    if problems:
        raise MemraError(tuple(problems))


def check_arch(
    checkpoint: Checkpoint, arch: str, spec_path: str, *, other: Checkpoint | None = None
) -> None:
    """Check the architecture alone, before anything that depends on it.

    Raises: MemraError; it suggests to swap the files when `other` has the wanted architecture.
    """
    check_metadata(checkpoint, [Expectation(ARCH_KEYS, arch, spec_path)], other=other)


def _arch_problem(
    checkpoint: Checkpoint, want: Expectation, place: Position | str, other: Checkpoint | None
) -> list[Diagnostic]:
    arch = arch_name(str(want.value))
    if checkpoint.arch == arch:
        return []
    hints: tuple[str, ...] = ("give the weights of the model that the spec describes",)
    if other is not None and other.arch == arch:
        hints = (
            f"the two files seem swapped: `{other.path.name}` is a `{arch}` model; "
            "exchange the target's and the drafter's weights",
        )
    name = checkpoint.path.name
    message = f"`{want.spec_path}` wants a `{arch}` model, but `{name}` is `{checkpoint.arch}`"
    note = f"in {checkpoint.path}; written by: {checkpoint.written_by}"
    return [Diagnostic("metadata-arch", message, place, notes=(note,), hints=hints)]


def lookup(metadata: Mapping[str, object], key: str) -> object:
    """Return the value of a key, of a dotted path into nested objects, or None."""
    if key in metadata:
        return metadata[key]
    head, dot, rest = key.partition(".")
    inner = metadata.get(head)
    return lookup(inner, rest) if dot and isinstance(inner, Mapping) else None


def compare(expected: object, actual: object) -> str | None:
    """Return how two values differ, in words (`wanted 4, the file has 8`), or None."""
    left, right = _as_list(expected), _as_list(actual)
    if left is None and right is None:
        if _equal(expected, actual):
            return None
        return f"wanted {expected!r}, the file has {actual!r}"
    if left is not None and right is not None and len(left) != len(right):
        return f"wanted {len(left)} entries, the file has {len(right)}"
    count = len(left) if left is not None else len(right or ())
    pairs = zip(left or [expected] * count, right or [actual] * count, strict=True)
    for index, (a, b) in enumerate(pairs):
        if not _equal(a, b):
            return f"entry {index}: wanted {a!r}, the file has {b!r}"
    return None


def _as_list(value: object) -> list[object] | None:
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    return None


def _equal(a: object, b: object) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if isinstance(a, bool) or isinstance(b, bool):
            return a == b and isinstance(a, int) and isinstance(b, int)
        return a == b or math.isclose(float(a), float(b), rel_tol=_RELATIVE)
    return type(a) is type(b) and a == b


def _keys(keys: tuple[str, ...]) -> str:
    return " or ".join(f"`{key}`" for key in keys)

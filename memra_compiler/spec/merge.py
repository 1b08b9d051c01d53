"""Put a spec together: its file, the files it extends, and command-line overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from memra_compiler.layers.params import Path
from memra_compiler.spec.marks import Document, Mark, lookup
from memra_compiler.spec.yaml_source import read_value, read_yaml
from memra_runtime.errors import Diagnostic, MemraError

VERSION = 1


def read_document(path: str | FilePath, overrides: Mapping[str, str] | None = None) -> Document:
    """Read a spec with everything it extends, and apply `--set` overrides.

    Raises: MemraError if a file cannot be read or an `extends` leads nowhere.
    """
    document = _read(str(path), ())
    for name, text in (overrides or {}).items():
        _override(document, name, text)
    return document


def _read(shown: str, chain: tuple[str, ...]) -> Document:
    document = read_yaml(FilePath(shown), shown)
    _check_version(document)
    base = document.data.pop("extends", None)
    if base is None:
        return document
    mark = document.mark(("extends",))
    if not isinstance(base, str) or not base:
        message = "`extends` must be the path of another spec file"
        raise MemraError((mark.diagnostic("extends", message, label="not a path"),))
    target = os.path.normpath(os.path.join(os.path.dirname(shown), base))
    here = (*chain, os.path.realpath(shown))
    if os.path.realpath(target) in here:
        message = f"`extends` goes in a circle: {target} is already being read"
        raise MemraError((mark.diagnostic("extends", message, label="comes back here"),))
    if not os.path.isfile(target):
        message = f"`extends` names {target}, which is not a file"
        hint = "the path is relative to the spec that names it"
        found = mark.diagnostic("extends", message, label="no such file", hints=(hint,))
        raise MemraError((found,))
    return merge(_read(target, here), document)


def _check_version(document: Document) -> None:
    if "memra" not in document.data:
        message = "the spec does not say its language version"
        hint = f"start the file with `memra: {VERSION}`"
        document.problems.append(document.mark(()).diagnostic("version", message, hints=(hint,)))
        document.data["memra"] = VERSION
    version = document.data["memra"]
    if version != VERSION or isinstance(version, bool):
        message = f"this Memra reads language version {VERSION}, the spec says {version!r}"
        found = document.mark(("memra",)).diagnostic("version", message, label=f"must be {VERSION}")
        document.problems.append(found)
        document.data["memra"] = VERSION


def merge(base: Document, child: Document) -> Document:
    """Lay `child` over `base`: mappings merge, anything else replaces, `null` deletes a key.

    Every value keeps the mark of the file it is written in.
    """
    base.problems += child.problems
    _merge_mapping(base, child, base.data, child.data, ())
    base.values[()] = child.values[()]
    return base


def _merge_mapping(
    base: Document, child: Document, old: dict[str, Any], new: dict[str, Any], path: Path
) -> None:
    for key, value in new.items():
        here = (*path, key)
        if value is None and key in old:
            del old[key]
            _forget(base, here)
            base.deleted[here] = child.mark(here, key=True)
        elif isinstance(value, dict) and isinstance(old.get(key), dict):
            _copy_mark(base, child, here)
            _merge_mapping(base, child, old[key], value, here)
        else:
            old[key] = value
            _forget(base, here)
            for marks, source in ((base.keys, child.keys), (base.values, child.values)):
                marks.update({p: m for p, m in source.items() if p[: len(here)] == here})


def _copy_mark(base: Document, child: Document, path: Path) -> None:
    for marks, source in ((base.keys, child.keys), (base.values, child.values)):
        if path in source:
            marks[path] = source[path]


def _forget(document: Document, path: Path) -> None:
    for marks in (document.keys, document.values):
        for old in [p for p in marks if p[: len(path)] == path]:
            del marks[old]


def _override(document: Document, name: str, text: str) -> None:
    place = f"--set {name}"
    parts = name.split(".")
    if not all(parts):
        document.problems.append(
            Diagnostic(
                "set",
                "a field path is names joined by dots",
                place,
                hints=("for example `--set round.depth.max=3`",),
            )
        )
        return
    if parts[0] in ("memra", "extends"):
        document.problems.append(
            Diagnostic("set", f"`{parts[0]}` can only be written in a spec file", place)
        )
        return
    try:
        value = read_value(text, place)
    except MemraError as error:
        reasons = "; ".join(found.message for found in error.diagnostics)
        message = f"the value `{text}` cannot be read: {reasons}"
        document.problems.append(Diagnostic("set", message, place))
        return
    _place(document, parts, value, Mark(place))


def _place(document: Document, parts: list[str], value: Any, mark: Mark) -> None:
    """Set one value, making the mappings on the way; a list index must exist already."""
    node: Any = document.data
    path: Path = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        key: str | int = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                message = f"`{part}` is not an index into the {len(node)} entries of the list"
                document.problems.append(Diagnostic("set", message, mark.place))
                return
            key = int(part)
        path = (*path, key)
        if last:
            if value is None and isinstance(node, dict) and part in node:
                del node[part]
                document.deleted[path] = mark
            else:
                node[key] = value
            _forget(document, path)
            document.keys[path] = document.values[path] = mark
            return
        present = lookup(node, (key,), None)
        if not isinstance(present, dict | list):
            present = node[key] = {}
            _forget(document, path)
            document.keys[path] = document.values[path] = mark
        node = present

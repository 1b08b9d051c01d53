"""Plain data of a spec together with the places where its keys and values are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memra_compiler.layers.params import Path
from memra_runtime.errors import Diagnostic, Position

MISSING: Any = object()
"""What `lookup` returns for a path that is not there (`null` is a value)."""


@dataclass(frozen=True)
class Mark:
    """A place with what is needed to show it: the line's text and the width to underline."""

    place: Position | str
    source: str | None = None
    width: int = 1

    def diagnostic(self, code: str, message: str, **rest: Any) -> Diagnostic:
        return Diagnostic(code, message, self.place, self.source, width=self.width, **rest)


@dataclass
class Document:
    """A spec as plain data, with the marks of its keys and values by path."""

    data: dict[str, Any]
    keys: dict[Path, Mark] = field(default_factory=dict)
    values: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Diagnostic] = field(default_factory=list)
    deleted: dict[Path, Mark] = field(default_factory=dict)

    def mark(self, path: Path, *, key: bool = False) -> Mark:
        """Return the mark of a value (or its key), else the key of what encloses it."""
        while path:
            first, second = (self.keys, self.values) if key else (self.values, self.keys)
            if isinstance(path[-1], int):
                # a layer of `{repeat, times}` is written once in its period
                period = [*path[:-1], "repeat"]
                length = sum(p[:-1] == tuple(period) for p in self.values if len(p) > len(period))
                if length:
                    return self.values[(*period, path[-1] % length)]
            if path in first or path in second:
                return first.get(path) or second[path]
            path, key = path[:-1], True
        return self.values[()]


def line_mark(file: str, lines: list[str], line: int, column: int, width: int = 1) -> Mark:
    """Return the mark of a place counted from 0; tabs become spaces so that carets line up."""
    text = lines[line].rstrip("\r").replace("\t", " ") if line < len(lines) else ""
    return Mark(Position(file, line + 1, column + 1), text, width)


def lookup(data: Any, path: Path, default: Any = MISSING) -> Any:
    """Return the value at a path of plain data, `default` if there is none."""
    for key in path:
        mapped = isinstance(data, dict) and key in data
        listed = isinstance(data, list) and isinstance(key, int) and 0 <= key < len(data)
        if not (mapped or listed):
            return default
        data = data[key]
    return data


def written_layers(section: Mapping[str, Any]) -> list[str] | None:
    """Return the order of layers as a list of names, None if it is `auto` or malformed."""
    layers: Any = section.get("layers")
    times: Any = 1
    if isinstance(layers, dict):
        layers, times = layers.get("repeat"), layers.get("times", 1)
    if not isinstance(layers, list) or not isinstance(times, int) or not 0 < times <= 1024:
        return None
    return [str(name) for name in layers] * times

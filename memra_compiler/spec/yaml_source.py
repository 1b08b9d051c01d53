"""Read YAML into plain data, keeping the place of every key and value.

PyYAML resolves scalars by YAML 1.1, which is unsafe for specs: `1e-5` is a string, `off` a bool,
`010` is 8, `1:30` is 90, and a repeated key wins silently. So only its C parser and composer are
used here; scalars follow the YAML 1.2 core schema.
"""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any

import yaml
from yaml.cyaml import CParser  # type: ignore[attr-defined]  # missing in its stubs
from yaml.resolver import BaseResolver

from memra_compiler.layers.params import Path
from memra_compiler.spec.marks import Document, Mark, line_mark
from memra_runtime.errors import Diagnostic, MemraError, Position, fail

MAX_NODES = 100_000
MAX_DEPTH = 64


class _Loader(CParser, BaseResolver):
    """The C parser and composer, with a resolver that tells plain from quoted scalars."""

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        BaseResolver.__init__(self)

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return "plain" if implicit[0] else "quoted"
        return "map" if kind is yaml.MappingNode else "seq"


_NULL = re.compile(r"(null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?[0-9]+\Z")
_BASED = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")


def plain_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar by the YAML 1.2 core schema."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if len(text) < 100:  # a longer number is a mistake: let it be reported as text
        if _INT.match(text):
            return int(text)
        if _BASED.match(text):
            return int(text, 0)
        if _FLOAT.match(text):
            return float(text)
    if _SPECIAL.match(text):
        return float(text.replace(".", "", 1))
    return text


class _Builder:
    """Turn composed nodes into data; collect every problem instead of stopping at the first."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.lines = text.split("\n")
        self.document = Document({})
        self.count = 0
        self.open: list[yaml.Node] = []

    def mark(self, node: yaml.Node) -> Mark:
        start, end = node.start_mark, node.end_mark
        one_line = isinstance(node, yaml.ScalarNode) and start.line == end.line
        width = max(1, end.column - start.column) if one_line else 1
        return line_mark(self.file, self.lines, start.line, start.column, width)

    def problem(self, node: yaml.Node, code: str, message: str, label: str, hint: str) -> None:
        hints = (hint,) if hint else ()
        found = self.mark(node).diagnostic(code, message, label=label, hints=hints)
        self.document.problems.append(found)

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.document.values[path] = self.mark(node)
        self.count += 1
        if self.count > MAX_NODES or len(self.open) > MAX_DEPTH:
            message = "this file is nested too deeply or too large"
            raise MemraError((self.mark(node).diagnostic("yaml", message),))
        if node in self.open:
            self.problem(node, "yaml", "this value contains itself", "through its anchor", "")
            return None
        if node.tag not in ("plain", "quoted", "map", "seq"):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            message = f"the tag `{tag}` has no meaning in a spec"
            self.problem(node, "yaml", message, "", "remove the tag; quote a value to keep it text")
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
            return node.value if node.tag == "quoted" else plain_scalar(node.value)
        finally:
            self.open.pop()

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "":
                self.problem(key_node, "yaml", "a key must be a name", "not a name", "")
                continue
            key = key_node.value
            if key == "<<" and key_node.tag == "plain":
                self.problem(
                    key_node,
                    "merge-key",
                    "merge keys (`<<`) are not part of the spec language",
                    "not supported",
                    "name a base spec with `extends: other.yaml`; aliases (`*name`) work as values",
                )
                continue
            here = (*path, key)
            if key in result:
                first = self.document.keys[here].place
                found = self.mark(key_node).diagnostic(
                    "duplicate-key",
                    f"`{key}` is given twice in one mapping",
                    label="second time",
                    notes=(f"`{key}` is first set at {first}",),
                )
                self.document.problems.append(found)
                continue
            self.document.keys[here] = self.mark(key_node)
            result[key] = self.build(value_node, here)
        return result


def read_text(path: FilePath, shown: str) -> str:
    """Read a UTF-8 file, or say in one diagnostic why not."""
    if path.is_dir():
        fail("no-file", "this is a folder, not a spec file", shown, hints=("name a .yaml file",))
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        there = f"spec files in that folder: {', '.join(near[:8])}"
        fail("no-file", "there is no such spec file", shown, hints=(there,) if near else ())
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        fail(
            "encoding",
            f"this file is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}",
            Position(shown, line),
            hints=("save the file as UTF-8",),
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fail("no-file", f"the spec file cannot be read: {reason}", shown)
    return text.replace("\r\n", "\n")


def compose(text: str, file: str) -> yaml.Node | None:
    """Parse one document into nodes; a syntax error is one diagnostic with its place."""
    lines = text.split("\n")
    try:
        node: yaml.Node | None = _Loader(text).get_single_node()
        return node
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark = line_mark(file, lines, at.line, at.column) if at else Mark(file)
        raise MemraError((_syntax(mark, error, lines),)) from None
    except yaml.YAMLError as error:
        # the C parser refuses characters YAML does not allow
        found = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]", text)
        start = found.start() if found else 0
        line = text.count("\n", 0, start)
        mark = line_mark(file, lines, line, start - (text.rfind("\n", 0, start) + 1))
        reason = "a control character" if found else str(getattr(error, "reason", error))
        found_at = Diagnostic("yaml", f"this is not YAML text: it has {reason}", mark.place)
        raise MemraError((found_at,)) from None


def _syntax(mark: Mark, error: yaml.MarkedYAMLError, lines: list[str]) -> Diagnostic:
    problem = (error.problem or "syntax error").rstrip()
    if "tab character" in problem or "'\\t'" in problem or "'\t'" in problem:
        message, hint = "a tab cannot indent YAML", "indent with spaces"
        return mark.diagnostic("yaml", message, hints=(hint,))
    if "single document" in (error.context or ""):
        message, hint = "a spec file holds one document", "remove the `---` line"
    elif "undefined alias" in problem:
        message, hint = f"this file is not valid YAML: {problem}", "define it before, with `&name`"
    else:
        message, hint = f"this file is not valid YAML: {problem}", ""
    notes: tuple[str, ...] = ()
    if error.context and error.context_mark and error.context_mark.line < len(lines):
        notes = (f"{error.context} that starts at line {error.context_mark.line + 1}",)
    return mark.diagnostic("yaml", message, notes=notes, hints=(hint,) if hint else ())


def read_yaml(path: FilePath, shown: str | None = None) -> Document:
    """Read one file. `shown` is the name that messages use for it.

    Duplicate keys, merge keys and tags are left in `problems`, so that they are reported together
    with what is wrong in the fields.

    Raises: MemraError if there is no mapping to look at.
    """
    name = shown if shown is not None else str(path)
    text = read_text(path, name)
    node = compose(text, name)
    builder = _Builder(name, text)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value == ""):
        fail("yaml", "this spec file is empty", name, hints=("start with `memra: 1`",))
    if not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        mark = builder.mark(node)
        message = f"a spec is a mapping of fields, found {what}"
        raise MemraError((mark.diagnostic("yaml", message, hints=("start with `memra: 1`",)),))
    builder.document.data = builder.build(node, ())
    builder.document.values[()] = line_mark(name, builder.lines, 0, 0)
    return builder.document


def read_value(text: str, place: str) -> Any:
    """Read the value of a command-line override, by the same rules as a file."""
    node = compose(text, place)
    if node is None:
        return None
    builder = _Builder(place, text)
    value = builder.build(node, ())
    if builder.document.problems:
        raise MemraError(tuple(builder.document.problems))
    return value

"""The text form of the IR: what dumps, bug reports and pass tests are made of. It parses back."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Call, Module, Node, Plane, Program, Sequence, Weight
from memra_compiler.ir.types import Dim, Sym, TensorType
from memra_runtime.errors import Position

if TYPE_CHECKING:
    from memra_compiler.ops.base import Op


def print_module(module: Module) -> str:
    """The whole module as text; `parse_module` of it gives an equal module."""
    target = "" if module.target == "cpu" else f" target {module.target}"
    lines = [f"module {module.name}{target}", ""]
    for weight in module.weights.values():
        names = " ".join(json.dumps(n) for n in weight.names)
        made = f" made {weight.made!r}" if weight.made else ""
        stacked = f" stacked {weight.stacked}" if weight.stacked else ""
        stacked += f" of {weight.of_rows} rows" if weight.of_rows else ""
        lines.append(
            f"weight ${weight.name} : {weight.type} from {weight.source} {names}{made}{stacked}"
            f"{_at(weight.position)}"
        )
    lines.append("")
    for plane in module.planes.values():
        tags = (" ring" if plane.ring else "") + (f" kind {plane.kind}" if plane.kind else "")
        lines.append(f"plane @{plane.name} : {plane.type} rollback {plane.rollback}{tags}")
    for program in module.programs.values():
        lines += ["", *_program_lines(program)]
    if module.sequences:
        lines.append("")
    for sequence in module.sequences.values():
        calls = [_print_call(c) for c in sequence.calls]
        loop = f" while {sequence.loop}" if sequence.loop else ""
        lines.append(f"sequence {sequence.name} {{ {'; '.join(calls)} }}{loop}")
    if module.arena:
        lines.append("")
    lines += [f"arena {place or 'bytes'} = {offset}" for place, offset in module.arena.items()]
    return "\n".join(lines) + "\n"


#: Before a counter that a repeated program may lower.
_LIVE = "at most "


def _print_call(call: Call) -> str:
    """`draft * drafted`, or `draft * at most drafted` where that may fall meanwhile."""
    times = f" * {_LIVE if call.live else ''}{call.repeat}" if call.repeat else ""
    return f"{call.program}{times}"


def _parse_call(text: str) -> Call:
    program, _, times = (part.strip() for part in text.partition("*"))
    return Call(program, times.removeprefix(_LIVE), times.startswith(_LIVE))


def _program_lines(program: Program) -> Iterator[str]:
    head = f"program {program.name} rows {program.rows}"
    if program.rows_from:
        head += f" from {program.rows_from}"
    if program.results:
        head += " results " + " ".join(f"%{r}" for r in program.results)
    if program.fault:
        head += f" fault {json.dumps(program.fault)}"
    yield head + " {"
    for node in program.nodes:
        yield "  " + print_node(node, program.values)
    yield "}"


def print_node(node: Node, values: Mapping[str, TensorType]) -> str:
    """One node as a line."""
    outputs = ", ".join(f"%{name} : {values[name]}" for name in node.outputs)
    attrs = ", ".join(f"{key} = {value!r}" for key, value in node.op.attrs().items())
    text = f"{outputs} = " if outputs else ""
    text += f"{node.op.name}({', '.join(node.inputs)})"
    if attrs:
        text += f" {{{attrs}}}"
    text += f" label {json.dumps(node.label)}{_at(node.position)}"
    if node.numeric_class:
        text += f" class {json.dumps(node.numeric_class)}"
    if node.kernel:
        text += f" kernel {json.dumps(node.kernel)}"
    return text


def _at(position: Position | None) -> str:
    if position is None:
        return ""
    return f" at {json.dumps(position.file)}:{position.line}:{position.column}"


_STRING = r'"(?:[^"\\]|\\.)*"'
_AT = rf"(?: at (?P<file>{_STRING}):(?P<line>\d+):(?P<column>\d+))?"
_WEIGHT = re.compile(
    rf"weight \$(?P<name>\S+) : (?P<type>.+?) from (?P<source>\w+)(?P<names>(?: {_STRING})+)"
    rf"(?: made (?P<made>\(.*?\)))?(?: stacked (?P<stacked>\d+))?(?: of (?P<of>\d+) rows)?{_AT}$"
)
_PLANE = re.compile(
    r"plane @(?P<name>\S+) : (?P<type>.+?) rollback (?P<rule>\w+)(?P<ring> ring)?"
    r"(?: kind (?P<kind>\w+))?$"
)
_PROGRAM = re.compile(
    r"program (?P<name>\S+) rows (?P<rows>\S+)(?: from (?P<from>\w+))?"
    rf"(?: results(?P<results>(?: %\S+)+))?(?: fault (?P<fault>{_STRING}))? {{$"
)
_NODE = re.compile(
    r"(?:(?P<outputs>%.*?) = )?(?P<op>\w+)\((?P<inputs>[^{]*)\)(?: \{(?P<attrs>.*?)\})?"
    rf" label (?P<label>{_STRING}){_AT}(?: class (?P<class>{_STRING}))?"
    rf"(?: kernel (?P<kernel>{_STRING}))?$"
)
_OUTPUT = re.compile(r"%(?P<name>\S+) : (?P<type>\w+\[[^\]]*\](?: \w+)?)")
_TYPE = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?: (?P<layout>\w+))?$")
_SEQUENCE = re.compile(r"sequence (?P<name>\S+) \{ (?P<calls>.*) \}(?: while (?P<loop>\w+))?$")
_ARENA = re.compile(r"arena (?P<place>.+) = (?P<offset>\d+)$")


def parse_module(text: str, ops: Mapping[str, type[Op]]) -> Module:
    """Read a module back. `ops` maps op names to classes. Raises `IRError` with the line."""
    parser = _Parser(ops)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            parser.line(line.strip())
        except (IRError, ValueError, SyntaxError, TypeError, KeyError) as error:
            raise IRError(f"line {number}: {error}: {line.strip()[:120]}") from error
    if parser.open:
        raise IRError(f"program {parser.open['name']} is not closed")
    return Module(
        parser.name,
        parser.weights,
        parser.planes,
        parser.programs,
        parser.sequences,
        parser.arena,
        parser.target,
    )


class _Parser:
    def __init__(self, ops: Mapping[str, type[Op]]) -> None:
        self.ops = ops
        self.name, self.target = "", "cpu"
        self.weights: dict[str, Weight] = {}
        self.planes: dict[str, Plane] = {}
        self.programs: dict[str, Program] = {}
        self.sequences: dict[str, Sequence] = {}
        self.arena: dict[str, int] = {}
        self.open: dict[str, Any] = {}

    def line(self, line: str) -> None:
        if self.open:
            self._inside(line)
            return
        word = line.split(" ", 1)[0]
        reader = getattr(self, f"_{word}", None)
        if reader is None:
            raise IRError(f"expected module, weight, plane, program, sequence or arena, got {word}")
        reader(line)

    def _module(self, line: str) -> None:
        _, self.name, *target = line.split(" ")
        self.target = target[1] if target else "cpu"

    def _weight(self, line: str) -> None:
        m = _match(_WEIGHT, line)
        names = tuple(json.loads(n) for n in re.findall(_STRING, m["names"]))
        made = tuple(ast.literal_eval(m["made"])) if m["made"] else ()
        type = parse_type(m["type"])
        self.weights[m["name"]] = Weight(
            m["name"], type, m["source"], names, made, _position(m),
            int(m["stacked"] or 0), int(m["of"] or 0),
        )  # fmt: skip

    def _plane(self, line: str) -> None:
        m = _match(_PLANE, line)
        plane = Plane(m["name"], parse_type(m["type"]), m["rule"], bool(m["ring"]),
                      m["kind"] or "")  # fmt: skip
        self.planes[plane.name] = plane

    def _program(self, line: str) -> None:
        m = _match(_PROGRAM, line)
        self.open = {
            "name": m["name"],
            "rows": _dim(m["rows"]),
            "rows_from": m["from"] or "",
            "nodes": [],
            "values": {},
            "results": tuple(r[1:] for r in (m["results"] or "").split()),
            "fault": json.loads(m["fault"]) if m["fault"] else "",
        }

    def _inside(self, line: str) -> None:
        if line == "}":
            nodes = tuple(self.open.pop("nodes"))
            program = Program(nodes=nodes, **self.open)
            self.programs[program.name] = program
            self.open = {}
            return
        m = _match(_NODE, line)
        outputs = _OUTPUT.findall(m["outputs"] or "")
        for name, type in outputs:
            self.open["values"][name] = parse_type(type)
        if m["op"] not in self.ops:
            raise IRError(f"unknown op `{m['op']}`; known: {', '.join(sorted(self.ops))}")
        inputs = tuple(i.strip() for i in m["inputs"].split(", ") if i.strip())
        node = Node(
            self.ops[m["op"]](**_attrs(m["attrs"])),
            inputs,
            tuple(name for name, _ in outputs),
            json.loads(m["label"]),
            _position(m),
            json.loads(m["class"]) if m["class"] else "",
            json.loads(m["kernel"]) if m["kernel"] else "",
        )
        self.open["nodes"].append(node)

    def _sequence(self, line: str) -> None:
        m = _match(_SEQUENCE, line)
        calls = tuple(_parse_call(call) for call in m["calls"].split(";"))
        self.sequences[m["name"]] = Sequence(m["name"], calls, m["loop"] or "")

    def _arena(self, line: str) -> None:
        m = _match(_ARENA, line)
        self.arena["" if m["place"] == "bytes" else m["place"]] = int(m["offset"])


def _match(pattern: re.Pattern[str], line: str) -> re.Match[str]:
    found = pattern.match(line)
    if found is None:
        raise IRError("does not read as IR text")
    return found


def _attrs(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


def _position(m: re.Match[str]) -> Position | None:
    if m["file"] is None:
        return None
    return Position(json.loads(m["file"]), int(m["line"]), int(m["column"]))


def _dim(text: str) -> Dim:
    if "<=" in text:
        name, bound = text.split("<=")
        return Sym(name, int(bound))
    return int(text)


def parse_type(text: str) -> TensorType:
    """Read `f32[T<=8, 256]`."""
    m = _match(_TYPE, text.strip())
    dims = tuple(_dim(d.strip()) for d in m["shape"].split(",") if d.strip())
    return TensorType(dims, m["dtype"], m["layout"] or "row")

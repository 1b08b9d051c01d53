"""The verifier: the rules every module keeps, checked after every pass."""

from __future__ import annotations

from collections.abc import Iterator

from memra_compiler.ir.errors import IRError, OpError
from memra_compiler.ir.graph import Module, Node, Program
from memra_compiler.ir.types import Sym, TensorType
from memra_runtime.artifact import STATE


def verify(module: Module, *, after: str = "") -> None:
    """Check a module; raises one `IRError` that lists everything wrong and blames `after`."""
    problems = [p for program in module.programs.values() for p in _program(module, program)]
    problems += list(_sequences(module))
    if problems:
        blame = f" after pass `{after}`" if after else ""
        raise IRError(f"module {module.name} is broken{blame}:\n  " + "\n  ".join(problems))


def _program(module: Module, program: Program) -> Iterator[str]:
    defined: set[str] = set()
    where = f"program {program.name}"
    if not isinstance(program.rows, Sym):
        yield f"{where}: rows must be a bounded symbol, got {program.rows}"
    if program.rows_from and program.rows_from not in STATE:
        yield f"{where}: `{program.rows_from}` is not a counter"
    for node in program.nodes:
        place = f"{where}, {node.label} ({node.op.name})"
        yield from (f"{place}: {p}" for p in _operands(module, program, node, defined))
        for name in node.outputs:
            if name in defined:
                yield f"{place}: %{name} is defined twice"
            if name not in program.values:
                yield f"{place}: %{name} has no type"
            else:
                yield from (f"{place}: %{name} {p}" for p in _rows(program, program.values[name]))
            defined.add(name)
    yield from (f"{where}, {p}" for p in _row_logits(module, program))
    for name in program.results:
        if name not in defined:
            yield f"{where}: result %{name} is never defined"


def _row_logits(module: Module, program: Program) -> Iterator[str]:
    """Logits of a trimmed head are by row: what makes token ids of them has left out the map."""
    by_row: set[str] = set()
    for node in program.nodes:
        weights = [name[1:] for name in node.inputs if name.startswith("$")]
        trimmed = [name in module.weights and module.weights[name].of_rows > 0 for name in weights]
        outputs = [name for name in node.outputs if name in program.values]
        if len(weights) == len(outputs):
            by_row |= {f"%{out}" for out, yes in zip(outputs, trimmed, strict=True) if yes}
        elif any(trimmed):
            by_row |= {f"%{out}" for out in outputs}
        if by_row & set(node.inputs):
            for out in outputs:
                dtype = program.values[out].dtype
                if dtype == "i32":
                    yield (f"{node.label} ({node.op.name}): makes token ids of the logits of a "
                           "trimmed head, whose rows are no token ids")  # fmt: skip
                elif dtype != "head_row":
                    by_row.add(f"%{out}")


def _rows(program: Program, type: TensorType) -> Iterator[str]:
    """A value holds as many rows as its program can be asked for: memory is planned by it."""
    for dim in type.shape:
        if isinstance(dim, Sym) and dim != program.rows:
            yield f"has rows {dim}, its program {program.rows}"


def _operands(module: Module, program: Program, node: Node, defined: set[str]) -> Iterator[str]:
    op = node.op
    count, least = len(node.inputs), len(op.operands)
    if count < least - op.variadic or (count > least and not op.variadic):
        yield f"takes {least} operands, got {count}"
        return
    broken = False
    for i, operand in enumerate(node.inputs):
        declared = op.operand(i)
        if operand.startswith("?"):
            broken = True
            continue
        if operand[:1] != declared.sigil:
            yield f"operand `{declared.name}` must be a {declared.sigil} operand, got {operand}"
            broken = True
            continue
        if operand.startswith("%") and operand[1:] not in defined:
            yield f"{operand} is used before it is defined"
            broken = True
        try:
            module.type_of(program, operand)
        except IRError as error:
            yield str(error)
            broken = True
    if broken:
        return
    try:
        inferred = op.infer(*(t.in_rows for t in module.operand_types(program, node)))
    except OpError as error:
        yield str(error)
        return
    stated = tuple(program.values[name] for name in node.outputs if name in program.values)
    if inferred != tuple(t.in_rows for t in stated):
        yield f"outputs are {', '.join(map(str, inferred))}, stated {', '.join(map(str, stated))}"


def open_references(module: Module) -> list[str]:
    """Open references (`?name`) that no pass has wired yet, with the place of each."""
    return [
        f"program {program.name}, {node.label}: {operand}"
        for program, node in module.nodes()
        for operand in node.inputs
        if operand.startswith("?")
    ]


def _sequences(module: Module) -> Iterator[str]:
    for sequence in module.sequences.values():
        for call in sequence.calls:
            if call.program not in module.programs:
                yield f"sequence {sequence.name}: there is no program {call.program}"
            if call.repeat and call.repeat not in STATE:
                yield f"sequence {sequence.name}: `{call.repeat}` is not a counter"
        if sequence.loop and sequence.loop not in STATE:
            yield f"sequence {sequence.name}: `{sequence.loop}` is not a counter"

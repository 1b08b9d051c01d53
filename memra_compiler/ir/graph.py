"""The IR: a module of weights, planes and programs.

A `?name` is an open reference: it names what a later pass must wire (`?last_own(swa).k`).

A *plane* is state that outlives a program (keys, values, counters). A *program* is a straight list
of nodes; everything it leaves behind, it leaves in planes. A *sequence* composes programs and is
the unit of launch: `round` is one. Operands are named with a sigil: `%value`, `$weight`, `@plane`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.types import Sym, TensorType
from memra_runtime.errors import Position

if TYPE_CHECKING:
    from memra_compiler.ops.base import Op


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a weight file, or one made at load.

    `names` are the spellings it may have in a file, in order of preference. `made` is a recipe
    (name and integer arguments) for sources that do not carry the tensor. `stacked` matrices that
    a file keeps apart by a dimension of their own lie along the rows here: the bytes are the same.
    With `of_rows`, the file's tensor has so many rows and the weight holds chosen ones: their
    numbers are no token ids.
    """

    name: str
    type: TensorType
    source: str
    names: tuple[str, ...]
    made: tuple[str | int, ...] = ()
    position: Position | None = None
    stacked: int = 0
    of_rows: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in a file."""
        shape = self.type.max_shape
        if not self.stacked:
            return shape
        return (self.stacked, shape[0] // self.stacked, *shape[1:])


#: How a plane forgets the rows a round rejected.
ROLLBACK_RULES = ("truncate", "none")


@dataclass(frozen=True, slots=True)
class Plane:
    """State that outlives a program.

    `rollback` says how rejected rows are undone: `truncate` (rows are addressed by position, so
    moving the position back forgets them) or `none` (written anew each round, or not per row).
    A `ring` holds fewer rows than the context.
    """

    name: str
    type: TensorType
    rollback: str = "none"
    ring: bool = False
    #: For a cache: the layer kind that appends to it.
    kind: str = ""

    def __post_init__(self) -> None:
        if self.rollback not in ROLLBACK_RULES:
            raise IRError(f"plane @{self.name}: rollback `{self.rollback}` is not one of "
                          f"{', '.join(ROLLBACK_RULES)}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One application of an op. Outputs are value names; `label` is the layer path."""

    op: Op
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str
    position: Position | None = None
    numeric_class: str = ""
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """A straight list of nodes. `rows` bounds T; `rows_from` is the counter that holds it."""

    name: str
    rows: Sym
    rows_from: str
    nodes: tuple[Node, ...]
    values: Mapping[str, TensorType]
    #: Values that stay in the arena when the program ends.
    results: tuple[str, ...] = ()
    #: "" for a program of the product, else the name of the fault it plants on purpose.
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One step of a sequence: run `program`, once or as often as the counter `repeat` says.

    `live`: the program, which counts its runs in `step`, may lower that counter: it is looked at
    before each run.
    """

    program: str
    repeat: str = ""
    live: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """Programs in launch order; the unit that is launched, and on CUDA captured.

    With `loop`, it repeats while that counter is not zero after a pass.
    """

    name: str
    calls: tuple[Call, ...]
    loop: str = ""


@dataclass(frozen=True, slots=True)
class Module:
    """A whole pipeline. Passes map modules to modules and never change one in place."""

    name: str
    weights: Mapping[str, Weight]
    planes: Mapping[str, Plane]
    programs: Mapping[str, Program]
    sequences: Mapping[str, Sequence]
    #: Byte offset in the arena of `@plane` and `program/%value`, and the total under "".
    arena: Mapping[str, int] = field(default_factory=dict)
    #: What the code is for: `cpu`, or `cuda:sm_90a`.
    target: str = "cpu"

    def type_of(self, program: Program, operand: str) -> TensorType:
        """Type of an operand as seen from `program`; raises `IRError` for an unknown name."""
        name = operand[1:]
        found = {
            "%": program.values.get(name),
            "$": self.weights.get(name),
            "@": self.planes.get(name),
        }.get(operand[:1])
        if found is None:
            raise IRError(f"program {program.name}: `{operand}` is not defined")
        return found if isinstance(found, TensorType) else found.type

    def operand_types(self, program: Program, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.type_of(program, operand) for operand in node.inputs)

    def with_programs(self, rewrite: Callable[[Program], Program]) -> Module:
        """The module with each program replaced by `rewrite(program)`."""
        return replace(self, programs={n: rewrite(p) for n, p in self.programs.items()})

    def nodes(self) -> Iterator[tuple[Program, Node]]:
        for program in self.programs.values():
            for node in program.nodes:
                yield program, node

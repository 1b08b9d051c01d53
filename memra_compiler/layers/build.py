"""How a spec becomes IR: the builder that layer kinds, drafters and rounds write programs with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Module, Node, Plane, Program, Weight
from memra_compiler.ir.types import BLOCK_FORMATS, PIECE_INPUTS, Sym, TensorType
from memra_compiler.ops.base import Op
from memra_compiler.ops.linear import Linear
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.quantise import Quantise
from memra_compiler.ops.rope import RopeAngles
from memra_runtime.errors import Position

#: (section, role, layer, bare names of its own) -> accepted names in a weight file.
WeightNames = Callable[[str, str, int | None, tuple[str, ...]], tuple[str, ...]]
#: (section, names, use) -> storage format; `use` is matrix, embed or norm, fields of `formats`, or
#: ids (of tokens).
WeightFormat = Callable[[str, tuple[str, ...], str], str]
#: A path of the spec -> where it is written.
Positions = Callable[[tuple[str | int, ...]], Position | None]

#: Key of the per-layer embeddings among a step's shared values.
PER_LAYER_INPUTS = ("per layer inputs",)

#: By activations of the spec: formats of the rows that meet quantised and 16-bit float matrices.
ROWS = {"f32": ("f32", "f32"), "bf16": ("bf16", "bf16"), "int8": ("a8", "bf16")}


def rows_for(activations: str, weight: TensorType) -> str:
    """The format of the rows that meet a matrix [N, K].

    A float32 matrix keeps all bits of its rows: no tensor-core kernel would be exact. So does one
    whose rows are no whole pieces, which no such kernel takes.
    """
    quantised, half = ROWS[activations]
    if weight.max_shape[-1] % PIECE_INPUTS or weight.dtype == "f32":
        return "f32"
    return quantised if weight.dtype in BLOCK_FORMATS else half


@dataclass
class ModuleBuilder:
    """A module under construction: weights and planes are declared on first use."""

    name: str
    weight_names: WeightNames
    weight_format: WeightFormat
    position: Positions
    #: Format of the rows that meet matrices, a key of `ROWS`.
    activations: str = "f32"
    weights: dict[str, Weight] = field(default_factory=dict)
    planes: dict[str, Plane] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)

    def weight(
        self,
        section: str,
        role: str,
        shape: tuple[int, ...],
        use: str,
        layer: int | None = None,
        made: tuple[str | int, ...] = (),
        path: tuple[str | int, ...] = (),
        names: tuple[str, ...] = (),
        stacked: int = 0,
        trimmed: tuple[str, int] | None = None,
    ) -> str:
        """Declare a weight and return its operand, `$section.layers.3.role`.

        `names` are bare (GGUF, Hugging Face) names of a role the architecture's table lacks. A
        `use` of f32 is what every file stores so, whatever the spec's formats are.
        `trimmed` is the weight's own name and the file's rows, of which it holds some.
        """
        name = f"{section}.{role}" if layer is None else f"{section}.layers.{layer}.{role}"
        name, of_rows = trimmed or (name, 0)
        if name not in self.weights:
            names = self.weight_names(section, role, layer, names)
            dtype = use if use == "f32" else self.weight_format(section, names, use)
            source = "draft" if section == "drafter" else section
            type = TensorType(shape, dtype)
            self.weights[name] = Weight(
                name, type, source, names, made, self.position(path), stacked, of_rows
            )
        return f"${name}"

    def plane(
        self, name: str, shape: tuple[int, ...], dtype: str, rollback: str = "none", *,
        ring: bool = False, kind: str = "",
    ) -> str:  # fmt: skip
        """Declare a plane and return its operand, `@name`."""
        plane = Plane(name, TensorType(shape, dtype), rollback, ring, kind)
        known = self.planes.setdefault(name, plane)
        if known != plane:
            raise IRError(f"plane @{name} is declared as {known} and as {plane}")
        return f"@{name}"

    def finish(self) -> Module:
        return Module(self.name, self.weights, self.planes, self.programs, {})


@dataclass
class ProgramBuilder:
    """A program under construction."""

    module: ModuleBuilder
    name: str
    limit: int = 1
    rows_from: str = ""
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, TensorType] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    #: Values computed once a step and shared by its layers.
    shared: dict[tuple[object, ...], str] = field(default_factory=dict)

    @property
    def rows(self) -> Sym:
        return Sym("T", self.limit)

    def type_of(self, operand: str) -> TensorType:
        kind, name = operand[:1], operand[1:]
        if kind == "%":
            return self.values[name]
        if kind == "$":
            return self.module.weights[name].type
        return self.module.planes[name].type

    def emit(
        self,
        op: Op,
        *operands: str,
        label: str,
        path: tuple[str | int, ...] = (),
        types: tuple[TensorType, ...] | None = None,
    ) -> tuple[str, ...]:
        """Append a node and return its outputs as operands.

        `types` states the output types where an operand is still open (`?name`).
        """
        if types is None:
            types = op.infer(*(self.type_of(operand) for operand in operands))
        outputs = []
        for i, type in enumerate(types):
            name = f"{label}.{i}" if len(types) > 1 else label
            while name in self.values:
                name += "_"
            self.values[name] = type
            outputs.append(name)
        position = self.module.position(path)
        self.nodes.append(Node(op, operands, tuple(outputs), label, position))
        return tuple(f"%{name}" for name in outputs)

    def one(
        self,
        op: Op,
        *operands: str,
        label: str,
        path: tuple[str | int, ...] = (),
        types: tuple[TensorType, ...] | None = None,
    ) -> str:
        """`emit` of an op with one output."""
        (output,) = self.emit(op, *operands, label=label, path=path, types=types)
        return output

    def rows_of(self, x: str, *weights: str, label: str, path: tuple[str | int, ...] = ()) -> str:
        """x in the activation format that the storage of the weights that it meets asks for."""
        wanted = {rows_for(self.module.activations, self.type_of(w)) for w in weights}
        to = wanted.pop() if len(wanted) == 1 else "f32"  # which meets every weight
        if to == "f32":
            return x
        key = ("quantised", x, to)
        if key not in self.shared:
            self.shared[key] = self.one(Quantise(to), x, label=f"{label}.in", path=path)
        return self.shared[key]

    def linear(self, x: str, weight: str, *, label: str, path: tuple[str | int, ...] = ()) -> str:
        """`weight x`, with x in the activation format that the weight's storage asks for."""
        x = self.rows_of(x, weight, label=label, path=path)
        return self.one(Linear(), x, weight, label=label, path=path)

    def keep(self, value: str) -> None:
        """Let a value outlive the program, for checks."""
        self.results.append(value[1:])

    def finish(self) -> Program:
        program = Program(
            self.name, self.rows, self.rows_from, tuple(self.nodes), self.values,
            tuple(self.results),
        )  # fmt: skip
        self.module.programs[self.name] = program
        return program


@dataclass(frozen=True)
class LayerBuild:
    """What a layer's builder needs to know about its place."""

    program: ProgramBuilder
    section: str
    index: int
    kind: str
    width: int
    eps: float
    #: Positions of the rows, and for each row the end of the positions it may see.
    positions: str
    ends: str
    #: Rows a cache plane holds: (window or None) -> (rows, is a ring).
    cache_rows: Callable[[int | None], tuple[int, bool]]
    #: Type of cached keys and values.
    kv_dtype: str
    #: Width of a layer's slice of the per-layer embeddings, 0 without any.
    per_layer_width: int = 0

    @property
    def path(self) -> tuple[str | int, ...]:
        """Path of the layer kind in the spec."""
        return (self.section, "layer_kinds", self.kind)

    def label(self, part: str) -> str:
        return f"{self.section}.layers.{self.index}.{part}"

    def weight(
        self, role: str, *shape: int, use: str = "matrix", names: tuple[str, ...] = (),
        made: tuple[str | int, ...] = (), stacked: int = 0,
    ) -> str:  # fmt: skip
        """Declare a weight of this layer; a new role brings its bare GGUF and HF names."""
        return self.program.module.weight(
            self.section, role, shape, use, self.index, made, self.path, names, stacked
        )

    def emit(self, op: Op, *operands: str, part: str, at: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Append an op of this layer; `at` is the path inside the layer kind."""
        return self.program.emit(op, *operands, label=self.label(part), path=(*self.path, *at))

    def run(self, op: Op, *operands: str, part: str, at: tuple[str, ...] = ()) -> str:
        """`emit` of an op with one output."""
        (output,) = self.emit(op, *operands, part=part, at=at)
        return output

    def rows_of(self, x: str, *weights: str, part: str, at: tuple[str, ...] = ()) -> str:
        """x as rows that meet all of `weights`."""
        label, path = self.label(part), (*self.path, *at)
        return self.program.rows_of(x, *weights, label=label, path=path)

    def norm(self, x: str, role: str, *, at: tuple[str, ...], factor: float = 1.0) -> str:
        """Append a norm of whole rows with the weight `role`."""
        weight = self.weight(role, self.width, use="norm")
        return self.run(RMSNorm(self.eps, factor=factor), x, weight, part=role, at=at)

    def span(self, visible: int | None) -> int:
        """Positions an attention looks back, 0 for all: also where no context fills the window."""
        context, _ = self.cache_rows(None)
        return 0 if visible is None or visible >= context else visible

    def linear(self, x: str, weight: str, *, part: str, at: tuple[str, ...] = ()) -> str:
        """Append a matrix product of this layer."""
        return self.program.linear(x, weight, label=self.label(part), path=(*self.path, *at))

    def per_layer_inputs(self) -> str:
        """The per-layer embeddings of this step's rows, `[T, layers * per_layer_width]`."""
        return self.program.shared[PER_LAYER_INPUTS]

    def angles(self, head_dim: int, base: float, rotated: int, factors: bool) -> str:
        """Rotary angles of this step, made once for all layers that turn alike.

        `factors` reads the file's `rope_freqs`; a source without one has it made: 1 for the
        `rotated` first pairs, 1e30 for the others.
        """
        key = ("angles", self.section, head_dim, base, rotated, factors)
        program, pairs = self.program, head_dim // 2
        if key not in program.shared:
            operands = [self.positions]
            if factors:
                made = ("rope_factors", rotated)
                operands.append(
                    program.module.weight(
                        self.section, "rope_freqs", (pairs,), "f32", made=made, path=self.path
                    )
                )
            op = RopeAngles(head_dim, base, pairs if factors else rotated)
            label = f"{self.section}.angles.{self.kind}"
            path = (*self.path, "mixer")
            program.shared[key] = program.one(op, *operands, label=label, path=path)
        return program.shared[key]

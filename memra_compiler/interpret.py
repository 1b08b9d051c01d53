"""The reference interpreter: what a module means, slowly and in float64.

It runs any program or sequence by calling each op's NumPy reference on named arrays: no arena, no
kernels, no fusion needed. A module may be handed over after any pass that leaves no open reference.
Values and f32 planes are float64; an f16, bf16 or q8_0 plane rounds what is stored in it, because
the rounding is part of the program (a q8_0 plane holds bytes); counters and tokens are int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Module, Node, Plane, Program, Sequence, Weight
from memra_compiler.ir.verify import open_references
from memra_compiler.ops.formats import dequantise
from memra_runtime.artifact import slot
from memra_runtime.checkpoint import Checkpoint

Array = npt.NDArray[Any]

#: How a plane of each element type is held.
PLANE_DTYPES: Mapping[str, Any] = {
    "f32": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "q8_0_rows": np.uint8,
    "i32": np.int32,
}


class Interpreter:
    """A module with its weights and its state.

    `planes` may be read and written between runs. `values` holds every value of the last run of
    each program, under the program's name: `interpreter.values["verify"]["target.logits"]`.
    """

    def __init__(self, module: Module, weights: Mapping[str, Array]) -> None:
        """`weights` maps the id of each weight to its values; `load_weights` makes it.

        Raises: IRError for an open reference, a missing weight or one of another shape.
        """
        left = open_references(module)
        if left:
            raise IRError("the module has open references:\n  " + "\n  ".join(left))
        for name, weight in module.weights.items():
            found = weights[name].shape if name in weights else "none"
            if found != weight.type.max_shape:
                raise IRError(f"weight ${name} is {weight.type}, given {found}")
        self.module = module
        self.weights = weights
        self.planes = {name: empty_plane(plane) for name, plane in module.planes.items()}
        self.values: dict[str, dict[str, Array]] = {}

    def counter(self, name: str) -> int:
        """A counter of the device block, the plane `state`."""
        return int(self.planes["state"][slot(name)])

    def put(self, **counters: int) -> None:
        """Write counters of the device block."""
        for name, value in counters.items():
            self.planes["state"][slot(name)] = value

    def run(self, name: str) -> None:
        """Run the sequence `name`, or the program if no sequence is called so."""
        if name in self.module.sequences:
            self._sequence(self.module.sequences[name])
        elif name in self.module.programs:
            self._program(self.module.programs[name])
        else:
            raise IRError(f"module {self.module.name} has no sequence and no program {name}")

    def _sequence(self, sequence: Sequence) -> None:
        more = True
        while more:
            for call in sequence.calls:
                times, runs = self.counter(call.repeat) if call.repeat else 1, 0
                while runs < times:
                    self._program(self.module.programs[call.program])
                    runs += 1
                    times = self.counter(call.repeat) if call.live else times
            more = bool(sequence.loop) and self.counter(sequence.loop) != 0

    def _program(self, program: Program) -> None:
        rows = self.counter(program.rows_from) if program.rows_from else 1
        if not 0 <= rows <= program.rows.bound:
            raise IRError(f"program {program.name} is for {program.rows} rows, asked for {rows}")
        values: dict[str, Array] = {}
        for node in program.nodes:
            outputs = node.op.reference(rows, *(self._operand(values, n) for n in node.inputs))
            self._check(program, node, rows, outputs)
            values.update(zip(node.outputs, outputs, strict=True))
        self.values[program.name] = values

    def _operand(self, values: Mapping[str, Array], operand: str) -> Array:
        kinds: Mapping[str, Mapping[str, Array]] = {
            "%": values,
            "$": self.weights,
            "@": self.planes,
        }
        return kinds[operand[0]][operand[1:]]

    @staticmethod
    def _check(program: Program, node: Node, rows: int, outputs: tuple[Array, ...]) -> None:
        for name, array in zip(node.outputs, outputs, strict=True):
            want = (rows, *program.values[name].max_shape[1:])
            if array.shape != want:
                raise IRError(
                    f"{node.label} ({node.op.name}): %{name} is {array.shape}, not {want}"
                )


def empty_plane(plane: Plane) -> Array:
    """A plane before its first use."""
    return np.zeros(plane.type.stored_shape, PLANE_DTYPES[plane.type.dtype])


def load_weights(module: Module, target: Checkpoint, draft: Checkpoint) -> dict[str, Array]:
    """Every weight of a module as float64, from the two files it was built for."""
    files = {"target": target, "draft": draft}
    return {w.name: weight_values(w, files[w.source]) for w in module.weights.values()}


def weight_values(weight: Weight, file: Checkpoint) -> Array:
    """The values of one weight: those of the file, else made by its recipe.

    Raises: IRError when the file has no such tensor, or stores it in another format or shape.
    """
    for name in weight.names:
        info = file.tensors.get(name)
        if info is None:
            continue
        if (info.format, info.shape) != (weight.type.dtype, weight.stored_shape):
            raise IRError(f"${weight.name} is {weight.type}, stored {info.format}{info.shape}")
        return dequantise(file.data(name), weight.type)
    if not weight.made:
        raise IRError(f"{file.path.name} has none of {', '.join(weight.names)}")
    return make_weight(weight)


def make_weight(weight: Weight) -> Array:
    """A weight that no file carries.

    `rope_factors N`: 1 for the N pairs that turn, 1e30 beyond. `ones`: as it says.
    """
    recipe, *arguments = weight.made
    if recipe == "ones":
        return np.ones(weight.type.max_shape)
    if recipe != "rope_factors":
        raise IRError(f"${weight.name}: unknown recipe {recipe}")
    pairs = np.arange(weight.type.elements)
    return np.where(pairs < int(arguments[0]), 1.0, 1e30)

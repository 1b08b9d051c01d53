"""What an op is, and the registry that finds them all.

An op is declared once: one frozen dataclass that holds its shape rule, its NumPy meaning, its CPU
lowering, its numeric class, its cost and its samples. Modules of this package are discovered, so
adding an op edits no list; `tests/ops/test_every_op.py` runs every sample of every op.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from memra_compiler.ir.errors import OpError
from memra_compiler.ir.types import Sym, TensorType

if TYPE_CHECKING:
    from memra_compiler.ops.cuda import AnyLaunch, CudaArch
    from memra_compiler.ops.emit import Buffer, Kernel
    from memra_compiler.ops.scheduled import TeOperand

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Operand:
    """One declared operand: its name, its sigil (`%`, `$`, `@`) and what the op does to it."""

    name: str
    sigil: str = "%"
    effect: str = "read"

    @property
    def reads(self) -> bool:
        return self.effect in ("read", "update")

    @property
    def writes(self) -> bool:
        return self.effect in ("write", "update")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one application must move and compute; the roofline of a kernel."""

    bytes: int
    flops: int


#: An operand's name and a function that makes its values.
SampleValue = tuple[str, Callable[[np.random.Generator], Array]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Operand types (and values where random ones will not do) that the suite runs an op on.

    `rows` is T. `values` maps an operand's name to a function of a seeded generator.
    """

    types: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    rows: int = 3
    values: tuple[SampleValue, ...] = ()


class Op:
    """Base of every op. Subclasses are frozen dataclasses registered with `@op(name)`.

    `rows_independent` promises that row t of every output depends on no other row of the inputs,
    and that its bits do not depend on how many rows there are.
    """

    name: ClassVar[str] = ""
    operands: ClassVar[tuple[Operand, ...]] = ()
    rows_independent: ClassVar[bool] = True
    #: Operands whose partial planes (a matrix product's) the CUDA kernel adds itself.
    adds_planes: ClassVar[tuple[str, ...]] = ()
    #: Operands that the CUDA kernel reads before its predecessor is done, with rows of caches that
    #: are older than the program: an op that `settles` lies between their writer and this one.
    reads_early: ClassVar[tuple[str, ...]] = ()
    #: The CUDA kernel lets no other start before all that precede it are done.
    settles: ClassVar[bool] = False
    #: The op may take further operands of the last declared kind.
    variadic: ClassVar[bool] = False

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        """Types of the outputs. Raises `OpError` when the operands do not fit."""
        raise NotImplementedError

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        """The meaning, in float64 NumPy; planes are changed in place."""
        raise NotImplementedError

    def numeric_class(self, *types: TensorType) -> str:
        """Everything that decides the bits of a row: formats, accumulation, order of the sum."""
        raise NotImplementedError

    def cost(self, rows: int, *types: TensorType) -> Cost:
        """Bytes moved and operations done for `rows` rows: by default, every operand once."""
        moved = sum(type_bytes(t, rows) for t in (*types, *self.infer(*types)))
        return Cost(bytes=moved, flops=0)

    def scratch_floats(self, *types: TensorType) -> int:
        """Float32 scratch the CPU kernel needs, passed as one more buffer after the outputs."""
        return 0

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        """Emit the CPU kernel: operands, then outputs, as flat buffers."""
        raise NotImplementedError

    def compute(self, *operands: TeOperand) -> Any:
        """The meaning as a TVM tensor expression (several outputs: a tuple), for `lower_cuda`.

        Shapes: `[rows, ...]`; the axes may divide a row's columns further than the type does.
        """
        raise NotImplementedError(f"{self.name} has no CUDA kernel: no `compute`, no `lower_cuda`")

    def outputs_of(self, types: int) -> int:
        """How many of `types`, operands and outputs, are outputs of `compute`."""
        return 1

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[AnyLaunch, ...]:
        """The launches of the CUDA kernel, given the types of operands and outputs.

        By default TVM schedules what `compute` says.
        """
        from memra_compiler.ops.scheduled import scheduled_launches

        return scheduled_launches(self, arch, *types)

    def scratch_bytes_cuda(self, arch: CudaArch, *types: TensorType) -> int:
        """Scratch the CUDA launches need, passed as one more pointer after the outputs."""
        return 0

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Cases on both sides of each tile, for the suite."""
        raise NotImplementedError

    def operand(self, index: int) -> Operand:
        return self.operands[min(index, len(self.operands) - 1)]

    def attrs(self) -> dict[str, Any]:
        """The op's parameters by name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: getattr(self, f.name) for f in fields}


REGISTRY: dict[str, type[Op]] = {}
OpClass = TypeVar("OpClass", bound=type[Op])


def op(name: str) -> Callable[[OpClass], OpClass]:
    """Register an op class under `name`."""

    def register(cls: OpClass) -> OpClass:
        if name in REGISTRY:
            raise OpError(f"two ops are called `{name}`: {REGISTRY[name]} and {cls}")
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return register


def discover() -> dict[str, type[Op]]:
    """Import every module of this package and return all ops by name."""
    import memra_compiler.ops as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return REGISTRY


def expect(condition: bool, op: Op, message: str) -> None:
    """Raise an `OpError` that names the op unless `condition` holds."""
    if not condition:
        raise OpError(f"{op.name}: {message}")


def fixed(op: Op, type: TensorType, axis: int) -> int:
    """A dimension that must be known at compile time."""
    dim = type.shape[axis]
    if isinstance(dim, Sym):
        raise OpError(f"{op.name}: dimension {axis} of {type} must be fixed")
    return dim


def width(op: Op, type: TensorType) -> int:
    """Product of all dimensions after the first: the elements of one row."""
    count = 1
    for axis in range(1, len(type.shape)):
        count *= fixed(op, type, axis)
    return count


def type_bytes(type: TensorType, rows: int) -> int:
    """Bytes of a tensor whose symbolic dimension is `rows`."""
    shape = tuple(rows if isinstance(d, Sym) else d for d in type.shape)
    return TensorType(shape, type.dtype, type.layout).nbytes

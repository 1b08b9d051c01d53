"""What a table of one model architecture says, and how it sees a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Protocol

from memra_compiler.layers.params import Path, Problem

if TYPE_CHECKING:
    from memra_compiler.spec.model import Spec


class TensorLike(Protocol):
    """One tensor of a checkpoint; `shape` is row-major, `[out, in]` for a matrix."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class CheckpointLike(Protocol):
    """A GGUF file or a safetensors folder. Metadata of the latter is its config, flattened."""

    @property
    def path(self) -> FilePath: ...
    @property
    def kind(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...
    @property
    def tensors(self) -> Mapping[str, TensorLike]: ...


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints a spec is resolved against; either may be absent."""

    target: CheckpointLike | None = None
    drafter: CheckpointLike | None = None


@dataclass(frozen=True)
class Fact:
    """A value that a checkpoint knows, and where it comes from, in words."""

    value: Any
    origin: str


@dataclass
class Facts:
    """All facts by spec path, with what the checkpoint has that a spec cannot express."""

    values: dict[Path, Fact] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: Path, value: Any, origin: str) -> None:
        self.values[path] = Fact(value, origin)


@dataclass(frozen=True)
class Expected:
    """What the metadata of a weight file must say for a compiled program to fit it.

    `keys` are the spellings of one key; a key that the file lacks is not a mismatch. A list is one
    value per layer, and a single value in the file stands for all layers. Numbers are equal
    within 1e-6, because GGUF stores them in f32.
    """

    keys: tuple[str, ...]
    value: Any
    path: Path


class ArchTable(Protocol):
    """The one place where an architecture's spellings are known.

    `names` are the spellings of `name` in files; `section` is what the model can be: `target` or
    `drafter`.
    """

    name: str
    names: tuple[str, ...]
    section: str
    roles: tuple[str, ...]
    layer_roles: tuple[str, ...]

    def weight_names(self, role: str, layer: int | None = None) -> tuple[str, ...]:
        """Return the accepted names of a weight, GGUF spellings first."""

    def layer_names(self, names: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Return the spellings of a layer's weight from its bare (GGUF, Hugging Face) names."""

    def facts(self, checkpoint: CheckpointLike, data: Mapping[str, Any]) -> Facts:
        """Read what the checkpoint knows about the spec; `data` is the raw, unvalidated spec."""

    def expected(self, spec: Spec) -> list[Expected]:
        """Return what another file's metadata must say to be used with this spec."""

    def ignored(self, spec: Spec) -> Mapping[str, str]:
        """Return the tensors (patterns) that files may have and this spec does not read: why."""


def names_for(
    names: Mapping[str, tuple[str, ...]], role: str, layer: int | None
) -> tuple[str, ...]:
    """Fill the layer number into the spellings of a role.

    Raises: KeyError if the architecture has no such weight.
    """
    return tuple(name.replace("{i}", str(layer)) for name in names[role])

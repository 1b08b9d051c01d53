"""What TVM schedules, for a GPU machine without TVM: sources and launches, in `build/gpu`.

`tests/gpu/build.py` writes them; where TVM is installed they are made on the spot.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from memra_compiler.codegen.cuda import render
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Op
from memra_compiler.ops.cuda import AnyLaunch, CudaArch, Scheduled

FILE = Path(__file__).parents[2] / "build" / "gpu" / "scheduled.json"
NAME = "scheduled"
#: What this process has asked for.
ASKED: list[tuple[Op, CudaArch, tuple[TensorType, ...]]] = []


@dataclasses.dataclass(frozen=True)
class Bundled:
    """A scheduled launch whose source is written already. Fields as those of `Scheduled`."""

    rule: str
    symbol: str
    source: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    early: bool
    graph_handles: int = 0


def scheduled(op: Op, arch: CudaArch, *types: TensorType) -> tuple[Scheduled | Bundled, ...]:
    """The launches of an op that TVM schedules. Raises: LookupError where the bundle has none."""
    ASKED.append((op, arch, types))
    if importlib.util.find_spec("tvm") is not None:
        found = op.lower_cuda(arch, *types)
        assert all(isinstance(one, Scheduled) for one in found), op
        return found  # type: ignore[return-value]
    return tuple(
        Bundled(**(fields | {"grid": tuple(fields["grid"])}))
        for fields in _bundle()[_key(op, arch, types)]
    )


def rendered(launch: AnyLaunch | Bundled, name: str) -> tuple[str, str]:
    """The symbol and the source of a launch."""
    if isinstance(launch, Bundled):
        return launch.symbol, launch.source
    return render(launch, name)


def write(wanted: Iterable[tuple[Op, CudaArch, tuple[TensorType, ...]]]) -> None:
    """Write the launches of ops to the bundle; needs TVM."""
    made: dict[str, list[dict[str, Any]]] = {}
    for op, arch, types in [*wanted]:
        launches = []
        for launch in scheduled(op, arch, *types):
            symbol, source = render(launch, NAME)  # type: ignore[arg-type]
            one = Bundled(launch.rule, symbol, source, launch.grid, launch.block,
                          launch.shared_bytes, launch.early)  # fmt: skip
            launches.append(dataclasses.asdict(one))
        made[_key(op, arch, types)] = launches
    FILE.write_text(json.dumps(made, indent=1), encoding="utf-8")


def _key(op: Op, arch: CudaArch, types: tuple[TensorType, ...]) -> str:
    return f"{arch.name} {op.name} {op!r} {', '.join(map(str, types))}"


@cache
def _bundle() -> dict[str, list[dict[str, Any]]]:
    if not FILE.is_file():
        raise LookupError(f"{FILE.name} is missing: `make gpu-bundle` where TVM is installed")
    found: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found

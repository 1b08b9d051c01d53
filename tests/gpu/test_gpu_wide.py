"""Matrix kernels of prompts (9 to 64 rows) on a GPU, against float64 of the rounded product.

Every T runs in the kernel for 64 rows and in one for itself: the bits of a row must be those of all
64. Outputs are poisoned and guarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from matrix_cases import (
    Named,
    Operands,
    Reference,
    Weights,
    activations,
    add_planes,
    repacks,
    weight_types,
)

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import Launch
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.cuda_wide import WIDE_ROWS, wide_launches, wide_planes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

ROWS = (64, 33, 31, 16, 9)
#: (rows a kernel is compiled for, rows it is given); the first is what the others must equal.
RUNS = [(WIDE_ROWS, rows) for rows in ROWS] + [(rows, rows) for rows in ROWS[1:]]


@dataclass(frozen=True)
class Wide:
    """Matrices that share their rows; with `act` a gated product of two."""

    label: str
    kind: str
    inputs: int
    weights: Weights
    act: str | None = None

    @property
    def types(self) -> list[TensorType]:
        return weight_types(self.weights, self.inputs)

    @property
    def name(self) -> str:
        return f"wide_{self.weights[0][0]}"

    def x(self, most: int) -> TensorType:
        return TensorType((most, self.inputs), self.kind)

    def launches(self, most: int) -> tuple[Launch, ...]:
        return wide_launches(ARCH, self.x(most), self.types, (), act=self.act)

    def named(self) -> list[Named]:
        mine = [launch for most in ROWS for launch in self.launches(most)]
        return [*((launch, self.name) for launch in mine), *repacks(self.types)]


def wide() -> Iterator[Wide]:
    gelu = "gelu_tanh"
    for name, kind in [(n, k) for n, format in FORMATS.items() for k in format.classes]:
        unit, label = FORMATS[name].unit_inputs, f"{name}-{kind}"
        shapes = [(16, unit), (48, 3 * unit), (128, 1024), (528, 13 * unit)]
        shapes += [(4096, 512), (256, 97 * unit), (5376, 8192)]
        for outputs, inputs in shapes:
            yield Wide(f"{label}-{outputs}x{inputs}", kind, inputs, ((name, outputs),))
        yield Wide(f"{label}-group", kind, 1024, ((name, 64), (name, 16), (name, 32)))
        yield Wide(f"{label}-{gelu}", kind, 768, ((name, 3200),) * 2, gelu)
        yield Wide(f"{label}-silu", kind, 256, ((name, 48),) * 2, "silu")
        yield Wide(f"{label}-large group", kind, 5376, ((name, 2048), (name, 512), (name, 528)))
        yield Wide(f"{label}-plain", kind, 768, ((name, 24),))
    for kind in ("a8", "bf16"):
        four, six, eight = ("q4_k", 32), ("q6_k", 16), ("q8_0", 16)
        yield Wide(f"q4_0-{kind}-large gated", kind, 5376, (("q4_0", 2112),) * 2, gelu)
        yield Wide(f"q4_0-{kind}-long", kind, 21504, (("q4_0", 672),))
        yield Wide(f"mixed-{kind}-group", kind, 512, (four, six, ("q4_k", 48), eight))
        yield Wide(f"mixed-{kind}-gated", kind, 512, (("q4_k", 64), ("q6_k", 64)), gelu)
    yield Wide("mixed-bf16-floats", "bf16", 512, (("f16", 32), ("q8_0", 24), ("f32", 16)))


@pytest.mark.parametrize("case", list(wide()), ids=lambda c: c.label)
def test_wide_product(gpu: Gpu, case: Wide) -> None:
    family = f"wide {' '.join(case.label.split('-')[:2])}"
    with Operands(gpu, case.label) as held:
        weights = [held.weight(type) for type in case.types]
        x = held.rows(WIDE_ROWS, case.inputs)
        reference = Reference(activations(x, case.kind)[1], [w for _, w in weights], case.act)
        outputs = [n for _, n in case.weights][: 1 if case.act else None]
        first: list[np.ndarray] = []
        for most, rows in RUNS:
            stored, _ = activations(x[:rows], case.kind)
            planes = wide_planes(ARCH, case.x(most), case.types, case.act)
            shape = planes, -(-most // 8) * 8
            out = [np.full((*shape, n), np.nan, np.float32) for n in outputs]
            targets = [held.upload(o) for o in out]
            operands = [held.upload(stored), *(address for address, _ in weights), *targets]
            gpu.run(case.launches(most), case.name, ARCH, rows, operands)
            raw = [gpu.download(a, o) for a, o in zip(targets, out, strict=True)]
            assert all(np.isnan(r[:, rows:]).all() for r in raw), f"rows beyond {rows} of {most}"
            got = [add_planes(r)[:rows] for r in raw]
            reference.check(family, got)
            first = first or got
            for whole, part in zip(first, got, strict=True):
                same = np.array_equal(whole[:rows], part)
                assert same, f"bits of a row depend on {rows} rows of {most}"

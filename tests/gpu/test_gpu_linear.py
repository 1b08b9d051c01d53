"""Matrix kernels of a round on a GPU, against float64: every format and form, 1 to 16 rows.

Outputs are poisoned, buffers guarded, and a row has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_driver import ARCH, Gpu
from matrix_cases import (
    TOLERANCE,
    Named,
    Operands,
    Reference,
    Weights,
    activations,
    add_planes,
    repacks,
    stored_rows,
    weight_types,
)
from worst_errors import note

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import Launch
from memra_compiler.ops.cuda_linear import (
    FORMATS,
    embed_launches,
    linear_launches,
    split_planes,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]


@dataclass(frozen=True)
class Product:
    """Matrices that share their rows, with 1 to `most` of them; two and `act`: a gated product."""

    label: str
    kind: str
    inputs: int
    weights: Weights
    act: str | None = None
    most: int = 8

    @property
    def types(self) -> list[TensorType]:
        return weight_types(self.weights, self.inputs)

    @property
    def x(self) -> TensorType:
        return TensorType((-(-self.most // 8) * 8, self.inputs), self.kind)

    @property
    def name(self) -> str:
        return f"linear_{self.weights[0][0]}"

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Launches that leave partial sums to whoever reads them."""
        return linear_launches(ARCH, self.x, self.types, (), act=self.act)

    @property
    def planes(self) -> int:
        return split_planes(ARCH, self.x, self.types, self.act)

    def named(self) -> list[Named]:
        return [*((launch, self.name) for launch in self.launches), *repacks(self.types)]


def products() -> Iterator[Product]:
    for name, format in FORMATS.items():
        unit = format.unit_inputs
        shapes = [(16, unit), (48, 3 * unit), (32, 512), (528, 1024), (16, 13 * 256)]
        shapes += [(96, 97 * unit), (2352, 5376), (1024, 8192), (672, 21504)]
        for kind in format.classes:
            label = f"{name}-{kind}"
            for outputs, inputs in shapes:
                yield Product(f"{label}-{outputs}x{inputs}", kind, inputs, ((name, outputs),))
            yield Product(f"{label}-16 rows", kind, 2048, ((name, 160),), most=16)
            yield Product(f"{label}-group", kind, 1024, ((name, 64), (name, 16), (name, 32)))
            for act in ("gelu_tanh", "silu"):
                yield Product(f"{label}-{act}", kind, 768, ((name, 3200),) * 2, act)
            yield Product(f"{label}-plain", kind, 768, ((name, 24),))
            if kind == "bf16":  # blocks of 256: more than registers hold
                yield Product(f"{label}-long 16 rows", kind, 5376, ((name, 528),) * 2, "silu", 16)
        yield Product(f"{name}-f32", "f32", 256, ((name, 20),))
        yield Product(f"{name}-f32-silu", "f32", 256, ((name, 20),) * 2, "silu")
    mixed = ("q4_k", 32), ("q6_k", 16), ("q4_k", 48), ("q8_0", 8)
    yield Product("mixed group", "a8", 512, mixed)
    yield Product("mixed gated", "a8", 512, (("q4_k", 64), ("q6_k", 64)), "gelu_tanh")


PRODUCTS = list(products())
EMBEDDINGS = [(name, *shape) for name in FORMATS for shape in ((512, 32), (256, 9))]


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda c: c.label)
def test_product(gpu: Gpu, case: Product) -> None:
    launches, planes, family = case.launches, case.planes, f"linear {case.label.split('-')[0]}"
    tall = case.x.max_shape[0]
    with Operands(gpu, case.label) as held:
        weights = [held.weight(type) for type in case.types]
        x = held.rows(case.most, case.inputs)
        reference = Reference(activations(x, case.kind)[1], [w for _, w in weights], case.act)
        outputs = [n for _, n in case.weights][: 1 if case.act else None]
        first: list[np.ndarray] = []
        for rows in range(case.most, 0, -1):
            out = [np.full((planes, tall, n), np.nan, np.float32) for n in outputs]
            targets = [held.upload(o) for o in out]
            stored = held.upload(stored_rows(x[:rows], case.x))
            operands = [stored, *(address for address, _ in weights), *targets]
            gpu.run(launches, case.name, ARCH, rows, operands)
            raw = [gpu.download(a, o) for a, o in zip(targets, out, strict=True)]
            assert all(np.isnan(r[:, rows:]).all() for r in raw), f"rows beyond {rows} were written"
            got = [add_planes(r)[:rows] for r in raw]
            reference.check(family, got)
            first = first or got
            for whole, part in zip(first, got, strict=True):
                same = np.array_equal(whole[:rows], part)
                assert same, f"bits of a row depend on rows = {rows}"


@pytest.mark.parametrize(("name", "inputs", "outputs"), EMBEDDINGS)
def test_embedding(gpu: Gpu, name: str, inputs: int, outputs: int) -> None:
    """Rows of a table, scaled; ids outside it are held to its ends."""
    type = TensorType((outputs, inputs), name)
    ids = np.array([0, outputs - 1, 5, -3, outputs + 9, 7, 7, 1], np.int32)
    out = np.full((8, inputs), np.nan, np.float32)
    launches = embed_launches(ARCH, 8, type, 73.3125)
    with Operands(gpu, f"{name} {inputs}") as held:
        address, values = held.weight(type)
        operands = [held.upload(ids), address, held.upload(out)]
        gpu.run(launches, f"embed_{name}", ARCH, 7, operands)
        got = gpu.download(operands[2], out)
    expected = values[np.clip(ids, 0, outputs - 1)] * 73.3125
    worst = float(np.abs(got[:7] - expected[:7]).max() / np.abs(expected[:7]).max())
    note("embedding", worst, TOLERANCE)
    assert worst < TOLERANCE
    assert np.isnan(got[7]).all(), "a row past T was written"

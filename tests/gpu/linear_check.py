"""Checks the matrix kernels on a GPU against float64: `PYTHONPATH=.:runtime:tests/gpu python ...`.

Every format and form, T = 1..8 (and 9..16), poisoned outputs, guard bytes behind every buffer.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from cuda.bindings import driver
from gpu_driver import Gpu, check

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import activate_reference
from memra_compiler.ops.cuda import ARCHS, CudaArch, Launch
from memra_compiler.ops.cuda_layouts import (
    a8_quantise,
    a8_reference,
    bf16_reference,
    bf16_round,
    repack_reference,
)
from memra_compiler.ops.cuda_linear import (
    FORMATS,
    embed_launches,
    linear_launches,
    repack_launches,
    scratch_of,
    split_planes,
    weight_layout,
)
from memra_compiler.ops.formats import dequantise, random_bytes

#: Largest error allowed, over the sum of magnitudes of the products.
TOLERANCE = 1e-6


class Checker:
    """Runs cases and keeps their worst errors."""

    def __init__(self, arch: CudaArch) -> None:
        self.arch = arch
        self.gpu = Gpu()
        self.rng = np.random.default_rng(7)
        self.held: list[int] = []
        self.failures: list[str] = []
        self.table: list[str] = []

    def upload(self, array: np.ndarray) -> int:
        self.held.append(self.gpu.upload(array))
        return self.held[-1]

    def free(self) -> None:
        for address in self.held:
            check(driver.cuMemFree(address))
        self.held.clear()

    def weight(self, type: TensorType) -> tuple[int, np.ndarray]:
        """A random weight as the kernels want it, and its values."""
        stored = random_bytes(type, self.rng)
        address = self.upload(stored)
        values = dequantise(stored, type)
        if weight_layout(self.arch, type) == "plain":
            return address, values
        launch, size = repack_launches(self.arch, type)
        out = np.full(size, 0xCD, np.uint8)
        repacked = self.upload(out)
        self.gpu.run((launch,), f"repack_{type.dtype}", self.arch, 0, [address, repacked])
        actual = self.gpu.download(repacked, out)
        if not np.array_equal(actual, repack_reference(stored, type)):
            self.failures.append(f"repack {type}")
        return repacked, values

    def activations(self, x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Stored activations and the values that they stand for."""
        if kind == "a8":
            q, d = a8_quantise(x)
            return a8_reference(x), q.astype(np.float64) * np.repeat(d.astype(np.float64), 32, 1)
        if kind == "bf16":
            return bf16_reference(x), bf16_round(x).astype(np.float64)
        return x, x.astype(np.float64)

    def products(
        self, label: str, kind: str, inputs: int, weights: list[tuple[str, int]],
        act: str | None = None, most: int = 8,
    ) -> None:  # fmt: skip
        """One case over every number of rows up to `most`."""
        types = [TensorType((n, inputs), f) for f, n in weights]
        held = [self.weight(type) for type in types]
        tiles = -(-most // 8)
        x_type = TensorType((8 * tiles, inputs), kind)
        launches = linear_launches(self.arch, x_type, types, (), act=act)
        planes = split_planes(self.arch, x_type, types, act)
        x = self.rng.standard_normal((most, inputs)).astype(np.float32)
        x *= 10 ** self.rng.uniform(-2, 2, (most, 1)).astype(np.float32)
        x[:, :32] = 0
        outputs = [types[0].shape[0]] if act else [t.shape[0] for t in types]
        worst = 0.0
        first: list[np.ndarray] = []
        for rows in range(most, 0, -1):
            stored, values = self.activations(x[:rows], kind)
            out = [np.full((planes, 8 * tiles, n), np.nan, np.float32) for n in outputs]
            addresses = [self.upload(stored), *(a for a, _ in held), *map(self.upload, out)]
            self.gpu.run(launches, f"linear_{types[0].dtype}", self.arch, rows, addresses)
            raw = [
                self.gpu.download(a, o) for a, o in zip(addresses[-len(out) :], out, strict=True)
            ]
            if any(not np.isnan(r[:, rows:]).all() for r in raw):
                self.failures.append(f"{label}: rows beyond {rows} were written")
            got = [self.add_planes(r)[:rows] for r in raw]
            worst = max(worst, self.error(got, values, [w for _, w in held], act))
            if not first:
                first = got
            elif any(not np.array_equal(f[:rows], g) for f, g in zip(first, got, strict=True)):
                self.failures.append(f"{label}: bits of a row depend on rows = {rows}")
        if not worst <= TOLERANCE:
            self.failures.append(f"{label}: error {worst:.2e}")
        self.table.append(f"{label:44} {self.geometry(launches):34} {worst:.1e}")
        print(self.table[-1], flush=True)
        self.free()

    def meeting(
        self, label: str, kind: str, inputs: int, name: str, outputs: int,
        act: str | None = None, most: int = 8,
    ) -> None:  # fmt: skip
        """Where blocks meet: a gated product that quantises, or splits that join their planes.

        Every bit is that of the kernel that leaves the work to the next one; counters are zero
        again, so that a second launch gives the same.
        """
        tiles = -(-most // 8)
        types = [TensorType((outputs, inputs), name)] * (2 if act else 1)
        x_type = TensorType((8 * tiles, inputs), kind)
        weights = [self.weight(type)[0] for type in types]
        apart = linear_launches(self.arch, x_type, types, (), act=act)
        wanted = [TensorType((8 * tiles, outputs), "a8", "tile8")] if act else []
        joined = linear_launches(self.arch, x_type, types, wanted, act=act, join=not act)
        planes, needed = split_planes(self.arch, x_type, types, act), scratch_of(joined)
        scratch = np.full(needed.total, 0xCD, np.uint8)
        scratch[: needed.zeroed] = 0
        shared = self.upload(scratch)
        x = self.rng.standard_normal((most, inputs)).astype(np.float32)
        x *= 10 ** self.rng.uniform(-2, 2, (most, 1)).astype(np.float32)
        for rows in range(most, 0, -1):
            operands = [self.upload(self.activations(x[:rows], kind)[0]), *weights]
            floats = np.full((planes, 8 * tiles, outputs), np.nan, np.float32)
            address = self.upload(floats)
            self.gpu.run(apart, f"linear_{name}", self.arch, rows, [*operands, address])
            expected = self.add_planes(self.gpu.download(address, floats))
            poison = np.full((8 * tiles, outputs), np.nan, np.float32)
            if act:
                expected[rows:] = 0
                expected = a8_reference(expected)
                poison = np.full(wanted[0].nbytes, 0xCD, np.uint8)
            for turn in range(2):
                address = self.upload(poison)
                self.gpu.run(
                    joined, f"joined_{name}", self.arch, rows, [*operands, address, shared]
                )
                got = self.gpu.download(address, poison)
                if not np.array_equal(got.view(np.uint8), expected.view(np.uint8)):
                    wrong = np.mean(got.view(np.uint8) != expected.view(np.uint8))
                    self.failures.append(f"{label}: rows {rows}, turn {turn}: {wrong:.1%} differ")
                if self.gpu.download(shared, scratch)[: needed.zeroed].any():
                    self.failures.append(f"{label}: rows {rows}, turn {turn}: counters not reset")
        self.table.append(f"{label:44} {self.geometry(joined):34} same bits")
        print(self.table[-1], flush=True)
        self.free()

    @staticmethod
    def geometry(launches: tuple[Launch, ...]) -> str:
        def one(launch: Launch) -> str:
            if not hasattr(launch.params, "geometry"):
                return "plain"
            g = launch.params.geometry
            return f"s{g.splits} w{g.warps}x{g.slice_units} r{g.stage_units}x{g.stages}"

        return ", ".join(map(one, launches))

    @staticmethod
    def add_planes(planes: np.ndarray) -> np.ndarray:
        total = planes[0].copy()
        for plane in planes[1:]:
            total += plane
        return total

    @staticmethod
    def error(
        got: list[np.ndarray], x: np.ndarray, weights: list[np.ndarray], act: str | None
    ) -> float:
        """Worst error over the sum of magnitudes; a gated one over the bound of its factors."""
        sums = [x @ w.T for w in weights]
        sizes = [np.abs(x) @ np.abs(w).T + 1e-30 for w in weights]
        if act is None:
            return max(
                float(np.max(np.abs(g - s) / m)) for g, s, m in zip(got, sums, sizes, strict=True)
            )
        gate = activate_reference(act, sums[0])
        bound = sizes[0] * np.abs(sums[1]) * 1.5 + sizes[1] * np.abs(gate) + 1e-30
        return float(np.max(np.abs(got[0] - gate * sums[1]) / bound))

    def embedding(self, name: str, inputs: int, outputs: int) -> None:
        type = TensorType((outputs, inputs), name)
        address, values = self.weight(type)
        ids = np.array([0, outputs - 1, 5, -3, outputs + 9, 7, 7, 1], np.int32)
        out = np.full((8, inputs), np.nan, np.float32)
        launches = embed_launches(self.arch, 8, type, 73.3125)
        addresses = [self.upload(ids), address, self.upload(out)]
        self.gpu.run(launches, f"embed_{name}", self.arch, 7, addresses)
        got = self.gpu.download(addresses[2], out)
        expected = values[np.clip(ids, 0, outputs - 1)] * 73.3125
        scale = np.abs(expected[:7]).max()
        worst = float(np.abs(got[:7] - expected[:7]).max() / scale)
        if not worst < 1e-6 or not np.isnan(got[7]).all():
            self.failures.append(f"embed {type}: {worst:.2e}")
        self.table.append(f"{f'embed {type} {weight_layout(self.arch, type)}':79} {worst:.1e}")
        print(self.table[-1], flush=True)
        self.free()


def cases(c: Checker, quick: bool) -> None:
    for name, format in FORMATS.items():
        unit = format.unit_inputs
        for kind in format.classes:
            shapes = [(16, unit), (48, 3 * unit), (32, 512), (528, 1024), (16, 13 * 256)]
            shapes += [(96, 97 * unit)]
            shapes += [] if quick else [(2352, 5376), (1024, 8192), (672, 21504)]
            for outputs, inputs in shapes:
                c.products(f"{name} x {kind} {outputs}x{inputs}", kind, inputs, [(name, outputs)])
            c.products(f"{name} x {kind} 16 rows", kind, 2048, [(name, 160)], most=16)
            group = [(name, 64), (name, 16), (name, 32)]
            c.products(f"{name} x {kind} group", kind, 1024, group)
            for act in ("gelu_tanh", "silu"):
                gated = [(name, 3200), (name, 3200)]
                c.products(f"{name} x {kind} gated {act}", kind, 768, gated, act)
            c.products(f"{name} x {kind} plain", kind, 768, [(name, 24)])
            for outputs in (64, 192, 2176, 4288, 12736):
                c.meeting(f"{name} x {kind} a8 {outputs}", kind, 768, name, outputs, "silu")
            c.meeting(f"{name} x {kind} a8 16 rows", kind, 768, name, 4288, "gelu_tanh", 16)
            if not quick:
                c.meeting(f"{name} x {kind} a8 21504", kind, 5376, name, 21504, "gelu_tanh")
            for outputs, inputs, most in ((16, 8192, 8), (1008, 8192, 8), (160, 2048, 16)):
                label = f"{name} x {kind} join {outputs}"
                c.meeting(label, kind, inputs, name, outputs, None, most)
        c.products(f"{name} x f32 plain", "f32", 256, [(name, 20)])
        c.products(f"{name} x f32 plain gated", "f32", 256, [(name, 20)] * 2, "silu")
        c.embedding(name, 512, 32)
        c.embedding(name, 256, 9)
    mixed = [("q4_k", 32), ("q6_k", 16), ("q4_k", 48), ("q8_0", 8)]
    c.products("mixed group", "a8", 512, mixed)
    c.products("mixed gated", "a8", 512, [("q4_k", 64), ("q6_k", 64)], "gelu_tanh")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_90a", choices=ARCHS)
    parser.add_argument("--quick", action="store_true", help="leave out the large shapes")
    options = parser.parse_args()
    c = Checker(ARCHS[options.arch])
    cases(c, options.quick)
    print(f"\n{len(c.table)} cases, {len(c.failures)} failures")
    for failure in c.failures:
        print(f"FAILED {failure}")
    return 1 if c.failures else 0


if __name__ == "__main__":
    sys.exit(main())

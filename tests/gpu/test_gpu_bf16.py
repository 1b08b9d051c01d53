"""Kernels that round rows to bf16, on a GPU.

Whatever rounds must give the bf16 nearest to the reference, but for values that float32 puts on the
other side of a tie, and zeros in rows nobody asked for. A row has the same bits in any number of
rows. What reads such rows is in test_gpu_linear.py and test_gpu_wide.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from gpu_driver import ARCH, Gpu

from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops import cuda_attention, cuda_kernels
from memra_compiler.ops.activation import Concat, GateMul
from memra_compiler.ops.attention import Attention
from memra_compiler.ops.base import Op
from memra_compiler.ops.cuda import Launch
from memra_compiler.ops.cuda_layouts import bf16_reference, bf16_round
from memra_compiler.ops.quantise import Quantise, RMSNormAddQuantise, RMSNormQuantise

pytestmark = pytest.mark.gpu

#: Most rows a kernel is compiled for, and the rows it is given.
ROWS = {1: (1,), 8: (8, 7, 2, 1), 16: (16, 15, 9, 8, 1), 64: (64, 63, 33, 17, 8, 1)}
#: Share of values that may round to the other neighbour.
TURNED = 0.01

Array = np.ndarray


def run(
    gpu: Gpu, launches: tuple[Launch, ...], name: str, rows: int, given: Sequence[Array],
    outputs: Sequence[Array],
) -> list[Array]:  # fmt: skip
    """The outputs, which come poisoned, after the launches of one op."""
    arrays = [*given, *outputs]
    pointers = [gpu.upload(a) for a in arrays]
    gpu.run(launches, name, ARCH, rows, pointers)
    after = [gpu.download(p, a) for p, a in zip(pointers, arrays, strict=True)]
    gpu.free(pointers)
    return after[len(given) : len(given) + len(outputs)]


def unpack(data: Array, inputs: int) -> Array:
    """Tiles of bf16 fragments as rows."""
    split = data.view(ml_dtypes.bfloat16).reshape(-1, inputs // 32, 8, 4, 2, 4)
    return split.transpose(0, 2, 1, 4, 3, 5).reshape(-1, inputs).astype(np.float64)


def test_unpacking_is_the_inverse_of_the_layout() -> None:
    x = np.random.default_rng(0).standard_normal((16, 192)).astype(np.float32)
    np.testing.assert_array_equal(unpack(bf16_reference(x), 192), bf16_round(x))


@dataclass(frozen=True)
class Producer:
    """An op whose last output is bf16 tiles; `floats` are shapes of its other outputs' rows."""

    op: Op
    launches: tuple[Launch, ...]
    given: tuple[Array, ...]
    inputs: int
    want: Array
    floats: tuple[int, ...] = ()


def rows_of(bound: int, *shape: int, dtype: str = "f32") -> TensorType:
    return TensorType((Sym("T", bound), *shape), dtype)


def producers(bound: int, size: int) -> Iterator[Producer]:
    rng = np.random.default_rng(bound + size)
    x, out, w = rows_of(bound, size), rows_of(bound, size, dtype="bf16"), TensorType((size,))
    rows, other = (rng.standard_normal((bound, size)).astype(np.float32) * 3 for _ in range(2))
    weights = [(1 + 0.3 * rng.standard_normal(size)).astype(np.float32) for _ in range(2)]
    one = np.array([0.37], np.float32)

    def reference(op: Op, *given: Array) -> Array:
        return op.reference(bound, *(a.astype(np.float64) for a in given))[-1]

    k = cuda_kernels
    op: Op = Quantise("bf16")
    yield Producer(op, k.quantise_launches(op, ARCH, x, out), (rows,), size, reference(op, rows))
    op = RMSNormQuantise(to="bf16")
    given: tuple[Array, ...] = (rows, weights[0])
    yield Producer(op, k.rmsnorm_launches(op, ARCH, x, w, out), given, size, reference(op, *given))
    op = RMSNormAddQuantise(to="bf16")
    given = (rows, other, *weights, one)
    launches = k.rmsnorm_add_launches(op, ARCH, x, x, w, w, TensorType((1,)), x, out)
    yield Producer(op, launches, given, size, reference(op, *given), floats=(size,))
    op = GateMul("silu")
    launches = k.gate_mul_launches(op, ARCH, x, x, out)
    yield Producer(op, launches, (rows, other), size, reference(op, rows, other))
    op, both = Concat(), rows_of(bound, 2 * size, dtype="bf16")
    launches = k.concat_launches(op, ARCH, x, x, both)
    yield Producer(op, launches, (rows, other), 2 * size, reference(op, rows, other))


def check_producer(gpu: Gpu, p: Producer, bound: int) -> None:
    tiles = math.ceil(bound / 8)
    nearest = bf16_round(p.want.astype(np.float32)).astype(np.float64)
    whole: Array | None = None
    for count in ROWS[bound]:
        outputs = [np.full((bound, n), np.nan, np.float32) for n in p.floats]
        outputs.append(np.full(tiles * 8 * p.inputs, 0x7FFF, np.uint16))
        *_, raw = run(gpu, p.launches, p.op.name, count, p.given, outputs)
        got = unpack(raw, p.inputs)
        assert not got[count:].any(), "rows past T are not zero"
        if whole is None:
            whole = got
            step = np.abs(nearest) * 2.0**-7 + 1e-6 * np.abs(nearest).max()
            assert (np.abs(got[:count] - nearest) <= step).all()
            assert (got[:count] != nearest).mean() < TURNED
        assert got[:count].tobytes() == whole[:count].tobytes(), f"bits depend on {count} rows"


@pytest.mark.parametrize(("bound", "size"), [(1, 64), (8, 5376), (16, 3840), (64, 320)])
def test_producers_round_to_nearest(gpu: Gpu, bound: int, size: int) -> None:
    for producer in producers(bound, size):
        check_producer(gpu, producer, bound)


@pytest.mark.parametrize("kv", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("bound", [1, 8, 16, 64])
def test_attention_rounds_its_float_rows(gpu: Gpu, bound: int, kv: str) -> None:
    """Not one bit but the rounding differs from the kernel that leaves floats."""
    heads, kv_heads, d, cached = 8, 2, 64, 192
    rng = np.random.default_rng(bound)
    q, at = rows_of(bound, heads * d), rows_of(bound, dtype="i32")
    plane = TensorType((kv_heads, cached, d), kv)
    storage = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}[kv]
    rows = rng.standard_normal((bound, heads * d)).astype(np.float32)
    ends = np.arange(70, 70 + bound, dtype=np.int32)
    given = [rows, ends, *(rng.standard_normal(plane.max_shape).astype(storage) for _ in "kv")]

    def attend(to: str, count: int, output: Array) -> Array:
        op, types = Attention(d**-0.5, to=to), (q, at, plane, plane)
        launches = cuda_attention.attention_launches(op, ARCH, *types, *op.infer(*types))
        scratch = cuda_attention.attention_scratch_floats(op, ARCH, *types)
        outputs = [output, np.full(scratch, np.nan, np.float32)]
        return run(gpu, launches, f"attention_{to}", count, given, outputs)[0]

    for count in ROWS[bound]:
        floats = attend("f32", count, np.full((bound, heads * d), np.nan, np.float32))
        tiles = np.full(math.ceil(bound / 8) * 8 * heads * d, 0x7FFF, np.uint16)
        got = unpack(attend("bf16", count, tiles), heads * d)
        assert np.isfinite(floats[:count]).all()
        np.testing.assert_array_equal(got[:count], bf16_round(floats[:count]))
        assert not got[count:].any(), "rows past T are not zero"


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3.4e38])
def test_what_is_not_finite_stays_so(gpu: Gpu, bad: float) -> None:
    x, out = rows_of(8, 128), rows_of(8, 128, dtype="bf16")
    rows = np.random.default_rng(3).standard_normal((8, 128)).astype(np.float32)
    rows[0, 0] = rows[5, 77] = bad
    op = Quantise("bf16")
    poison = np.full(8 * 128, 0x1234, np.uint16)
    launches = cuda_kernels.quantise_launches(op, ARCH, x, out)
    (raw,) = run(gpu, launches, op.name, 8, [rows], [poison])
    np.testing.assert_array_equal(unpack(raw, 128), bf16_round(rows).astype(np.float64))

"""Times kernels but int8 products, at the sizes of the 31B: microseconds a launch.

`PYTHONPATH=.:runtime:tests/gpu python tests/gpu/ops_bench.py [NAME ...]`. Each kernel runs many
times in one CUDA graph with dependent launches, as it does in a round; attention reads another
cache every time, more than L2 holds in all. The table comes last.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cuda.bindings import driver
from gpu_driver import Gpu, check
from scheduled_bundle import Bundled, rendered, scheduled

from memra_compiler.codegen.cuda import compile_cuda
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops import cuda_attention, cuda_kernels, cuda_state
from memra_compiler.ops.activation import Concat, GateMul, SoftCap
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.attention import Attention
from memra_compiler.ops.cuda import ARCHS, AnyLaunch
from memra_compiler.ops.linear import Linear
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.qkv import NormRopeQKV
from memra_compiler.ops.quantise import Quantise, RMSNormAddQuantise, RMSNormQuantise
from memra_compiler.ops.rope import NormRope, RopeAngles
from memra_runtime.device.cuda_driver import Event, Kernel, LaunchShape, Stream

Make = Callable[..., tuple[AnyLaunch | Bundled, ...]]
ARCH = ARCHS["sm_90a"]
PEAK = 4290.0  # GB/s, a device copy
REPEATS = 60
CONTEXTS = (64, 1736, 16384)
CACHES = ("f16", "q8_0_rows")
#: Bytes of caches that a graph reads before it meets the same again.
ROTATION_BYTES = 256 << 20
CONTEXT_ROWS = 16400


@dataclass(frozen=True)
class Bench:
    """Launches, their operands (zeros unless an array is given) and the bytes they must move."""

    name: str
    launches: tuple[AnyLaunch | Bundled, ...]
    types: tuple[TensorType, ...]
    rows: int
    bytes: int = 0
    ends: tuple[int, ...] = ()
    scratch: int = 0
    #: Operands of which each repetition has another copy.
    rotate: tuple[int, ...] = ()


def benches() -> list[Bench]:
    found: list[Bench] = []

    def add(name: str, make: Make, op: object, *types: TensorType, rows: int,
            **more: int) -> None:  # fmt: skip
        found.append(Bench(name, make(op, ARCH, *types, **more), types, rows))

    for bound in (1, 6, 8):

        def rows(*shape: int, dtype: str = "f32") -> TensorType:
            return TensorType((Sym("T", bound), *shape), dtype)  # noqa: B023

        d, f = 5376, 21504
        x, x8, w, one = rows(d), rows(d, dtype="a8"), TensorType((d,)), TensorType((1,))
        at = rows(dtype="i32")
        k = cuda_kernels
        add(f"rmsnorm T={bound}", scheduled, RMSNorm(), x, w, x, rows=bound)
        add(f"rmsnorm_quantise T={bound}", k.rmsnorm_launches, RMSNormQuantise(), x, w, x8,
            rows=bound, splits=1)  # fmt: skip
        for splits in (1, 2, 4):
            add(f"rmsnorm_add_quantise T={bound} splits={splits}", k.rmsnorm_add_launches,
                RMSNormAddQuantise(), x, x, w, w, one, x, x8, rows=bound,
                splits=splits)  # fmt: skip
        add(f"quantise 8192 T={bound}", k.quantise_launches, Quantise(), rows(8192),
            rows(8192, dtype="a8"), rows=bound, splits=1)  # fmt: skip
        add(f"gate_mul a8 T={bound}", k.gate_mul_launches, GateMul(), rows(f), rows(f),
            rows(f, dtype="a8"), rows=bound, splits=1)  # fmt: skip
        add(f"concat a8 T={bound}", k.concat_launches, Concat(), x, x, rows(2 * d, dtype="a8"),
            rows=bound)  # fmt: skip
        add(f"rope_angles 512 T={bound}", scheduled, RopeAngles(512, 1e6, 256), at,
            TensorType((256,)), rows(2, 256), rows=bound)  # fmt: skip
        add(f"concat T={bound}", scheduled, Concat(), x, x, rows(2 * d), rows=bound)
        for n, head in ((16, 256), (4, 512)):
            q, kv, turns = rows(32 * head), rows(n * head), rows(2, head // 2)
            hw = TensorType((head,))
            for cache in CACHES:
                plane = TensorType((n, 1040, head), cache)
                add(f"norm_rope_qkv {cache} {head} T={bound}", k.norm_rope_qkv_launches,
                    NormRopeQKV(), q, kv, kv, turns, hw, hw, at, plane, plane, q, rows=bound,
                    splits=1)  # fmt: skip
            add(f"norm_rope {head} T={bound}", k.norm_rope_launches, NormRope(), q, turns, hw, q,
                rows=bound, splits=1)  # fmt: skip
        logits = rows(262144)
        add(f"softcap T={bound}", scheduled, SoftCap(), logits, logits, rows=bound)
        argmax = ArgMax((258882, 258883))
        found.append(
            Bench(
                f"argmax T={bound}",
                cuda_state.argmax_launches(argmax, ARCH, logits, at),
                (logits, at),
                bound,
                bound * 262144 * 4,
                scratch=cuda_state.argmax_scratch_floats(argmax, logits),
            )
        )
        for n, head, span, limit in ((4, 512, 0, CONTEXT_ROWS), (16, 256, 1024, 1040)):
            for context, kv in itertools.product(CONTEXTS, CACHES):
                found.append(attention(bound, n, head, span, limit, context, kv))
    x64 = TensorType((Sym("T", 64), 5376))
    for outputs in (5376, 21504):
        w, out = TensorType((outputs, 5376), "q4_0", "plain"), TensorType((Sym("T", 64), outputs))
        add(f"linear f32 {outputs}x5376 T=64", scheduled, Linear(), x64, w, out, rows=64)
    return found


def attention(
    bound: int, n: int, head: int, span: int, limit: int, context: int, kv: str = "f16"
) -> Bench:
    """One layer at a context length; `bytes` are those of the keys and values it must read."""
    q, at = TensorType((Sym("T", bound), 32 * head)), TensorType((Sym("T", bound),), "i32")
    plane, out = TensorType((n, limit, head), kv), TensorType(q.shape, "a8")
    op, types = Attention(1.0, span), (q, at, plane, plane, out)
    seen = min(context, span + bound - 1) if span else context
    return Bench(
        f"attention {'window' if span else 'global'} {kv} T={bound} context={context}",
        cuda_attention.attention_launches(op, ARCH, *types),
        types,
        bound,
        2 * n * seen * plane.row_bytes,
        tuple(context - bound + 1 + t for t in range(bound)),
        cuda_attention.attention_scratch_floats(op, ARCH, *types),
        (2, 3),
    )


def room(type: TensorType) -> int:
    """Bytes of an operand: of a value, those of four partial planes of whole tiles."""
    if not isinstance(type.shape[0], Sym):
        return type.nbytes
    rows, *shape = type.max_shape
    return 4 * 4 * -(-rows // 8) * 8 * int(np.prod(shape, dtype=int))


def measure(gpu: Gpu, stream: Stream, bench: Bench) -> float:
    """Microseconds of one application, from a graph of many."""
    sizes = [room(type) for type in bench.types]
    turning = sum(sizes[i] for i in bench.rotate)
    copies = min(REPEATS, ROTATION_BYTES // turning + 1) if turning else 1
    held = [
        [check(driver.cuMemAlloc(size)) for _ in range(copies if i in bench.rotate else 1)]
        for i, size in enumerate(sizes)
    ]
    held.append([check(driver.cuMemAlloc(4 * bench.scratch + 4))])
    for i, copies_of in enumerate(held):
        for address in copies_of:
            size = sizes[i] if i < len(sizes) else 4 * bench.scratch + 4
            check(driver.cuMemsetD8(address, 0, size))
    if bench.ends:
        ends = np.array(bench.ends, np.int32)
        check(driver.cuMemcpyHtoD(held[1][0], ends.ctypes.data, ends.nbytes))

    functions = []
    for number, launch in enumerate(bench.launches):
        symbol, source = rendered(launch, f"bench_{number}")
        if symbol not in gpu.functions:
            module = check(driver.cuModuleLoadData(compile_cuda(source, symbol, ARCH)))
            function = check(driver.cuModuleGetFunction(module, symbol.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, launch.shared_bytes))
            gpu.functions[symbol] = function
        functions.append(gpu.functions[symbol])

    kernels = []
    for repeat in range(REPEATS):
        pointers = [int(h[repeat % len(h)]) for h in held]
        for launch, function in zip(bench.launches, functions, strict=True):
            grid = tuple(gpu.multiprocessors if g == "sms" else int(g) for g in launch.grid)
            shape = LaunchShape(grid, launch.block, launch.shared_bytes, launch.early)  # type: ignore[arg-type]
            kernels.append(Kernel(function, bench.name, shape, pointers))

    def enqueue() -> None:
        for kernel in kernels:
            kernel.launch(stream, bench.rows)

    graph = stream.capture(enqueue)
    times = []
    for _ in range(7):
        start, end = Event(), Event()
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        times.append(end.since(start) / REPEATS * 1e6)
    for copies_of in held:
        for address in copies_of:
            check(driver.cuMemFree(address))
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only kernels whose name holds one of these")
    names = parser.parse_args().names
    gpu, stream = Gpu(), Stream()
    lines = []
    for bench in benches():
        if names and not any(name in bench.name for name in names):
            continue
        time = measure(gpu, stream, bench)
        speed = bench.bytes / time / 1e3
        share = f"{speed:7.0f} GB/s {100 * speed / PEAK:4.0f}%" if bench.bytes else ""
        lines.append(f"{bench.name:44} {time:8.2f} us {share}")
        print(lines[-1], flush=True)
    print(f"\n{len(lines)} kernels, median of 7 graphs of {REPEATS}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()

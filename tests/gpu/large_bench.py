"""A large spec on synthetic weights: steps and rounds beside the bytes they must move.

usage: python tests/gpu/large_bench.py ARTIFACT TARGET.gguf DRAFT.gguf [CONTEXT ...]

The weights mean nothing, so acceptance is forced: the drafts of a round are set to what the target
will choose (all right) or to something else (all wrong). Prints a table; times are medians.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from memra_runtime.artifact import load_manifest
from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.device.cuda import CudaDevice
from memra_runtime.device.cuda_driver import Event, Graph, Kernel
from memra_runtime.model import bind_source, weight_data
from memra_runtime.session import Policy, Session

BANDWIDTH = 4290e9


def load(artifact: Path, target: Path, draft: Path) -> CudaDevice:
    """The device, without the checks of a served model (the weights are synthetic)."""
    manifest = load_manifest(artifact)
    files = {"target": open_checkpoint(target), "draft": open_checkpoint(draft)}
    bindings = {source: bind_source(manifest, source, file) for source, file in files.items()}
    weights = [weight_data(entry, files, bindings) for entry in manifest.weights]
    return CudaDevice(manifest, artifact, weights)


def weight_bytes(device: CudaDevice, source: str) -> int:
    """Bytes of all weights of a model that a step reads: everything but the other's."""
    return sum(w.device_bytes for w in device.manifest.weights if w.source == source)


def fill_caches(device: CudaDevice) -> None:
    """Put small finite numbers into every cache row: timing on zeros would flatter."""
    rng = np.random.default_rng(0)
    for plane in device.manifest.planes:
        if plane.rollback == "truncate":
            size = int(np.prod(plane.shape))
            device.upload(plane, rng.normal(0, 0.1, size).astype(np.float16).reshape(plane.shape))


def timed(device: CudaDevice, sequence: str, position: int, depth: int, repeats: int) -> float:
    """Median seconds of launching `sequence` at a position, each launch from the same state."""
    spent = []
    for i in range(repeats + 3):
        device.put({"position": position, "depth": depth, "accepted": 0})
        start = time.perf_counter()
        device.launch(sequence)
        if i >= 3:
            spent.append(time.perf_counter() - start)
    return float(np.median(spent))


def main(artifact: Path, target: Path, draft: Path, contexts: list[int]) -> None:
    """Load, time and print."""
    start = time.perf_counter()
    device = load(artifact, target, draft)
    print(
        f"loaded in {time.perf_counter() - start:.1f} s: {device.memory() / 1e9:.2f} GB on the GPU"
    )
    step, chain = (weight_bytes(device, s) for s in ("target", "draft"))
    print(f"floor: plain {step / BANDWIDTH * 1e3:.2f} ms ({step / 1e9:.2f} GB), "
          f"draft step {chain / BANDWIDTH * 1e3:.3f} ms ({chain / 1e9:.3f} GB)")  # fmt: skip
    session = Session(device, Policy.of(device.manifest))
    cap = session.policy.cap
    ids = [2, *range(100, 163)]
    session.prime(ids, 8)
    start = time.perf_counter()
    session.prime(ids * 8, 8)
    print(f"prompt: {512 / (time.perf_counter() - start):.0f} tok/s over 512 tokens")
    session.prime(ids, 64)
    plain = []
    for _ in range(24):
        plain += session.step("plain")
    fill_caches(device)
    rows = []
    for context in contexts:
        one = timed(device, "plain", context, 0, 20)
        rounds = {k: timed(device, "round", context, k, 20) for k in sorted({0, 1, 3, cap})}
        rows.append((context, one, rounds))
    print("context  plain ms  of floor   tok/s   round ms at depth: " + "  ".join(
        f"{k:>12}" for k in rows[0][2]))  # fmt: skip
    for context, one, rounds in rows:
        floor = step / BANDWIDTH
        cells = "  ".join(f"{t * 1e3:6.2f} {t / one:4.2f}x" for t in rounds.values())
        print(f"{context:7d}  {one * 1e3:8.3f}  {floor / one:7.1%}  {1 / one:6.1f}   {cells}")
    forced_rounds(session, ids, plain, cap)
    phases(device, contexts[0], cap)
    device.put({"position": contexts[0], "depth": cap, "rows": cap + 1, "step": 0})
    kernels(device, "plain_step", 1)
    kernels(device, "verify", cap + 1)
    kernels(device, "draft", 1)


def forced_rounds(session: Session, ids: list[int], plain: list[int], cap: int) -> None:
    """Time rounds whose drafts are all right, and all wrong; the text must be the plain one."""
    device = session.device
    for name, shift in (("all right", 0), ("all wrong", 1)):
        session = Session(device, session.policy.fixed(cap))
        session.prime(ids, 64)
        forced = np.full(device.plane("forced").shape, -1, np.int32)
        right = np.array(plain[1:], np.int32)
        forced[len(ids) + 1 : len(ids) + len(plain)] = right + shift
        device.plane("forced")[:] = forced
        produced, spent, accepted = [], [], []
        while len(produced) + cap + 1 < len(plain):
            start = time.perf_counter()
            produced += session.step("round")
            spent.append(time.perf_counter() - start)
            accepted.append(device.get("accepted"))
        same = produced == plain[: len(produced)]
        text = "equal" if same else "DIFFERS"
        print(f"forced {name}: accepted {np.mean(accepted):.2f} a round, "
              f"{np.median(spent) * 1e3:.2f} ms a round, text {text}")  # fmt: skip


def phases(device: CudaDevice, position: int, cap: int) -> None:
    """Time the programs of a round one by one (each with its own wait)."""
    device.put({"position": position, "depth": cap})
    for program in ("begin", "draft", "verify", "accept", "rollback", "commit", "adapt"):
        spent = []
        for _ in range(12):
            device.put({"position": position, "depth": cap, "rows": cap + 1, "step": 0,
                        "drafted": cap, "accepted": 0})  # fmt: skip
            start = time.perf_counter()
            device.launch(f"run_{program}")
            spent.append(time.perf_counter() - start)
        print(f"program {program:9s} {np.median(spent) * 1e3:8.3f} ms eager, "
              f"{len(device.manifest.launches[program])} launches")  # fmt: skip


def kernels(device: CudaDevice, program: str, rows: int) -> None:
    """Time each distinct kernel of a program: all its launches in one graph, in program order."""
    groups: dict[str, list[Kernel]] = {}
    for kernel in device.kernels(program):
        groups.setdefault(kernel.name, []).append(kernel)
    table = []
    for name, members in groups.items():
        graph = device.stream.capture(lambda m=members: launch_all(device, m, rows))
        table.append((run_graph(device, graph), len(members), name))
    total = run_graph(
        device, device.stream.capture(lambda: launch_all(device, device.kernels(program), rows))
    )
    print(f"{program} at {rows} rows: {total * 1e3:.3f} ms as one graph; by kernel, each alone:")
    for seconds, count, name in sorted(table, reverse=True):
        print(f"  {seconds * 1e3:7.3f} ms  {count:4d} x {seconds / count * 1e6:6.2f} us  {name}")
    print(f"  {sum(t for t, _, _ in table) * 1e3:7.3f} ms  sum")


def launch_all(device: CudaDevice, members: list[Kernel], rows: int) -> None:
    """Queue kernels in order."""
    for kernel in members:
        kernel.launch(device.stream, rows)


def run_graph(device: CudaDevice, graph: Graph) -> float:
    """Median seconds of nine launches."""
    start, end = Event(), Event()
    spent = []
    for _ in range(9):
        start.record(device.stream)
        graph.launch(device.stream)
        end.record(device.stream)
        spent.append(end.since(start))
    return float(np.median(spent))


if __name__ == "__main__":
    artifact, target, draft = map(Path, sys.argv[1:4])
    main(artifact, target, draft, [int(c) for c in sys.argv[4:]] or [64, 1736, 16384])

"""The end of a pass of a burst: does another round follow?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Operand, Sample, op
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import Buffer, Kernel
from memra_compiler.ops.state import STATE, StateOp, random_state
from memra_runtime.artifact import slot


@op("again")
@dataclass(frozen=True)
class Again(StateOp):
    """Decide whether a burst runs another round: sets the counter `more` to 1 or 0.

    It goes on while fewer than `burst_end` tokens are in the ring, no end of sequence was met, the
    context has room for one more row and the logits were finite (`pending` >= 0). On CUDA it also
    sets the conditions of the graph's nodes: whether to go on, and the depth of the next round.
    """

    operands = (Operand("state", "@", "update"),)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return ()

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        (state,) = arrays
        at = {name: int(state[slot(name)]) for name in _READ}
        state[slot("more")] = int(
            at["ring_count"] < at["burst_end"]
            and not at["ended"]
            and at["position"] < at["capacity"]
            and at["pending"] >= 0
        )
        return ()

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        (state,) = buffers
        at = {name: k.let(self.get(k, state, name)) for name in _READ}
        self.put(k, state, "more", 0)
        wanted = k.both(at["ring_count"] < at["burst_end"], at["ended"] == 0)
        possible = k.both(at["position"] < at["capacity"], at["pending"] >= 0)
        with k.when(k.both(wanted, possible)):
            self.put(k, state, "more", 1)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_state import again_launches

        return again_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        base = {"ring_count": 5, "burst_end": 9, "position": 40, "capacity": 41, "pending": 3}
        stops: tuple[dict[str, int], ...] = (
            {},
            {"ring_count": 9},
            {"ended": 1},
            {"position": 41},
            {"pending": -1},
        )
        return [Sample((STATE,), values=(random_state(more=1, **base | stop),)) for stop in stops]


_READ = ("ring_count", "burst_end", "ended", "position", "capacity", "pending")

"""Compose programs into sequences, the units of launch."""

from __future__ import annotations

from dataclasses import replace

from memra_compiler.ir.graph import Call, Module, Sequence
from memra_compiler.ops.chain import Begin
from memra_compiler.passes.plant_faults import faults_of

#: A round: the chain runs as many draft steps as the counter `drafted` says.
ROUND = (
    Call("begin"),
    Call("draft", "drafted"),
    Call("verify"),
    Call("accept"),
    Call("rollback"),
    Call("commit"),
    Call("adapt"),
)
#: A plain step is a round without drafts; `prime` also sets the depth of a fresh session.
_PLAIN = ("begin_plain", "plain_step", "accept", "rollback", "commit")

SEQUENCES = {
    "prefill": (Call("prefill"),),
    "prime": (*map(Call, _PLAIN), Call("adapt_fresh")),
    "plain": (*map(Call, _PLAIN), Call("adapt")),
    "round": ROUND,
}
#: Bursts: a sequence again and again, until there are tokens enough or no more can be had.
BURSTS = ("plain", "round")


def plan_launches(module: Module) -> Module:
    """Add the sequences, their bursts, and a round with each planted fault: `round_fault_FAULT`."""
    planned = {**SEQUENCES, "round": _round_of(module)}
    sequences = {name: Sequence(name, calls) for name, calls in planned.items()}
    for name in BURSTS:
        burst = Sequence(f"{name}_burst", (*planned[name], Call("again")), loop="more")
        sequences[burst.name] = burst
    for fault, program in faults_of(module).items():
        broken = program.name.removesuffix(f"_fault_{fault}")
        calls = tuple(
            replace(call, program=program.name) if call.program == broken else call
            for call in planned["round"]
        )
        name = f"round_fault_{fault}"
        sequences[name] = Sequence(name, calls)
    return replace(module, sequences=sequences)


def _round_of(module: Module) -> tuple[Call, ...]:
    """The calls of a round: where a chain may be cut, its length is looked at step by step."""
    nodes = module.programs["begin"].nodes
    cuts = any(isinstance(node.op, Begin) and node.op.cuts for node in nodes)
    return tuple(replace(call, live=cuts) if call.repeat else call for call in ROUND)

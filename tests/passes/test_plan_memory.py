"""plan_memory: no two live buffers overlap, and an output never lies on an operand of its node."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pass_support import ALL_SPECS, Golden, read, stages, write

from memra_compiler.compile import CompileOptions, load
from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Module, Program
from memra_compiler.passes.pipeline import run_passes
from memra_compiler.passes.plan_memory import ALIGN, first_fit, plan_memory
from memra_compiler.rounds.programs import ROUND_ROWS, build_module
from memra_runtime.errors import MemraError

BEFORE = """\
module toy
weight $w : f32[32, 32] from target "w"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
program p rows T<=2 from rows results %b {
  %ids : i32[T<=2] = read_tokens(@batch, @state) {chain = False, limit = 2} label "ids"
  %x : f32[T<=2, 32] = embed(%ids, $w) {scale = 1.0} label "x"
  %a : f32[T<=2, 32] = add(%x, %x) label "a"
  %b : f32[T<=2, 32] = add(%a, %a) label "b"
  %c : f32[T<=2, 32] = linear(%a, $w) label "c"
  %d : f32[T<=2, 32] = add(%c, %a) label "d"
}
program q rows T<=1 {
  %ids : i32[T<=1] = read_tokens(@batch, @state) {chain = False, limit = 1} label "ids"
}
"""


def test_buffers_are_placed_and_reused(golden: Golden) -> None:
    text = write(plan_memory(read(BEFORE)))
    # without the last line, the size: it holds the scratch that kernels happen to want
    golden("passes/plan_memory.mir", text[text.index("arena") : text.index("arena bytes")])


Span = tuple[int, int]


def live_spans(module: Module, program: Program) -> Iterator[tuple[int, dict[str, Span]]]:
    """For each node, every buffer that holds something while it runs: values, planes, scratch.

    A value lives from the node that makes it to its last reader, or to the end if it is a result.
    """
    planes = {
        f"@{n}": (module.arena[f"@{n}"], module.arena[f"@{n}"] + p.type.nbytes)
        for n, p in module.planes.items()
    }
    lives: dict[str, list[int]] = {}
    for i, node in enumerate(program.nodes):
        for operand in (*node.inputs, *(f"%{name}" for name in node.outputs)):
            if operand.startswith("%"):
                lives.setdefault(operand, []).append(i)
    for name in program.results:
        lives[f"%{name}"].append(len(program.nodes))
    for i, node in enumerate(program.nodes):
        spans = dict(planes)
        for operand, uses in lives.items():
            if uses[0] <= i <= uses[-1]:
                at = module.arena[f"{program.name}/{operand}"]
                spans[operand] = (at, at + program.values[operand[1:]].nbytes)
        scratch = 4 * node.op.scratch_floats(*module.operand_types(program, node))
        if scratch:
            at = module.arena[f"{program.name}/%"]
            spans["%"] = (at, at + scratch)
        yield i, spans


def check_plan(module: Module) -> None:
    size = module.arena[""]
    assert all(offset % ALIGN == 0 for offset in module.arena.values())
    for program in module.programs.values():
        for i, spans in live_spans(module, program):
            taken = sorted((start, end, name) for name, (start, end) in spans.items())
            place = f"{program.name}, {program.nodes[i].label}"
            assert all(0 <= start <= end <= size for start, end, _ in taken), place
            for (_, end, one), (start, _, other) in itertools.pairwise(taken):
                assert end <= start, f"{place}: {one} and {other} overlap"


@pytest.mark.parametrize("path", ALL_SPECS, ids=lambda p: p.stem)
def test_no_live_buffers_overlap_in_a_spec(path: Path) -> None:
    check_plan(stages(path)["plan_launches"])


@pytest.mark.parametrize("moved", ["p/%a", "p/%c", "p/%"])
def test_check_turns_red_on_an_overlap(moved: str) -> None:
    module = plan_memory(read(BEFORE))
    arena = {**module.arena, moved: module.arena["p/%x"]}
    if moved == "p/%":  # scratch on a value that its node reads
        arena[moved] = module.arena["p/%a"]
    with pytest.raises(AssertionError, match="overlap"):
        check_plan(replace(module, arena=arena))


def random_module(seed: int) -> Module:
    """Programs of random additions and projections over values of several widths."""
    rng = np.random.default_rng(seed)
    lines = ['module toy', 'plane @state : i32[64] rollback none',
             'plane @batch : i32[16] rollback none']  # fmt: skip
    widths = (32, 64, 96, 256)
    for a in widths:
        lines.append(f'weight $t{a} : f32[8, {a}] from target "t{a}"')
        lines += [f'weight $w{a}x{b} : f32[{b}, {a}] from target "w{a}x{b}"' for b in widths]
    for number in range(3):
        rows = int(rng.integers(1, 17))
        type = f"f32[T<={rows}, {{}}]"
        body = [f"%ids : i32[T<={rows}] = read_tokens(@batch, @state) "
                f'{{chain = False, limit = {rows}}} label "ids"']  # fmt: skip
        made: list[tuple[str, int]] = []
        for i in range(int(rng.integers(3, 24))):
            kind = rng.integers(3) if made else 0
            name, label = f"v{i}", f'label "v{i}"'
            if kind == 0:
                a = int(rng.choice(widths))
                op = f"embed(%ids, $t{a}) {{scale = 1.0}}"
            else:
                x, a = made[rng.integers(len(made))]
                if kind == 1:
                    alike = [n for n, w in made if w == a]
                    op = f"add(%{x}, %{alike[rng.integers(len(alike))]})"
                else:
                    b = int(rng.choice(widths))
                    op, a = f"linear(%{x}, $w{a}x{b})", b
            body.append(f"%{name} : {type.format(a)} = {op} {label}")
            made.append((name, a))
        kept = " ".join(f"%{made[k][0]}" for k in set(rng.integers(0, len(made), 2).tolist()))
        lines += [f"program p{number} rows T<={rows} from rows results {kept} {{", *body, "}"]
    return read("\n".join(lines))


@pytest.mark.parametrize("seed", range(40))
def test_no_live_buffers_overlap_in_random_programs(seed: int) -> None:
    check_plan(plan_memory(random_module(seed)))


def test_memory_is_reused() -> None:
    """Sixty layers take no more scratch than a few: the plan is by liveness."""
    module = stages(ALL_SPECS[-1])["plan_memory"]
    for program in module.programs.values():
        total = sum(t.nbytes for t in program.values.values())
        if len(program.nodes) > 50:
            ends = [module.arena[f"{program.name}/%{n}"] + t.nbytes
                    for n, t in program.values.items()]  # fmt: skip
            planes = max(module.arena[f"@{n}"] + p.type.nbytes for n, p in module.planes.items())
            assert max(ends) - planes < total / 3


@pytest.mark.parametrize(
    ("taken", "length", "at"),
    [
        ([], 64, 0),
        ([(0, 64)], 64, 64),
        ([(64, 64)], 64, 0),
        ([(64, 64)], 128, 128),
        ([(128, 64), (0, 64)], 64, 64),
        ([(0, 256), (64, 64)], 64, 256),
    ],
)
def test_first_fit(taken: list[tuple[int, int]], length: int, at: int) -> None:
    assert first_fit(taken, length) == at


@pytest.mark.parametrize("path", ALL_SPECS, ids=lambda p: p.stem)
@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_ring_holds_the_window_and_a_round_and_no_more(path: Path, target: str) -> None:
    """Else a rejected row would overwrite one that is still visible after the rollback."""
    module = stages(path)["plan_launches"]
    if target != "cpu":
        built = build_module(*load(path, CompileOptions()), target=target)
        module = run_passes(built, until="fuse")
    context = module.planes["forced"].type.elements - 1
    widest = module.programs["verify"].rows.bound
    rings, moved = 0, set()
    for program, node in module.nodes():
        for operand in node.inputs:
            plane = module.planes.get(operand[1:]) if operand.startswith("@") else None
            if plane is None or not plane.kind:
                continue
            rows = plane.type.max_shape[1]
            assert plane.rollback == "truncate"
            assert plane.ring == (rows < context)
            if node.op.name == "kv_move":
                moved.add((program.name, plane.name))
            elif plane.ring and node.op.name == "attention":
                span, step = node.op.attrs()["span"], program.rows.bound
                chunked = len(node.inputs) == 6
                assert span > 0
                assert chunked == (target != "cpu" and program.name == "prefill")
                assert rows >= span + max(widest, 0 if chunked else step)
                assert rows <= span + 1 + max(widest, ROUND_ROWS)  # a drafter sees one row less
                rings += 1
    assert rings
    owned = {p.name for p in module.planes.values() if p.ring}
    assert moved == ({("prefill", name) for name in owned} if target != "cpu" else set())


RING = """\
module toy
weight $t : f32[64, 64] from target "t"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @target.layers.0.k : f16[1, ROWS, 64] rollback truncate ring kind swa
plane @target.layers.0.v : f16[1, ROWS, 64] rollback truncate ring kind swa
plane @chunk.k : f16[1, 6, 64] rollback none
plane @chunk.v : f16[1, 6, 64] rollback none
program prefill rows T<=6 from rows {
  %ids : i32[T<=6] = read_tokens(@batch, @state) {chain = False, limit = 6} label "ids"
  %ends : i32[T<=6] = positions(@state) {kind = "ends", limit = 6} label "ends"
  %q : f32[T<=6, 64] = embed(%ids, $t) {scale = 1.0} label "q"
  %y : f32[T<=6, 64] = attention(%q, %ends, @target.layers.0.k, @target.layers.0.vCHUNK) \
{scale = 1.0, span = 20, to = "f32"} label "y"
}
"""


def test_a_step_that_a_ring_has_no_room_for_needs_chunk_planes() -> None:
    """As a layer would that reads another's cache in a prompt: its rows are not to be had."""
    chunk = ", @chunk.k, @chunk.v"
    for rows, planes in ((26, ""), (20, chunk)):
        plan_memory(read(RING.replace("ROWS", str(rows)).replace("CHUNK", planes)))
    short = read(RING.replace("ROWS", "25").replace("CHUNK", ""))
    with pytest.raises(MemraError, match=r"`y` sees 20 rows .* in steps of 6 rows: `prefill`"):
        plan_memory(short)


@pytest.mark.parametrize(
    ("planes", "why"),
    [
        (", @chunk.k", "takes 4 operands or 6, got 5"),
        (", @chunk.k, @state", "holds other rows than cache"),
    ],
)
def test_chunk_planes_must_fit(planes: str, why: str) -> None:
    with pytest.raises(IRError, match=why):
        read(RING.replace("ROWS", "25").replace("CHUNK", planes))

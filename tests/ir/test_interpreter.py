"""The interpreter: what it refuses, what a plane rounds, and sequences by counters."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from ir_support import read, toy

from memra_compiler.interpret import Interpreter, make_weight
from memra_compiler.ir.errors import IRError
from memra_compiler.ir.graph import Call, Module, Sequence
from memra_compiler.ops.kv_rows import cache_values
from memra_runtime.artifact import slot

IDS = '%ids : i32[T<=4] = read_tokens(@batch, @state) {limit = 4} label "ids"\n'
X = '%x : f32[T<=4, 32] = embed(%ids, $w) {scale = 1.0} label "x"\n'
AT = '%at : i32[T<=4] = positions(@state) {kind = "rows", limit = 4} label "at"\n'
APPEND = IDS + X + AT + 'kv_append(%x, %x, %at, @k, @v) label "append"\nadvance(@state) label "n"'


def machine(module: Module) -> Interpreter:
    rng = np.random.default_rng(1)
    weights = {w.name: rng.standard_normal(w.type.max_shape) for w in module.weights.values()}
    return Interpreter(module, weights)


def test_values_and_planes_can_be_read() -> None:
    run = machine(toy(APPEND))
    run.planes["batch"][:3] = [4, 2, 4]
    run.put(rows=3, position=23)
    run.run("p")
    x = run.values["p"]["x"]
    assert x.dtype == np.float64
    assert (x == run.weights["w"][[4, 2, 4]]).all()
    assert (run.planes["k"][0, [23, 0, 1]] == x).all()  # 24 rows: a ring
    assert run.counter("position") == 26


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_plane_rounds_what_is_stored(dtype: str) -> None:
    module = toy(APPEND)
    planes = {
        name: replace(p, type=replace(p.type, dtype=dtype)) if name in "kv" else p
        for name, p in module.planes.items()
    }
    run = machine(replace(module, planes=planes))
    run.put(rows=1)
    run.run("p")
    kept, exact = run.planes["k"][0, 0], run.values["p"]["x"][0]
    assert kept.dtype == {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    assert (kept == exact.astype(kept.dtype)).all()
    assert (kept.astype(np.float64) != exact).any()


def test_plane_of_8_bits_holds_bytes() -> None:
    module = toy(APPEND)
    planes = {
        name: replace(p, type=replace(p.type, dtype="q8_0_rows")) if name in "kv" else p
        for name, p in module.planes.items()
    }
    run = machine(replace(module, planes=planes))
    run.put(rows=1)
    run.run("p")
    kept, exact = run.planes["k"], run.values["p"]["x"][0]
    assert (kept.shape, kept.dtype) == ((1, 24, 48), np.uint8)
    got = cache_values(kept)[0, 0]
    assert 0 < np.abs(got - exact).max() <= np.abs(exact).max() / 200


def test_live_counter_is_read_before_each_run() -> None:
    """Two doubtful drafts in a chain of four: the second, which is not the first, ends it."""
    weigh = (
        '%c : i32[T<=4] = argmax(%x) {suppress = ()} label "c"\n'
        '%p : f32[T<=4] = confidence(%x, %c) label "p"\n'
        'weigh_draft(%p, @state) label "weigh"'
    )
    module = toy(IDS + X + weigh)
    steps = Sequence("steps", (Call("p", "drafted", live=True),))
    run = machine(replace(module, sequences={"steps": steps}))
    run.weights["w"][:] = 0.25  # no choice is better than another: each has 1/32
    run.put(drafted=4, rows=1, step=2, doubt=int(np.float32(0.5).view(np.int32)))
    run.run("steps")
    assert (run.counter("drafted"), run.counter("rows"), run.counter("cuts")) == (2, 3, 1)


def test_sequence_repeats_by_a_counter_read_once() -> None:
    module = toy('advance(@state) label "n"')
    steps = Sequence("steps", (Call("p", "drafted"), Call("p")))
    run = machine(replace(module, sequences={"steps": steps}))
    run.put(drafted=4, rows=2)
    run.run("steps")
    assert run.planes["state"][slot("position")] == 10


def test_sequence_loops_while_a_counter_is_not_zero() -> None:
    module = toy('advance(@state) label "n"\nagain(@state) label "again"')
    run = machine(replace(module, sequences={"s": Sequence("s", (Call("p"),), "more")}))
    run.put(rows=2, capacity=9, burst_end=1)
    run.run("s")
    assert run.planes["state"][slot("position")] == 10  # the first that is not below 9


def test_open_reference_is_refused() -> None:
    line = '%y : f32[T<=4, 32] = linear(%x, ?later) label "y"'
    with pytest.raises(IRError, match="open references:\n  program p, y: \\?later"):
        machine(toy(IDS + X + line))


def test_weights_are_checked() -> None:
    module = toy(IDS + X)
    with pytest.raises(IRError, match=r"weight \$w is f32\[32, 32\], given none"):
        Interpreter(module, {})
    with pytest.raises(IRError, match=r"given \(32, 16\)"):
        Interpreter(module, {"w": np.zeros((32, 16)), "n": np.zeros(32)})


def test_more_rows_than_a_program_is_for_are_refused() -> None:
    run = machine(toy(APPEND))
    run.put(rows=5)
    with pytest.raises(IRError, match="program p is for T<=4 rows, asked for 5"):
        run.run("p")


def test_unknown_name_is_refused() -> None:
    with pytest.raises(IRError, match="has no sequence and no program q"):
        machine(toy(IDS)).run("q")


def test_recipes() -> None:
    text = "weight $f : f32[8] from target \"rope_freqs.weight\" made ('rope_factors', 2)"
    weight = read(text).weights["f"]
    assert make_weight(weight).tolist() == [1, 1] + [1e30] * 6
    with pytest.raises(IRError, match=r"\$f: unknown recipe guess"):
        make_weight(replace(weight, made=("guess",)))

"""fuse: each rewrite alone, where it must not apply, and that the meaning stays."""

from __future__ import annotations

import numpy as np
import pytest
from pass_support import TINY, Golden, interpreter, read, stages, write

from memra_compiler.interpret import Interpreter
from memra_compiler.ir.graph import Module
from memra_compiler.passes.fuse import fuse
from memra_compiler.passes.plan_launches import plan_launches
from memra_compiler.passes.plant_faults import plant_faults
from memra_runtime.artifact import slot

HEAD = """\
module toy
weight $table : f32[16, 64] from target "table"
weight $a : f32[64, 64] from target "a"
weight $b : f32[32, 64] from target "b"
weight $wide : f32[128, 64] from target "wide"
weight $norm : f32[64] from target "norm"
weight $head_norm : f32[32] from target "head_norm"
weight $one : f32[1] from target "one"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @k : f32[2, 24, 32] rollback truncate kind swa
plane @v : f32[2, 24, 32] rollback truncate kind swa
program p rows T<=3 from rows results RESULTS {
  %ids : i32[T<=3] = read_tokens(@batch, @state) {chain = False, limit = 3} label "a.ids"
  %at : i32[T<=3] = positions(@state) {kind = 'rows', limit = 3} label "a.at"
  %angles : f32[T<=3, 2, 16] = rope_angles(%at) {head_dim = 32, base = 10000.0, rotated = 16} label "a.angles"
  %x : f32[T<=3, 64] = embed(%ids, $table) {scale = 1.0} label "a.x"
"""  # noqa: E501


def toy(nodes: str, *results: str) -> Module:
    """A module of one program whose nodes follow token ids, positions, angles and `%x`."""
    text = HEAD.replace("RESULTS", " ".join(f"%{name}" for name in results))
    return read(text + nodes + "}\n")


#: One pattern each, and the results that must keep their values.
PATTERNS = {
    "group_linears": (
        """\
  %q : f32[T<=3, 64] = linear(%x, $a) label "layers.0.q" at "toy.yaml":5:1
  %k : f32[T<=3, 32] = linear(%x, $b) label "layers.0.k"
  %v : f32[T<=3, 32] = linear(%x, $b) label "layers.0.v"
  %other : f32[T<=3, 64] = linear(%x, $a) label "layers.1.q"
""",
        ("q", "k", "v", "other"),
    ),
    "gated_linear": (
        """\
  %gate : f32[T<=3, 128] = linear(%x, $wide) label "layers.0.gate"
  %up : f32[T<=3, 128] = linear(%x, $wide) label "layers.0.up"
  %act : f32[T<=3, 128] = gate_mul(%gate, %up) {act = 'silu'} label "layers.0.act" at "toy.yaml":6:1
""",
        ("act",),
    ),
    "norm_rope": (
        """\
  %q_norm : f32[T<=3, 64] = rmsnorm(%x, $head_norm) {eps = 1e-05, size = 32} label "layers.0.q_norm"
  %q : f32[T<=3, 64] = rope(%q_norm, %angles) label "layers.0.q_rope"
""",
        ("q",),
    ),
    "norm_rope_append": (
        """\
  %k_norm : f32[T<=3, 64] = rmsnorm(%x, $head_norm) {eps = 1e-06, size = 32} label "layers.0.k_norm"
  %k : f32[T<=3, 64] = rope(%k_norm, %angles) label "layers.0.k_rope"
  %v : f32[T<=3, 64] = rmsnorm(%x) {eps = 1e-06, size = 32} label "layers.0.v_norm"
  kv_append(%k, %v, %at, @k, @v) label "layers.0.append"
""",
        (),
    ),
    "norm_rope_append_raw_values": (
        """\
  %k_norm : f32[T<=3, 64] = rmsnorm(%x, $head_norm) {eps = 1e-06, size = 32} label "layers.0.k_norm"
  %k : f32[T<=3, 64] = rope(%k_norm, %angles) label "layers.0.k_rope"
  kv_append(%k, %x, %at, @k, @v) label "layers.0.append"
""",
        (),
    ),
    "norm_add": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "layers.0.norm"
  %y : f32[T<=3, 64] = add(%x, %n) label "layers.0.norm.add"
""",
        ("y",),
    ),
    "scaled_norm_add": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "layers.0.norm"
  %y : f32[T<=3, 64] = add(%x, %n) label "layers.0.norm.add"
  %z : f32[T<=3, 64] = scale(%y, $one) label "layers.0.out_scale"
""",
        ("z",),
    ),
    "branch_norms": (
        """\
  %z : f32[T<=3, 64] = scale(%x, $one) label "layers.0.z"
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "layers.0.post_1"
  %m : f32[T<=3, 64] = rmsnorm(%z, $norm) {eps = 1e-06, size = 0} label "layers.0.post_2"
  %f : f32[T<=3, 64] = add(%n, %m) label "layers.0.branches.add"
  %p : f32[T<=3, 64] = rmsnorm(%f, $norm) {eps = 1e-06, size = 0} label "layers.0.post"
  %u : f32[T<=3, 64] = add(%x, %p) label "layers.0.post.add"
  %o : f32[T<=3, 64] = scale(%u, $one) label "layers.0.out_scale"
  %a : f32[T<=3, 64] = rmsnorm(%o, $norm) {eps = 1e-06, size = 0} label "layers.1.attn_norm"
  %q : bf16[T<=3, 64] = quantise(%a) {to = 'bf16'} label "layers.1.q.in"
""",
        ("o", "q"),
    ),
    "residual_norms": (
        """\
  %p : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "layers.0.post"
  %u : f32[T<=3, 64] = add(%x, %p) label "layers.0.post.add"
  %a : f32[T<=3, 64] = rmsnorm(%u, $norm) {eps = 1e-06, size = 0} label "layers.0.ffn_norm"
  %q : bf16[T<=3, 64] = quantise(%a) {to = 'bf16'} label "layers.0.gate.in"
  %r : f32[T<=3, 64] = rmsnorm(%u, $norm) {eps = 1e-06, size = 0, factor = 0.125} label "layers.0.router_norm"
  %b : f32[T<=3, 64] = rmsnorm(%u, $norm) {eps = 1e-06, size = 0} label "layers.0.pre_2"
  %z : a8[T<=3, 64] = quantise(%b) label "layers.0.experts.in"
""",  # noqa: E501
        ("u", "q", "r", "z"),
    ),
    "drop_dead": (
        """\
  %unused : f32[T<=3, 64] = linear(%x, $a) label "layers.0.unused"
  %y : f32[T<=3, 64] = add(%x, %x) label "layers.0.y"
""",
        ("y",),
    ),
}


def outcome(module: Module, results: tuple[str, ...]) -> list[np.ndarray]:
    """Results and planes of `p` after running it on two rows."""
    machine = interpreter(module)
    machine.planes["batch"][:] = np.arange(16)
    machine.put(rows=2, position=5)
    machine.run("p")
    return [machine.values["p"][name] for name in results] + list(machine.planes.values())


@pytest.mark.parametrize("name", PATTERNS)
def test_rewrite(name: str, golden: Golden) -> None:
    nodes, results = PATTERNS[name]
    before = toy(nodes, *(results or ("x",)))
    after = fuse(before)
    text = write(after)
    golden(f"passes/fuse_{name}.mir", text[text.index("program") :])
    for got, want in zip(outcome(after, results), outcome(before, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


#: Patterns that look like the above but must be left alone: nodes, results, the ops that stay.
REFUSED = {
    "attention whose cache is written before its rows are rounded": (
        """\
  %ends : i32[T<=3] = positions(@state) {kind = 'ends', limit = 3} label "ends"
  %y : f32[T<=3, 64] = attention(%x, %ends, @k, @v) {scale = 1.0, span = 0, to = "f32"} label "y"
  %new : f32[T<=3, 64] = linear(%x, $a) label "new"
  kv_append(%new, %x, %at, @k, @v) label "append"
  %z : a8[T<=3, 64] = quantise(%y) {to = "a8"} label "z"
""",
        ("z",),
        ["attention", "linear", "kv_append", "quantise"],
    ),
    "a norm that is read twice": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "n"
  %y : f32[T<=3, 64] = add(%x, %n) label "y"
  %z : f32[T<=3, 64] = add(%y, %n) label "z"
""",
        ("z",),
        ["rmsnorm", "add", "add"],
    ),
    "a norm that is a result": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "n"
  %y : f32[T<=3, 64] = add(%x, %n) label "y"
""",
        ("n", "y"),
        ["rmsnorm", "add"],
    ),
    "a norm of each head, added": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $head_norm) {eps = 1e-06, size = 32} label "n"
  %y : f32[T<=3, 64] = add(%x, %n) label "y"
""",
        ("y",),
        ["rmsnorm", "add"],
    ),
    "a norm of the whole row, rotated by heads": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "n"
  %y : f32[T<=3, 64] = rope(%n, %angles) label "y"
""",
        ("y",),
        ["rmsnorm", "rope"],
    ),
    "a norm without a weight, rotated": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x) {eps = 1e-06, size = 32} label "n"
  %y : f32[T<=3, 64] = rope(%n, %angles) label "y"
""",
        ("y",),
        ["rmsnorm", "rope"],
    ),
    "values normed over the whole row": (
        """\
  %k_norm : f32[T<=3, 64] = rmsnorm(%x, $head_norm) {eps = 1e-06, size = 32} label "k_norm"
  %k : f32[T<=3, 64] = rope(%k_norm, %angles) label "k"
  %v : f32[T<=3, 64] = rmsnorm(%x) {eps = 1e-06, size = 0} label "v"
  kv_append(%k, %v, %at, @k, @v) label "append"
""",
        ("x",),
        ["norm_rope", "rmsnorm", "kv_append"],
    ),
    "values normed with another epsilon": (
        """\
  %k_norm : f32[T<=3, 64] = rmsnorm(%x, $head_norm) {eps = 1e-06, size = 32} label "k_norm"
  %k : f32[T<=3, 64] = rope(%k_norm, %angles) label "k"
  %v : f32[T<=3, 64] = rmsnorm(%x) {eps = 1e-05, size = 32} label "v"
  kv_append(%k, %v, %at, @k, @v) label "append"
""",
        ("x",),
        ["norm_rope", "rmsnorm", "kv_append"],
    ),
    "keys that attention also reads": (
        """\
  %k_norm : f32[T<=3, 64] = rmsnorm(%x, $head_norm) {eps = 1e-06, size = 32} label "k_norm"
  %k : f32[T<=3, 64] = rope(%k_norm, %angles) label "k"
  kv_append(%k, %x, %at, @k, @v) label "append"
""",
        ("k",),
        ["norm_rope", "kv_append"],
    ),
    "a gate and an up of different rows": (
        """\
  %y : f32[T<=3, 64] = add(%x, %x) label "y"
  %gate : f32[T<=3, 128] = linear(%x, $wide) label "gate"
  %up : f32[T<=3, 128] = linear(%y, $wide) label "up"
  %act : f32[T<=3, 128] = gate_mul(%gate, %up) {act = 'silu'} label "act"
""",
        ("act",),
        ["add", "linear", "linear", "gate_mul"],
    ),
    "a gate that is read elsewhere": (
        """\
  %gate : f32[T<=3, 128] = linear(%x, $wide) label "gate"
  %up : f32[T<=3, 128] = linear(%x, $wide) label "up"
  %act : f32[T<=3, 128] = gate_mul(%gate, %up) {act = 'silu'} label "act"
""",
        ("gate", "act"),
        ["linear", "linear", "gate_mul"],
    ),
    "linears of different layers": (
        """\
  %q : f32[T<=3, 64] = linear(%x, $a) label "layers.0.q"
  %k : f32[T<=3, 32] = linear(%x, $b) label "layers.1.k"
""",
        ("q", "k"),
        ["linear", "linear"],
    ),
    "a residual that is the norm": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "n"
  %y : f32[T<=3, 64] = add(%n, %x) label "y"
""",
        ("y",),
        ["rmsnorm", "add"],
    ),
    "the sum of two branches that something else reads": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "n"
  %m : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "m"
  %f : f32[T<=3, 64] = add(%n, %m) label "f"
  %p : f32[T<=3, 64] = rmsnorm(%f, $norm) {eps = 1e-06, size = 0} label "p"
  %y : f32[T<=3, 64] = add(%x, %p) label "y"
""",
        ("y", "f"),
        ["rmsnorm", "rmsnorm_add", "rmsnorm_add"],
    ),
    "one norm of the residual that is not rounded": (
        """\
  %p : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "p"
  %u : f32[T<=3, 64] = add(%x, %p) label "u"
  %a : f32[T<=3, 64] = rmsnorm(%u, $norm) {eps = 1e-06, size = 0} label "a"
""",
        ("u", "a"),
        ["rmsnorm_add", "rmsnorm"],
    ),
    "norms of the residual with another eps": (
        """\
  %p : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0} label "p"
  %u : f32[T<=3, 64] = add(%x, %p) label "u"
  %a : f32[T<=3, 64] = rmsnorm(%u, $norm) {eps = 1e-05, size = 0} label "a"
  %q : bf16[T<=3, 64] = quantise(%a) {to = 'bf16'} label "q"
""",
        ("u", "q"),
        ["rmsnorm_add", "rmsnorm_quantise"],
    ),
    "a norm times a factor": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0, factor = 0.125} label "n"
  %y : f32[T<=3, 64] = add(%x, %n) label "y"
""",
        ("y",),
        ["rmsnorm", "add"],
    ),
    "rows rounded after a norm times a factor": (
        """\
  %n : f32[T<=3, 64] = rmsnorm(%x, $norm) {eps = 1e-06, size = 0, factor = 0.125} label "n"
  %q : bf16[T<=3, 64] = quantise(%n) {to = 'bf16'} label "q"
""",
        ("q",),
        ["rmsnorm", "quantise"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pattern_is_left_alone(name: str) -> None:
    nodes, results, left = REFUSED[name]
    before = toy(nodes, *results)
    after = fuse(before)
    write(after)  # verifies
    shared = {"read_tokens", "positions", "rope_angles", "embed"}
    assert [n.op.name for _, n in after.nodes() if n.op.name not in shared] == left
    for got, want in zip(outcome(after, results), outcome(before, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_fusing_twice_changes_nothing() -> None:
    module = stages(TINY)["fuse"]
    assert fuse(module) == module


def rounds(module: Module) -> Interpreter:
    """The tiny module with random weights after a prompt, two rounds and a plain step."""
    machine = interpreter(plan_launches(plant_faults(module)))
    state = machine.planes["state"]
    state[:] = 0
    machine.planes["forced"][:] = -1
    machine.planes["eos"][:] = -1
    machine.put(capacity=64, depth_cap=4, depth_initial=3, rows=5)
    machine.planes["prompt"][:5] = [5, 900, 17, 4095, 3]
    machine.run("prefill")
    machine.put(pending=77)
    for sequence in ("prime", "round", "plain", "round"):
        machine.run(sequence)
    assert state[slot("rounds")] == 4
    assert machine.counter("position") >= 9
    return machine


def test_fused_tiny_module_means_the_same() -> None:
    plain, fused = (rounds(stages(TINY)[name]) for name in ("wire_drafter", "fuse"))
    for name, plane in plain.planes.items():
        np.testing.assert_allclose(fused.planes[name], plane, rtol=1e-9, atol=1e-12, err_msg=name)
    logits = "target.logits"
    for program in ("plain_step", "verify"):
        np.testing.assert_allclose(
            fused.values[program][logits], plain.values[program][logits], rtol=1e-9
        )


def test_fuse_leaves_few_nodes() -> None:
    """Every rewrite is seen in the real module: nothing of the layer is left in small parts."""
    names = {node.op.name for _, node in stages(TINY)["fuse"].nodes()}
    assert names.isdisjoint({"rope", "kv_append", "gate_mul", "add", "scale"})

"""A small module as text, and the ways the tests of the IR read one."""

from __future__ import annotations

from memra_compiler.ir.graph import Module
from memra_compiler.ir.text import parse_module
from memra_compiler.ops.base import discover

#: Uses every part of the text form: recipes, positions, layouts, tags, classes, kernels, faults.
FULL = """\
module toy

weight $target.embed : q8_0[64, 32] from target "token_embd.weight" "model.embed_tokens.weight"
weight $target.norm : f32[32] from target "output_norm.weight" at "toy.yaml":7:3
weight $draft.freqs : f32[16] from draft "rope_freqs.weight" made ('rope_factors', 4) at "a b.yaml":9:1
weight $draft.head : q8_0[16, 32] from draft "output.weight" of 64 rows at "toy.yaml":9:1
weight $target.exps : q8_0[64, 32] from target "blk.0.exps" made ('ones',) stacked 4 at "toy.yaml":8:1

plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @target.layers.0.k : f16[2, 24, 32] rollback truncate ring kind swa
plane @target.layers.0.v : f16[2, 24, 32] rollback truncate ring kind swa
plane @tiled : bf16[32] tiles rollback none

program verify rows T<=4 from rows results %logits {
  %ids : i32[T<=4] = read_tokens(@batch, @state) {chain = False, limit = 4} label "target.tokens" at "toy.yaml":3:1
  %x : f32[T<=4, 32] = embed(%ids, $target.embed) {scale = 5.656854249492381} label "target.embed"
  %y : f32[T<=4, 32] = rmsnorm(%x, $target.norm) {eps = 1e-06, size = 0, factor = 1.0} label "target.\\"norm\\"" class "f32 sum, \\"tree\\"" kernel "rmsnorm_1"
  %logits : f32[T<=4, 64] = linear(%y, $target.embed) label "target.head"
}

program empty rows T<=1 fault "planted" {
}

sequence round { verify * drafted; empty }
sequence cut { empty * at most drafted; empty }
sequence burst { verify; empty } while more

arena @state = 0
arena verify/%x = 256
arena verify/% = 1024
arena bytes = 2048
"""  # noqa: E501


def read(text: str) -> Module:
    """Parse a text with all ops known."""
    return parse_module(text, discover())


def toy(program: str, *, planes: str = "", weights: str = "") -> Module:
    """A module with one program `p` of at most four rows, whose nodes are the given lines."""
    head = f"module toy\n{weights}\n{planes}\n" + PLANES
    return read(f"{head}\nprogram p rows T<=4 from rows {{\n{program}\n}}\n")


PLANES = """\
weight $w : f32[32, 32] from target "w"
weight $n : f32[32] from target "n"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @rows : f32[16, 32] rollback none
plane @k : f32[1, 24, 32] rollback truncate
plane @v : f32[1, 24, 32] rollback truncate
"""

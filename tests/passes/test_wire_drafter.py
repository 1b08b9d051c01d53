"""wire_drafter: the drafter's other references become the target's table and hidden row."""

from __future__ import annotations

import re

import pytest
from pass_support import Golden, read, write

from memra_compiler.ir.errors import IRError
from memra_compiler.ir.verify import open_references
from memra_compiler.passes.wire_drafter import wire_drafter

BEFORE = """\
module toy
weight $target.embed : q8_0[64, 32] from target "token_embd.weight"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @hidden : f32[32] rollback none
plane @carry : f32[32] rollback none
program begin rows T<=1 {
  begin(@state, @batch, ?target.hidden_post_norm, @carry) {plain = False} label "round.begin"
}
program draft rows T<=1 {
  %token : i32[T<=1] = read_tokens(@batch, @state) {chain = True, limit = 1} label "drafter.token"
  %x : f32[T<=1, 32] = embed(%token, ?target.embed) {scale = 2.0} label "drafter.embed"
}
"""


def test_references_are_wired(golden: Golden) -> None:
    module = wire_drafter(read(BEFORE))
    assert open_references(module) == []
    golden("passes/wire_drafter.mir", write(module))


def test_reference_to_nothing_is_refused() -> None:
    """There is no pre-norm hidden to wire: feeding it to the drafter cannot be expressed."""
    text = BEFORE.replace("hidden_post_norm", "hidden_pre_norm")
    message = "nothing to wire to\n  program begin, round.begin: ?target.hidden_pre_norm"
    with pytest.raises(IRError, match=re.escape(message)):
        wire_drafter(read(text))

"""resolve_kv_targets: `?last_own(KIND)` becomes the last cache of that kind."""

from __future__ import annotations

import pytest
from pass_support import Golden, read, write

from memra_compiler.passes.resolve_kv_targets import cache_owners, resolve_kv_targets
from memra_runtime.errors import MemraError

BEFORE = """\
module toy
plane @state : i32[64] rollback none
plane @q : f32[64] rollback none
plane @target.layers.0.k : f32[2, 24, 32] rollback truncate ring kind swa
plane @target.layers.0.v : f32[2, 24, 32] rollback truncate ring kind swa
plane @target.layers.1.k : f32[1, 64, 64] rollback truncate kind full
plane @target.layers.1.v : f32[1, 64, 64] rollback truncate kind full
plane @target.layers.2.k : f32[2, 24, 32] rollback truncate ring kind swa
plane @target.layers.2.v : f32[2, 24, 32] rollback truncate ring kind swa
program draft rows T<=1 {
  %q : f32[T<=1, 64] = read_row(@q) label "drafter.q"
  %ends : i32[T<=1] = positions(@state) {kind = 'committed', limit = 1} label "drafter.ends"
  %a : f32[T<=1, 64] = attention(%q, %ends, ?last_own(swa).k, ?last_own(swa).v) {scale = 1.0, span = 15} label "drafter.layers.0.attention" at "toy.yaml":9:3
  %b : f32[T<=1, 64] = attention(%a, %ends, ?last_own(full).k, ?last_own(full).v) {scale = 1.0, span = 0} label "drafter.layers.1.attention" at "toy.yaml":12:3
}
"""  # noqa: E501


def test_reads_are_wired_to_the_last_owner_of_the_kind(golden: Golden) -> None:
    golden("passes/resolve_kv_targets.mir", write(resolve_kv_targets(read(BEFORE))))


def test_owners_are_in_layer_order() -> None:
    assert cache_owners(read(BEFORE), "swa") == ["target.layers.0", "target.layers.2"]


def test_kind_without_a_cache_is_refused() -> None:
    with pytest.raises(MemraError) as error:
        resolve_kv_targets(read(BEFORE.replace("last_own(full)", "last_own(moe)")))
    assert str(error.value) == (
        "error[kv-target]: no target layer of kind `moe` owns keys and values\n"
        "  --> toy.yaml:12:3\n"
        "hint: kinds with a cache: full, swa"
    )


def test_cache_that_does_not_fit_the_query_is_refused() -> None:
    wide = "f32[1, 64, 64]", "f32[1, 64, 48]"
    with pytest.raises(MemraError) as error:
        resolve_kv_targets(read(BEFORE.replace(*wide)))
    assert str(error.value) == (
        "error[kv-target]: `drafter.layers.1.attention` cannot read @target.layers.1.k, "
        "@target.layers.1.v: attention: rows f32[T<=1, 64] are not whole heads of 48\n"
        "  --> toy.yaml:12:3"
    )


def test_caches_of_a_drafter_are_no_target() -> None:
    text = BEFORE.replace("target.layers.1", "drafter.layers.1")
    with pytest.raises(MemraError, match="no target layer of kind `full`"):
        resolve_kv_targets(read(text))

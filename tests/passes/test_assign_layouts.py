"""assign_layouts: where CUDA puts things, and that no layout can change a verified row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pass_support import SPECS, TINY, read

from memra_compiler.compile import CompileOptions, load, lower
from memra_compiler.ir.errors import OpError
from memra_compiler.ir.graph import Module
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops import cuda_linear
from memra_compiler.ops.cuda import ARCHS, CudaArch, Scheduled
from memra_compiler.ops.cuda_linear import EmbedParams, Geometry, PlainParams, Work
from memra_compiler.ops.embed import Embed
from memra_compiler.ops.linear import PRODUCTS
from memra_compiler.passes.assign_layouts import assign_layouts
from memra_runtime.errors import MemraError

TEXT = """\
module toy
weight $t : q8_0[64, 8192] from target "t"
weight $w : q4_0[64, 8192] from target "w"
weight $odd : q4_0[24, 64] from target "odd"
weight $n : f32[64] from target "n"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @out : f32[16, 64] rollback none
program verify rows T<=LIMIT from rows {
  %ids : i32[T<=LIMIT] = read_tokens(@batch, @state) {chain = False, limit = LIMIT} label "ids"
  %x : f32[T<=LIMIT, 8192] = embed(%ids, $t) {scale = 1.0} label "x"
  %q : a8[T<=LIMIT, 8192] = quantise(%x) label "q"
  %a : f32[T<=LIMIT, 64] = linear(%q, $w) label "a"
  %b : f32[T<=LIMIT, 64] = rmsnorm(%a, $n) {eps = 1e-06, size = 0} label "b"
  %c : f32[T<=LIMIT, 64] = linear(%q, $w) label "c"
  write_rows(%c, @out) label "out"
  %d : a8[T<=LIMIT, 64] = quantise(%b) label "d"
  %e : f32[T<=LIMIT, 24] = linear(%d, $odd) label "e"
}
"""


def toy(target: str, rows: int = 6) -> Module:
    return assign_layouts(replace(read(TEXT.replace("LIMIT", str(rows))), target=target))


def test_cpu_has_no_layouts() -> None:
    module = read(TEXT.replace("LIMIT", "6"))
    assert assign_layouts(module) is module


def test_layouts_follow_from_the_formats_and_the_readers() -> None:
    module = toy("cuda:sm_90a")
    weights = {name: w.type.layout for name, w in module.weights.items()}
    # nothing multiplies by the table, and `odd` is not whole tiles
    assert weights == {"t": "plain", "w": "tiles16", "odd": "plain", "n": "row"}
    values = {name: t.layout for name, t in module.programs["verify"].values.items()}
    splits = values.pop("a")  # its norm adds planes
    assert splits.startswith("planes")
    assert splits != "planes1"
    assert values == {
        "ids": "row",
        "x": "row",
        "q": "tile8",
        "b": "row",
        "c": "planes1",  # written to a plane as it is
        "d": "tile8",
        "e": "planes1",  # its kernel splits nothing
    }


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_weights_lie_as_every_kernel_that_reads_them_expects(activations: str) -> None:
    """A matrix is repacked for tensor cores, or read by kernels that want it as stored."""
    overrides = {"runtime.activations": activations}
    target = "cuda:sm_90a"
    module = lower(*load(TINY, CompileOptions(target=target, overrides=overrides)), target=target)
    seen = set()
    for program, node in module.nodes():
        if not isinstance(node.op, (*PRODUCTS, Embed)):
            continue
        types = module.operand_types(program, node)
        outputs = [program.values[name] for name in node.outputs]
        layouts = {type.layout for type in types[1:]}
        for launch in node.op.lower_cuda(ARCHS["sm_90a"], *types, *outputs):
            if isinstance(launch, Scheduled) or isinstance(launch.params, PlainParams):
                wanted = "plain"
            elif isinstance(launch.params, EmbedParams):
                wanted = "tiles16" if launch.params.tiled else "plain"
            else:
                wanted = "tiles16"
            assert layouts == {wanted}, node.label
            seen.add(wanted)
    assert seen == ({"plain"} if activations == "f32" else {"tiles16"})


def test_layouts_have_room_for_whole_tiles() -> None:
    rows = Sym("T", 9)
    assert TensorType((rows, 64), "a8", "tile8").nbytes == 2 * 640
    assert TensorType((rows, 128), "bf16", "tile8").nbytes == 2 * 2 * 1024
    assert TensorType((rows, 128), "bf16").nbytes == 9 * 256
    assert TensorType((rows, 64), "f32", "planes3").nbytes == 3 * 16 * 64 * 4
    assert TensorType((Sym("T", 1), 64), "f32", "planes3").nbytes == 3 * 8 * 64 * 4


def pipeline(spec: Path, target: str, depth: int, activations: str = "int8", **more: str) -> Module:
    overrides = {
        "runtime.activations": activations,
        "runtime.kv": "f16",
        "round.depth.max": str(depth),
    }
    options = CompileOptions(target=target, overrides=overrides)
    return lower(*load(spec, options), target=target, until="assign_layouts")


def layouts(module: Module, program: str) -> dict[str, str]:
    return {name: type.layout for name, type in module.programs[program].values.items()}


@pytest.mark.parametrize("depth", range(1, 8))
def test_verify_of_up_to_eight_rows_is_laid_out_as_the_plain_step(depth: int) -> None:
    module = pipeline(TINY, "cuda:sm_90a", depth)
    assert module.programs["verify"].rows.bound == depth + 1
    assert layouts(module, "verify") == layouts(module, "plain_step")


@pytest.mark.parametrize("activations", ["int8", "bf16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_large_specs_are_laid_out_as_the_plain_step(arch: str, activations: str) -> None:
    module = pipeline(SPECS / "gemma4_31b.yaml", f"cuda:{arch}", 7, activations)
    assert layouts(module, "verify") == layouts(module, "plain_step")


@pytest.fixture
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Give products of two column tiles another value of a field of their geometry."""

    def change(field: str, value: int) -> None:
        known = cuda_linear.geometry

        def geometry(arch: CudaArch, work: Work) -> Geometry:
            one = known(arch, replace(work, column_tiles=1))
            return replace(one, **{field: value}) if work.column_tiles == 2 else one

        monkeypatch.setattr(cuda_linear, "geometry", geometry)

    return change


@pytest.mark.parametrize(("field", "cut"), [("slice_units", "N, N, 77"), ("warps", "N, 77, N")])
def test_batch_that_is_summed_in_another_order_is_refused(
    field: str, cut: str, wide_tiles: Callable[[str, int], None]
) -> None:
    """Not the planes alone: the warps of a block add up in an order too."""
    wide_tiles(field, 77)
    pipeline(TINY, "cuda:sm_90a", 7)
    with pytest.raises(MemraError) as error:
        pipeline(TINY, "cuda:sm_90a", 9)
    text = re.sub(
        r"(?<=planes)\d+|\b(?!77\b)\d+", "N", str(error.value).replace(str(TINY), "tiny.yaml")
    )
    assert text == (
        "error[inexact]: speculation could change the text: in `target.layers.N.qkv`, "
        "cuda:sm_90a would add up N rows in another order than one row\n"
        "  --> tiny.yaml:N:N\n"
        f"note: verify: planesN, planesN, planesN, ({cut})\n"
        "note: plain step: planesN, planesN, planesN, (N, N, N); splits, warps and units of a "
        "warp's slice\n"
        "note: N of N steps differ\n"
        "hint: lower `round.depth.max` to N: a tile of N rows is cut as one row"
    )


def test_batch_that_leaves_other_planes_is_refused(
    wide_tiles: Callable[[str, int], None],
) -> None:
    wide_tiles("splits", 3)
    with pytest.raises(MemraError, match="planes3"):
        pipeline(TINY, "cuda:sm_90a", 9)


def test_geometry_that_does_not_differ_is_accepted(
    wide_tiles: Callable[[str, int], None],
) -> None:
    wide_tiles("stages", 2)
    module = pipeline(TINY, "cuda:sm_90a", 9)
    assert layouts(module, "verify") == layouts(module, "plain_step")


EARLY = """\
module toy
weight $t : q8_0[64, 64] from target "t"
plane @state : i32[64] rollback none
plane @batch : i32[16] rollback none
plane @k : f16[1, 128, 64] rollback truncate
plane @v : f16[1, 128, 64] rollback truncate
program verify rows T<=6 from rows {
  %ids : i32[T<=6] = read_tokens(@batch, @state) {chain = False, limit = 6} label "ids"
ENDS
  %q : f32[T<=6, 64] = embed(%ids, $t) {scale = 1.0} label "q"
LATE
  %y : f32[T<=6, 64] = attention(%q, %ends, @k, @v) {scale = 1.0, span = 0, to = "f32"} label "y"
}
"""
ENDS = '  %ends : i32[T<=6] = positions(@state) {kind = "ends", limit = 6} label "ends"'


def test_what_attention_reads_early_is_settled_before() -> None:
    """The kernel reads ends and old rows while its predecessor runs, so embed waits for them."""
    early = EARLY.replace("ENDS", ENDS).replace("LATE\n", "")
    assign_layouts(replace(read(early), target="cuda:sm_90a"))
    late = EARLY.replace("ENDS\n", "").replace("LATE", ENDS)
    with pytest.raises(OpError, match="y: %ends is read early, and nothing settles it before"):
        assign_layouts(replace(read(late), target="cuda:sm_90a"))

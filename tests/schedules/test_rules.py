"""The rules that schedule functions: what they take, what they refuse, what comes of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from te_samples import Softmax, SumAndDifference, function, rows

import memra_schedules
from memra_compiler.codegen import scheduled
from memra_compiler.codegen.c_text import fuse, tidy
from memra_compiler.codegen.cuda import compile_cuda, render
from memra_compiler.ir.errors import OpError
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.activation import Add, Concat, Scale, SoftCap
from memra_compiler.ops.base import Op
from memra_compiler.ops.cuda import ARCHS, Scheduled
from memra_compiler.ops.linear import GatedLinear, Linear, LinearGroup
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.rope import Rope, RopeAngles
from memra_compiler.ops.scheduled import scheduled_launches, te_functions
from memra_schedules import elementwise, fallback, gemm, row_reduction
from memra_schedules.rules import RULES, schedule

ARCH = ARCHS["sm_90a"]
W = TensorType((5376,), "bf16")
#: A kernel of each form, and the rule it is for.
KERNELS: dict[str, tuple[str, Op, tuple[TensorType, ...]]] = {
    "add": ("elementwise", Add(), (rows(8, 5376), rows(8, 5376, planes=4), rows(8, 5376))),
    "scale": ("elementwise", Scale(), (rows(8, 64), TensorType((1,), "f16"), rows(8, 64))),
    "softcap": ("elementwise", SoftCap(30.0), (rows(8, 262144), rows(8, 262144))),
    "concat": ("elementwise", Concat(), (rows(3, 16), rows(3, 48), rows(3, 64))),
    "rope": ("elementwise", Rope(), (rows(8, 8192, planes=2), rows(8, 2, 128), rows(8, 8192))),
    "rope_angles": (
        "elementwise",
        RopeAngles(96, 1e6, 12),
        (rows(8, dtype="i32"), TensorType((48,)), rows(8, 2, 48)),
    ),
    "linear": ("gemm", Linear(), (rows(64, 96), TensorType((100, 96), "bf16"), rows(64, 100))),
    "linear_wide": (
        "gemm",
        Linear(),
        (rows(64, 5376), TensorType((21504, 5376), "q4_0", "plain"), rows(64, 21504)),
    ),
    "gated_linear": (
        "gemm",
        GatedLinear("silu"),
        (rows(64, 256), *2 * [TensorType((64, 256), "q6_k", "plain")], rows(64, 64)),
    ),
    "norm": ("row_reduction", RMSNorm(), (rows(8, 5376, planes=4), W, rows(8, 5376))),
    "norm_odd": ("row_reduction", RMSNorm(), (rows(8, 1040), rows(8, 1040))),
    "head_norm": (
        "row_reduction",
        RMSNorm(size=256),
        (rows(8, 8192), TensorType((256,)), rows(8, 8192)),
    ),
    "head_norm_odd": ("row_reduction", RMSNorm(size=80), (rows(3, 240), rows(3, 240))),
    "softmax": ("fallback", Softmax(), (rows(6, 37), rows(6, 37))),
}


def launches(name: str, arch: str = "sm_90a") -> tuple[Scheduled, ...]:
    _, op, types = KERNELS[name]
    return scheduled_launches(op, ARCHS[arch], *types)


def text(name: str) -> str:
    (launch,) = launches(name)
    return render(launch, "kernel")[1]


@pytest.mark.parametrize("name", KERNELS)
def test_rule_takes_what_it_is_for(name: str) -> None:
    (launch,) = launches(name)
    assert launch.rule == KERNELS[name][0]


def test_every_rule_is_on_the_page_and_has_a_kernel() -> None:
    folder = Path(memra_schedules.__file__).parent
    rules = [p.stem for p in folder.glob("*.py") if "\ndef apply(" in p.read_text(encoding="utf-8")]
    listed = [rule.__name__.rpartition(".")[2] for rule in RULES]
    assert sorted(rules) == sorted(listed) == sorted({rule for rule, _, _ in KERNELS.values()})
    assert listed[-1] == "fallback"


@pytest.mark.parametrize(
    ("rule", "op", "types"),
    [
        (row_reduction, *KERNELS["add"][1:]),  # no sum
        (row_reduction, *KERNELS["softmax"][1:]),  # two
        (row_reduction, RMSNorm(), (rows(8, 5378), rows(8, 5378))),  # no whole vectors
        (gemm, *KERNELS["norm"][1:]),  # a sum, but no product
        (gemm, Linear(), (rows(64, 80), TensorType((64, 80)), rows(64, 64))),  # no whole slices
        (elementwise, *KERNELS["norm"][1:]),  # a sum
        (elementwise, *KERNELS["softmax"][1:]),
    ],
)  # fmt: skip
def test_near_miss_is_left_to_the_next_rule(
    rule: object, op: Op, types: tuple[TensorType, ...]
) -> None:
    assert rule.apply(function(op, *types), ARCH) is None  # type: ignore[attr-defined]


def test_function_of_two_outputs_is_refused() -> None:
    from tvm import te

    x = te.placeholder((te.var("rows"), 64), "float32", "x")
    double = te.compute(x.shape, lambda row, col: x[row, col] * 2.0, "double")
    half = te.compute(x.shape, lambda row, col: x[row, col] * 0.5, "half")
    both = te.create_prim_func([x, double, half])
    assert all(rule.apply(both, ARCH) is None for rule in (row_reduction, elementwise, fallback))
    with pytest.raises(ValueError, match="several outputs"):
        schedule(both, ARCH)


def test_op_of_two_outputs_has_a_launch_for_each() -> None:
    types = (rows(6, 64, planes=2), *(rows(6, 64) for _ in range(3)))
    sources = [render(one, "k")[1] for one in SumAndDifference().lower_cuda(ARCH, *types)]
    assert len(sources) == 2
    for source, written in zip(sources, ("total", "difference"), strict=True):
        assert re.findall(r"^    float\* (\w+)", source, re.M) == ["total", "difference"]
        assert re.search(rf"\*\(float4\*\)\({written} \+ .* = ", source)
        compile_cuda(source, "k", ARCH)


def test_products_of_few_rows_or_int8_rows_are_left_to_their_templates() -> None:
    w = TensorType((64, 256), "q8_0", "plain")
    for x in (rows(16, 256), rows(16, 256, dtype="a8")):
        assert not any(isinstance(one, Scheduled) for one in Linear().lower_cuda(ARCH, x, w, x))
    x, outs = rows(17, 256), [rows(17, 64), rows(17, 64)]
    group = LinearGroup().lower_cuda(ARCH, x, w, w, *outs)
    assert [one.rule for one in group if isinstance(one, Scheduled)] == ["gemm", "gemm"]


def test_repacked_weights_are_refused() -> None:
    tiled = TensorType((64, 256), "q8_0", "tiles16")
    with pytest.raises(OpError, match="as stored"):
        te_functions(Linear(), rows(64, 256), tiled, rows(64, 64))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_every_form_compiles_without_spills(arch: str) -> None:
    for name in KERNELS:
        for launch in launches(name, arch):
            log: list[str] = []
            compile_cuda(render(launch, "kernel")[1], "kernel", ARCHS[arch], log=log)
            assert set(re.findall(r"(\d+) bytes spill", log[0])) == {"0"}, (name, log)


@pytest.mark.parametrize("name", ["add", "rope", "norm", "head_norm", "linear", "softmax"])
def test_sample_text_is_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"schedules/{name}.cu", text(name))


@pytest.mark.parametrize("name", KERNELS)
def test_tidy_text_is_the_same_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parentheses that `tidy` drops and lines that are broken change no machine code."""
    (launch,) = launches(name)
    neat = scheduled.cuda_text.__wrapped__(launch)

    def fused(line: str) -> str:
        found = fuse(tidy(line))
        return found if found != tidy(line) else line

    monkeypatch.setattr(scheduled, "tidy", lambda line: line)
    monkeypatch.setattr(scheduled, "fuse", fused)
    monkeypatch.setattr(scheduled, "wrap", lambda line, width: [line])
    raw = scheduled.cuda_text.__wrapped__(launch)
    assert raw.count("(") > neat.count("(")
    assert compile_cuda(raw, "k", ARCH) == compile_cuda(neat, "k", ARCH)


def test_tvm_is_left_as_it_was() -> None:
    """Where there is a GPU, TVM would compile what it prints: for a moment, it has other hooks."""
    import tvm

    names = ("tvm_callback_cuda_postproc", "tvm_callback_cuda_compile")
    before = [tvm.get_global_func(name, allow_missing=True) for name in names]
    (launch,) = launches("add")
    assert "float4" in scheduled.cuda_text.__wrapped__(launch)
    after = [tvm.get_global_func(name, allow_missing=True) for name in names]
    assert before[0] is after[0] is None
    assert before[1].same_as(after[1])


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_does_not_depend_on_the_rows_there_may_be(name: str) -> None:
    """One row and sixteen run the same text; of partial planes, one row and eight."""
    _, op, types = KERNELS[name]
    sources = []
    for bound in (1, 8) if any(t.planes > 1 for t in types) else (1, 6, 16):
        made = [t if t.shape[0] != types[0].shape[0] else rows_of(t, bound) for t in types]
        (launch,) = scheduled_launches(op, ARCH, *made)
        sources.append(render(launch, "kernel")[1])
    assert len(set(sources)) == 1


def rows_of(type: TensorType, bound: int) -> TensorType:
    return rows(bound, *type.max_shape[1:], dtype=type.dtype,
                planes=type.planes if type.planes > 1 else 0)  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_grid_covers_the_most_rows_there_can_be(name: str) -> None:
    """Blocks are guarded by what the grid is at the bound."""
    (launch,) = launches(name)
    bound = KERNELS[name][2][0].max_shape[0]
    ((axis, limit),) = re.findall(r"if \(block_([xy]) >= (.*)\) \{\n    return;", text(name))
    assert re.fullmatch(r"[rows\d +*/()]+", limit)
    for count, blocks in ((bound, launch.grid["xy".index(axis)]), (0, 0)):
        assert eval(limit.replace("/", "//"), {"rows": count}) == blocks
    assert launch.block <= 1024


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_waits_before_it_reads_and_guards_its_rows(name: str) -> None:
    source = text(name)
    body = source[source.index("{") :]
    waits = [body.index(f"{call}();") for call in ("launch_dependents", "wait_for_predecessor")]
    guard = re.search(r"if \(block_[xy] >= .*rows.*\) \{\n    return;\n  \}", body)
    assert guard is not None
    assert 0 < waits[0] < waits[1] < guard.start() < body.index("alignas" if "alignas" in body
                                                                else "for (")  # fmt: skip
    assert source.index("int rows,") < source.index("{")
    assert "__activemask" not in source or launches(name)[0].block % 32


def test_values_are_plain_pointers_and_weights_are_not() -> None:
    """A value may be written while a kernel that started early waits: no read-only memory."""
    assert "    const float* x,  // [4][8][5376]\n" in text("norm")
    assert "    const __nv_bfloat16* __restrict__ weight,  // [5376]\n" in text("norm")
    assert "    const int* positions,  // [rows]\n" in text("rope_angles")


@pytest.mark.parametrize("name", ["softmax"])
def test_op_with_only_an_expression_means_what_its_reference_says(name: str) -> None:
    import tvm

    _, op, types = KERNELS[name]
    (made,) = te_functions(op, *types)
    x = np.random.default_rng(1).standard_normal((5, 37)).astype(np.float32)
    given, out = tvm.runtime.tensor(x), tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(made.function, target="llvm")(given, out, 5)
    (want,) = op.reference(5, x.astype(np.float64))
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5)

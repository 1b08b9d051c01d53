"""CUDA artifacts by activations: which kernels multiply, and that all of them compile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from memra_compiler.codegen.cuda_tools import slow_products
from memra_compiler.compile import CompileOptions, compile_spec, load, lower
from memra_compiler.ir.graph import Module
from memra_compiler.ops.cuda import Scheduled, cuda_arch
from memra_compiler.ops.cuda_linear import LinearParams, PlainParams
from memra_compiler.ops.cuda_wide import WideParams
from memra_compiler.ops.linear import PRODUCTS

ROOT = Path(__file__).parent.parent.parent
SPECS = ROOT / "model_specs"
DATA = ROOT / "tests" / "data"
LARGE = SPECS / "gemma4_31b.yaml"
TINY = SPECS / "tiny" / "gemma4_tiny.yaml"

#: Storage of the 31B: as its spec assumes, as its quantised files have it, and K-quants.
STORED = {
    "bf16": {},
    "f16": {"target.formats.matrix": "f16", "drafter.formats.matrix": "f16"},
    "q4_0": {"target.formats.matrix": "q4_0", "target.formats.embed": "q6_k",
             "drafter.formats.matrix": "q8_0", "drafter.formats.embed": "q8_0"},
    "q4_k": {"target.formats.matrix": "q4_k", "target.formats.embed": "q6_k",
             "drafter.formats.matrix": "q5_k", "drafter.formats.embed": "q6_k"},
}  # fmt: skip


def large(target: str, **overrides: str) -> Module:
    options = CompileOptions(target=target, overrides=overrides)
    return lower(*load(LARGE, options), target=target)


def products(module: Module) -> Counter[tuple[str, str]]:
    """How often each kernel multiplies rows of each format."""
    arch = cuda_arch(module.target)
    assert arch is not None
    found: Counter[tuple[str, str]] = Counter()
    for program, node in module.nodes():
        if not isinstance(node.op, PRODUCTS):
            continue
        types = module.operand_types(program, node)
        outputs = (program.values[name] for name in node.outputs)
        for launch in node.op.lower_cuda(arch, *types, *outputs):
            what = launch if isinstance(launch, Scheduled) else launch.params
            found[type(what).__name__, types[0].dtype] += 1
    return found


@pytest.mark.parametrize("activations", ["auto", "bf16"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_every_product_of_the_31b_has_a_fast_kernel(
    target: str, stored: str, activations: str
) -> None:
    module = large(target, **{"runtime.activations": activations, **STORED[stored]})
    found = products(module)
    assert {kernel for kernel, _ in found} == {LinearParams.__name__, WideParams.__name__}
    assert {rows for _, rows in found} <= {"bf16", "a8" if activations == "auto" else "bf16"}
    assert slow_products(module) == 0


def test_f32_activations_are_told_to_be_slow() -> None:
    module = large("cuda:sm_90a", **{"runtime.activations": "f32"})
    assert set(products(module)) == {(PlainParams.__name__, "f32"), (Scheduled.__name__, "f32")}
    assert slow_products(module) > 400


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(("files", "kv"), [("q8_0", "f16"), ("bf16", "f16"), ("q8_0", "q8_0")])
def test_tiny_compiles_and_verifies_with_the_kernels_of_the_plain_step(
    arch: str, files: str, kv: str, tmp_path: Path, kernel_cache: Path
) -> None:
    weights = {"weights": DATA / "gemma4-tiny", "draft": DATA / "gemma4-tiny-assistant"}
    options = CompileOptions(
        target=f"cuda:{arch}",
        overrides={"runtime.activations": "bf16", "runtime.kv": kv},
        cache=kernel_cache,
        **(weights if files == "bf16" else {}),
    )
    manifest = compile_spec(TINY, tmp_path / "tiny.memra", options).manifest
    plain, verify = (manifest.launches[name] for name in ("plain_step", "verify"))
    multiplies = 0
    for one, many in zip(plain, verify, strict=True):
        product = one.symbol.startswith(("linear", "gated_linear"))
        multiplies += product
        assert one.symbol == many.symbol or one.symbol.startswith("attention")
        assert not product or one.grid == many.grid
    assert multiplies > 20
    names = ("attention", "norm_rope_append", "norm_rope_qkv", "kv_append")
    touching = [s for s in manifest.kernels if s.startswith(names)]
    texts = [(tmp_path / "tiny.memra" / "sources" / f"{s}.cu").read_text() for s in touching]
    caches = [t for t in texts if "_cache" in t and "const void* k_cache" not in t]
    assert len(caches) > 4
    assert all(("Q8* k_cache" in t) == (kv == "q8_0") for t in caches)


def test_31b_compiles_in_bf16(tmp_path: Path, kernel_cache: Path) -> None:
    overrides = {"runtime.activations": "bf16", **STORED["q4_0"]}
    options = CompileOptions(target="cuda:sm_90a", overrides=overrides, cache=kernel_cache)
    manifest = compile_spec(LARGE, tmp_path / "31b.memra", options).manifest
    sources = [path.read_text() for path in (tmp_path / "31b.memra" / "sources").iterdir()]
    assert len(sources) == len(manifest.kernels)
    assert not any('#include "a8.cuh"' in text for text in sources)

"""Every CUDA kernel that is no matrix product: rendered, compiled for each device, never run.

Those that TVM schedules come through `lower_cuda`, as in an artifact; templates have launchers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from memra_compiler.codegen.cuda import LIBRARY, TEMPLATES, compile_cuda, render
from memra_compiler.ir.errors import OpError
from memra_compiler.ir.types import Sym, TensorType
from memra_compiler.ops import (
    cuda_attention,
    cuda_confidence,
    cuda_head,
    cuda_kernels,
    cuda_state,
)
from memra_compiler.ops.activation import Add, Concat, GateMul, Scale, SoftCap
from memra_compiler.ops.again import Again
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.attention import Attention, KvAppend, NormRopeAppend
from memra_compiler.ops.chain import Advance, Begin, DraftToken
from memra_compiler.ops.clusters import ClusterLogits, ClusterToken, TopClusters
from memra_compiler.ops.confidence import Confidence, WeighDraft
from memra_compiler.ops.cuda import ARCHS, AnyLaunch, CudaArch
from memra_compiler.ops.cuda_linear import FORMATS
from memra_compiler.ops.head import BestRow, TokenOfRow
from memra_compiler.ops.kv_move import KvMove
from memra_compiler.ops.norm import RMSNorm, RMSNormAdd
from memra_compiler.ops.per_layer import PerLayerGate, PerLayerMix
from memra_compiler.ops.qkv import NormRopeQKV
from memra_compiler.ops.quantise import (
    ROUNDINGS,
    Quantise,
    RMSNormAddQuantise,
    RMSNormQuantise,
)
from memra_compiler.ops.residual import BranchNorms, ResidualNorms
from memra_compiler.ops.rope import NormRope, Rope, RopeAngles
from memra_compiler.ops.settle import Accept, AdaptDepth, Commit, Rollback
from memra_compiler.ops.state import Positions, ReadRow, ReadTokens, WriteRows
from memra_compiler.ops.top_experts import TopExperts
from memra_runtime.artifact import (
    BATCH_ROWS,
    MAX_DEPTH,
    MAX_EOS,
    RING_TOKENS,
    STATE,
    STATE_ACCEPTED,
    STATE_ATTEMPTED,
    STATE_SIZE,
)

#: Folders of the templates these tests own; linear kernels have their own tests.
FAMILIES = ("norm", "rope", "attention", "state", "elementwise", "head")

Maker = Callable[[CudaArch], tuple[AnyLaunch, ...]]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a model that kernels are compiled for."""

    name: str
    rows: int
    width: int
    inner: int
    vocab: int
    heads: int
    kv_heads: tuple[int, int]
    head_dims: tuple[int, int]
    window: int
    kv: str
    splits: int


GEOMETRIES = (
    Geometry("31b", 8, 5376, 21504, 262144, 32, (16, 4), (256, 512), 1024, "f16", 4),
    Geometry("31b_kv8", 8, 5376, 21504, 262144, 32, (16, 4), (256, 512), 1024, "q8_0_rows", 4),
    Geometry("odd_kv8", 8, 384, 768, 1024, 6, (3, 1), (96, 1024), 32, "q8_0_rows", 1),
    Geometry("12b", 16, 3840, 15360, 262144, 16, (8, 1), (256, 512), 1024, "bf16", 2),
    Geometry("tiny", 6, 128, 256, 1024, 4, (2, 1), (32, 64), 32, "f32", 1),
)
STATE_TYPE, BATCH = TensorType((STATE_SIZE,), "i32"), TensorType((BATCH_ROWS,), "i32")


def kernels(g: Geometry) -> Iterator[tuple[str, Maker]]:
    """Every launch function at the sizes of a model."""

    def rows(*shape: int, dtype: str = "f32", planes: int = 0) -> TensorType:
        layout = f"planes{planes}" if planes else "row"
        return TensorType((Sym("T", g.rows), *shape), dtype, layout)

    s = g.splits
    x, w, one = rows(g.width), TensorType((g.width,)), TensorType((1,))
    f = rows(g.inner)
    both, logits, at = rows(2 * g.width), rows(g.vocab), rows(dtype="i32")
    k, e = cuda_kernels, cuda_state
    split = rows(g.width, planes=s)
    yield "rmsnorm", lambda a: RMSNorm().lower_cuda(a, split, w, x)
    yield "rmsnorm_unit", lambda a: RMSNorm().lower_cuda(a, x, x)
    yield "rmsnorm_add", lambda a: k.rmsnorm_add_launches(RMSNormAdd(), a, x, x, w, x, splits=s)
    for to in ROUNDINGS:
        q, fq, bq = (rows(n, dtype=to) for n in (g.width, g.inner, 2 * g.width))
        yield (
            f"rmsnorm_quantise_{to}",
            lambda a, q=q: k.rmsnorm_launches(RMSNormQuantise(), a, x, w, q),
        )
        yield (
            f"rmsnorm_add_quantise_{to}",
            lambda a, q=q: k.rmsnorm_add_launches(
                RMSNormAddQuantise(), a, x, x, w, w, one, x, q, splits=s
            ),
        )
        three = {"to": (to, "f32", to), "factors": (1.0, 0.125, 1.0)}
        next_norms = (w, w, w, one, x, q, x, q)
        yield (
            f"residual_norms_{to}",
            lambda a, three=three, rest=next_norms: ResidualNorms(**three).lower_cuda(
                a, x, split, w, *rest
            ),
        )
        yield (
            f"branch_norms_{to}",
            lambda a, three=three, rest=next_norms: BranchNorms(**three).lower_cuda(
                a, x, split, split, w, w, w, *rest
            ),
        )
        yield (
            f"quantise_{to}",
            lambda a, q=q: k.quantise_launches(Quantise(), a, x, q, splits=s),
        )
        for act in ("gelu_tanh", "silu"):
            yield (
                f"gate_mul_{act}_{to}",
                lambda a, act=act, fq=fq: k.gate_mul_launches(GateMul(act), a, f, f, fq, splits=s),
            )
        yield (
            f"concat_{to}",
            lambda a, bq=bq: k.concat_launches(Concat(), a, x, x, bq),
        )
    yield "gate_mul", lambda a: k.gate_mul_launches(GateMul(), a, f, f, f)
    yield "add", lambda a: Add().lower_cuda(a, x, split, x)
    yield "scale", lambda a: Scale().lower_cuda(a, split, one, x)
    yield "softcap", lambda a: SoftCap().lower_cuda(a, logits, logits)
    yield "concat", lambda a: Concat().lower_cuda(a, x, x, both)
    for kind, (n, d) in enumerate(zip(g.kv_heads, g.head_dims, strict=True)):
        q, kv, hw = rows(g.heads * d), rows(n * d), TensorType((d,))
        qs = rows(g.heads * d, planes=s)
        angles, factors = rows(2, d // 2), TensorType((d // 2,))
        plane = TensorType((n, 4096 if kind else g.window + g.rows, d), g.kv)
        span, angle_op = (0, RopeAngles(d, 1e6, d // 2)) if kind else (g.window, RopeAngles(d))
        yield (
            f"head_norm_{d}",
            lambda a, q=q, qs=qs, hw=hw, d=d: RMSNorm(size=d).lower_cuda(a, qs, hw, q),
        )
        yield (
            f"rope_angles_{d}",
            lambda a, o=angle_op, f=factors, t=angles: o.lower_cuda(a, at, f, t),
        )
        yield f"rope_{d}", lambda a, q=q, qs=qs, t=angles: Rope().lower_cuda(a, qs, t, q)
        yield (
            f"norm_rope_{d}",
            lambda a, q=q, t=angles, hw=hw: k.norm_rope_launches(
                NormRope(), a, q, t, hw, q, splits=s
            ),
        )
        yield (
            f"norm_rope_append_{d}",
            lambda a, kv=kv, t=angles, hw=hw, p=plane: k.norm_rope_append_launches(
                NormRopeAppend(), a, kv, kv, t, hw, at, p, p, splits=s
            ),
        )
        yield (
            f"norm_rope_qkv_{d}",
            lambda a, q=q, kv=kv, t=angles, hw=hw, p=plane: k.norm_rope_qkv_launches(
                NormRopeQKV(), a, q, kv, kv, t, hw, hw, at, p, p, q, splits=s
            ),
        )
        yield (
            f"kv_append_{d}",
            lambda a, kv=kv, p=plane: k.kv_append_launches(KvAppend(), a, kv, kv, at, p, p),
        )
        for out in ("f32", *ROUNDINGS):
            yield (
                f"attention_{d}_{out}",
                lambda a, q=q, p=plane, o=out, s=span: cuda_attention.attention_launches(
                    Attention(1.0, s), a, q, at, p, p, TensorType(q.shape, o)
                ),
            )
        if not kind:
            chunk = TensorType((n, 64, d), g.kv)
            yield (
                f"attention_chunk_{d}",
                lambda a, q=q, p=plane, c=chunk, s=span: cuda_attention.attention_launches(
                    Attention(1.0, s), a, q, at, p, p, c, c, q
                ),
            )
            yield (
                f"kv_move_{d}",
                lambda a, p=plane, c=chunk: k.kv_move_launches(KvMove(), a, at, c, c, p, p),
            )
    ids, clusters = TensorType((g.vocab,), "i64"), g.vocab // 128
    scores, best = rows(clusters), rows(4, dtype="i32")
    yield "top_clusters", lambda a: TopClusters(4).lower_cuda(a, scores, best)
    for form in FORMATS if g.name == "tiny" else ("q8_0",):
        table = TensorType((g.vocab, 256), form)
        yield (
            f"cluster_logits_{form}",
            lambda a, t=table: ClusterLogits(128).lower_cuda(a, rows(256), best, ids, t, rows(512)),
        )
    yield "cluster_token", lambda a: ClusterToken(128).lower_cuda(a, at, best, ids, at)
    wide, part = rows(3 * 256), TensorType((256,))
    wide_planes, part_planes = rows(3 * 256, planes=s), rows(256, planes=s)
    yield "per_layer_mix", lambda a: PerLayerMix().lower_cuda(a, wide_planes, wide, part, wide)
    yield (
        "per_layer_gate",
        lambda a: PerLayerGate(1).lower_cuda(a, part_planes, wide, rows(256)),
    )
    yield "argmax", lambda a: e.argmax_launches(ArgMax((3, 7)), a, logits, at, splits=s)
    router, scales = rows(128, planes=s), TensorType((128,))
    yield "top_experts", lambda a: TopExperts(8).lower_cuda(a, router, scales)
    row, used = rows(dtype="head_row"), TensorType((1,), "i32")
    for name, chosen in (("all", (at,)), ("trimmed", (row, used))):
        yield (
            f"confidence_{name}",
            lambda a, chosen=chosen: cuda_confidence.confidence_launches(
                Confidence(), a, logits, *chosen, rows(), splits=s
            ),
        )
    for kind in ("rows", "ends", "committed", "chain"):
        yield (
            f"positions_{kind}",
            lambda a, kind=kind: e.positions_launches(Positions(kind), a, STATE_TYPE, at),
        )
    for chain in (False, True):
        yield (
            f"read_tokens_{chain}",
            lambda a, chain=chain: e.read_tokens_launches(
                ReadTokens(chain), a, BATCH, STATE_TYPE, at
            ),
        )
    yield "read_row", lambda a: e.read_row_launches(ReadRow(), a, w, x)
    yield "write_rows", lambda a: e.write_rows_launches(WriteRows(), a, x, x)
    yield "write_ids", lambda a: e.write_rows_launches(WriteRows(), a, at, BATCH)
    for flag in (False, True):
        yield (
            f"begin_{flag}",
            lambda a, flag=flag: e.begin_launches(Begin(flag), a, STATE_TYPE, BATCH, w, w),
        )
        yield (
            f"rollback_{flag}",
            lambda a, flag=flag: e.rollback_launches(Rollback(flag), a, STATE_TYPE),
        )
        yield (
            f"adapt_depth_{flag}",
            lambda a, flag=flag: e.adapt_depth_launches(AdaptDepth(flag), a, STATE_TYPE),
        )
    context = TensorType((4097,), "i32")
    yield (
        "draft_token",
        lambda a: e.draft_token_launches(
            DraftToken(), a, TensorType((1,), "i32"), STATE_TYPE, context, BATCH
        ),
    )
    yield "best_row", lambda a: cuda_head.best_row_launches(BestRow(), a, logits, used, row)
    for skip in (False, True):
        yield (
            f"token_of_row_{skip}",
            lambda a, skip=skip: cuda_head.token_of_row_launches(
                TokenOfRow(skip), a, row, TensorType((g.vocab,), "i32"), at
            ),
        )
    yield "begin_cuts", lambda a: e.begin_launches(Begin(cuts=True), a, STATE_TYPE, BATCH, w, w)
    yield (
        "weigh_draft",
        lambda a: cuda_confidence.weigh_draft_launches(WeighDraft(), a, one, STATE_TYPE),
    )
    yield "advance", lambda a: e.advance_launches(Advance(), a, STATE_TYPE)
    yield "again", lambda a: e.again_launches(Again(), a, STATE_TYPE)
    yield "accept", lambda a: e.accept_launches(Accept(), a, STATE_TYPE, BATCH, BATCH)
    end = (
        STATE_TYPE, BATCH, BATCH, TensorType((BATCH_ROWS, g.width)), w,
        TensorType((RING_TOKENS,), "i32"), TensorType((MAX_EOS,), "i32"),
    )  # fmt: skip
    yield "commit", lambda a: e.commit_launches(Commit(), a, *end)


KERNELS = {(g.name, name): make for g in GEOMETRIES for name, make in kernels(g)}
#: Kernels that run in every layer: (registers a thread may use, in sm_90a). The sum over splits of
#: attention holds sixteen partial rows on their way.
HOT = {
    ("31b", "rmsnorm_quantise_a8"): (72,),
    ("31b", "rmsnorm_quantise_bf16"): (72,),
    ("31b", "rmsnorm_add_quantise_a8"): (96,),
    ("31b", "rmsnorm_add_quantise_bf16"): (96,),
    ("31b", "norm_rope_qkv_256"): (64,),
    ("31b", "norm_rope_qkv_512"): (128,),
    ("31b", "attention_256_a8"): (128, 128),
    ("31b", "attention_512_a8"): (255, 128),
    ("31b", "attention_chunk_256"): (128, 128),
    ("31b", "kv_move_256"): (32,),
    ("31b_kv8", "norm_rope_qkv_256"): (64,),
    ("31b_kv8", "norm_rope_qkv_512"): (128,),
    ("31b_kv8", "attention_256_a8"): (128, 128),
    ("31b_kv8", "attention_512_a8"): (255, 128),
    ("31b_kv8", "attention_chunk_256"): (128, 128),
    ("31b", "argmax"): (64, 32),
}


@cache
def compiled(arch: str) -> dict[tuple[str, str], list[str]]:
    """The compiler's resource reports of all kernels, each distinct source compiled once."""
    jobs: dict[str, str] = {}
    users: dict[tuple[str, str], list[str]] = {}
    for key, make in KERNELS.items():
        for i, launch in enumerate(make(ARCHS[arch])):
            symbol, source = render(launch, f"{key[1]}_{i}")
            if source.replace(symbol, "") not in jobs:
                jobs[source.replace(symbol, "")] = source
            users.setdefault(key, []).append(source.replace(symbol, ""))

    def compile_one(source: str) -> str:
        log: list[str] = []
        compile_cuda(source, "kernel", ARCHS[arch], log=log)
        return log[0]

    with ThreadPoolExecutor(2) as pool:
        logs = dict(zip(jobs, pool.map(compile_one, jobs.values()), strict=True))
    return {key: [logs[text] for text in texts] for key, texts in users.items()}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    for key, logs in compiled(arch).items():
        for log in logs:
            spills = re.findall(r"(\d+) bytes spill", log)
            assert all(int(n) == 0 for n in spills), f"{key} on {arch}: {log}"


@pytest.mark.parametrize("key", HOT, ids="-".join)
def test_hot_kernel_keeps_to_its_registers(key: tuple[str, str]) -> None:
    found = [int(re.findall(r"Used (\d+) registers", log)[-1]) for log in compiled("sm_90a")[key]]
    assert all(n <= limit for n, limit in zip(found, HOT[key], strict=True)), found


def test_sample_text_is_golden(golden: Callable[[str, str], None]) -> None:
    _, source = render(KERNELS["31b", "rmsnorm_add_quantise_a8"](ARCHS["sm_90a"])[0], "kernel")
    golden("codegen/residual_norm.cu", source)


def test_text_is_deterministic() -> None:
    for make in KERNELS.values():
        first = [render(launch, "k") for launch in make(ARCHS["sm_90a"])]
        assert first == [render(launch, "k") for launch in make(ARCHS["sm_90a"])]


def test_every_template_waits_for_its_predecessor() -> None:
    for family in FAMILIES:
        for path in (TEMPLATES / family).iterdir():
            text = path.read_text(encoding="utf-8")
            released, wait = text.index("launch_dependents();"), "wait_for_predecessor();"
            if wait in text:
                assert released < text.index(wait), path
            else:  # by a header of its own, where it has read what it may read early
                headers = re.findall(r'^#include "(.*)"$', text, re.M)
                assert any(wait in (LIBRARY / h).read_text(encoding="utf-8") for h in headers), path


def test_slots_of_the_device_block_are_those_of_the_artifact() -> None:
    text = (LIBRARY / "state.cuh").read_text(encoding="utf-8")
    body = re.search(r"enum Slot : int \{(.*?)\};", text, re.S)
    assert body is not None
    names = [line.strip().split(" ")[0].rstrip(",") for line in body[1].strip().splitlines()]
    camel = ["k" + "".join(part.capitalize() for part in name.split("_")) for name in STATE]
    assert names == [*camel, "kAttemptedTable", "kAcceptedTable", "kStateSize"]
    assert f"kMaxDepth = {MAX_DEPTH};" in text
    assert STATE_ACCEPTED - STATE_ATTEMPTED == STATE_SIZE - STATE_ACCEPTED == MAX_DEPTH


def attention_types(rows: int, dtype: str = "f16") -> tuple[TensorType, ...]:
    q, plane = TensorType((Sym("T", rows), 32 * 512)), TensorType((4, 4096, 512), dtype)
    return q, TensorType((Sym("T", rows),), "i32"), plane, plane


def test_attention_class_does_not_depend_on_rows() -> None:
    for arch in ARCHS.values():
        for dtype in ("f32", "f16", "bf16", "q8_0_rows"):
            for span in (0, 1024):
                classes = {
                    cuda_attention.attention_class(
                        Attention(1.0, span), arch, *attention_types(rows, dtype)
                    )
                    for rows in (1, 6, 8, 16)
                }
                assert len(classes) == 1


def test_attention_fits_the_shared_memory_of_every_device() -> None:
    for arch in ARCHS.values():
        for key, make in KERNELS.items():
            if key[1].startswith("attention"):
                assert all(launch.shared_bytes < arch.shared_bytes for launch in make(arch)), key


def test_attention_scratch_does_not_depend_on_the_context() -> None:
    arch = ARCHS["sm_90a"]
    q, ends, plane, _ = attention_types(8)
    longer = TensorType((4, 1 << 17, 512), "f16")
    needed = cuda_attention.attention_scratch_floats(Attention(), arch, q, ends, plane, plane)
    assert needed == 33 * 8 * 32 * (512 + 2)
    assert needed == cuda_attention.attention_scratch_floats(
        Attention(), arch, q, ends, longer, longer
    )


@pytest.mark.parametrize("to", ROUNDINGS)
def test_rows_that_fill_no_piece_are_refused(to: str) -> None:
    x, out = TensorType((Sym("T", 8), 96)), TensorType((Sym("T", 8), 96), to)
    with pytest.raises(OpError, match="whole pieces of 64 inputs"):
        cuda_kernels.quantise_launches(Quantise(to), ARCHS["sm_90a"], x, out)

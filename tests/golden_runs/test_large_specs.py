"""The published models without weights: geometry, tensors, parameters and wiring, and that they
compile.

Every number is from the tables of the published models, restated here by hand.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memra_compiler.compile import CompileOptions, compile_spec, load, lower
from memra_compiler.ir.graph import Module, Weight

SPECS = Path(__file__).parent.parent.parent / "model_specs"
VOCAB = 262144


@dataclass(frozen=True)
class Large:
    """One published model. `swa` and `full` are (K/V heads, head width) of the layer kinds."""

    name: str
    width: int
    layers: int
    heads: int
    swa: tuple[int, int]
    full: tuple[int, int]
    ffn: int
    parameters: float  # billions
    kv_per_token: int  # K plus V elements over all layers
    kv_targets: tuple[int, int]
    tensors: int
    period: int = 6  # layers from one global layer to the next
    window: int = 1024
    boundary: int = 0  # the first layer that reads another's keys and values, 0 for none
    per_layer: int = 0  # width of a layer's slice of the per-layer embeddings
    values_from_keys: bool = True  # on global layers
    wide_tail: bool = False  # feed-forward parts twice as wide from `boundary` on
    draft: tuple[int, int, int] = (1024, 0, 8192)  # width, query heads (0: the target's), ffn
    experts: tuple[int, int, int] | None = None  # how many, of which active, their width

    def kind(self, layer: int) -> tuple[int, int]:
        return self.full if layer % self.period == self.period - 1 else self.swa

    def owns(self, layer: int) -> bool:
        return not self.boundary or layer < self.boundary

    @property
    def owners(self) -> list[int]:
        return [i for i in range(self.layers) if self.owns(i)]


MODELS = (
    Large("gemma4_31b", 5376, 60, 32, (16, 256), (4, 512), 21504, 30.70, 450_560, (58, 59),
          50 * 14 + 10 * 13 + 3),
    Large("gemma4_12b", 3840, 48, 16, (8, 256), (1, 512), 15360, 11.91, 172_032, (46, 47),
          40 * 14 + 8 * 13 + 3),
    Large("gemma4_26b_a4b", 2816, 30, 16, (8, 256), (2, 512), 2112, 25.23, 112_640, (28, 29),
          25 * 14 + 5 * 13 + 30 * 8 + 3, experts=(128, 8, 704)),
    Large("gemma4_e4b", 2560, 42, 8, (2, 256), (2, 512), 10240, 7.46, 28_672, (22, 23),
          24 * 17 + 18 * 14 + 6, window=512, boundary=24, per_layer=256, values_from_keys=False,
          draft=(256, 4, 2048)),
    Large("gemma4_e2b", 1536, 35, 8, (1, 256), (1, 512), 6144, 4.63, 9_216, (13, 14),
          15 * 17 + 20 * 14 + 6, period=5, window=512, boundary=15, per_layer=256,
          values_from_keys=False, wide_tail=True, draft=(256, 4, 2048)),
)  # fmt: skip


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: m.name)
def large(request: pytest.FixtureRequest) -> Large:
    found: Large = request.param
    return found


@pytest.fixture(scope="module")
def module(large: Large) -> Module:
    return lower(*load(SPECS / f"{large.name}.yaml", CompileOptions()))


def target_tensors(m: Large) -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape [out, in], from the tables of the model's reference."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, m.width),
        "output_norm.weight": (m.width,),
        "rope_freqs.weight": (256,),
    }
    if m.per_layer:
        packed = m.layers * m.per_layer
        found["per_layer_token_embd.weight"] = (VOCAB, packed)
        found["per_layer_model_proj.weight"] = (packed, m.width)
        found["per_layer_proj_norm.weight"] = (m.per_layer,)
    for i in range(m.layers):
        kv_heads, d = m.kind(i)
        ffn = m.ffn * (2 if m.wide_tail and not m.owns(i) else 1)
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (m.width,),
            "attn_q": (m.heads * d, m.width),
            "attn_output": (m.width, m.heads * d),
            "attn_q_norm": (d,),
            "post_attention_norm": (m.width,),
            "ffn_norm": (m.width,),
            "ffn_gate": (ffn, m.width),
            "ffn_up": (ffn, m.width),
            "ffn_down": (m.width, ffn),
            "post_ffw_norm": (m.width,),
            "layer_output_scale": (1,),
        }
        if m.owns(i):
            layer |= {"attn_k": (kv_heads * d, m.width), "attn_k_norm": (d,)}
            if m.kind(i) == m.swa or not m.values_from_keys:
                layer["attn_v"] = (kv_heads * d, m.width)
        if m.per_layer:
            layer["inp_gate"] = (m.per_layer, m.width)
            layer["proj"] = (m.width, m.per_layer)
            layer["post_norm"] = (m.width,)
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        if m.experts:
            found |= {f"blk.{i}.{name}": s for name, s in expert_tensors(m.width, *m.experts)}
    return found


def expert_tensors(
    width: int, experts: int, active: int, inner: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "ffn_gate_inp.weight", (experts, width)
    yield "ffn_gate_inp.scale", (width,)
    yield "ffn_down_exps.scale", (experts,)
    yield "ffn_gate_up_exps.weight", (experts, 2 * inner, width)
    yield "ffn_down_exps.weight", (experts, width, inner)
    for norm in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        yield f"{norm}.weight", (width,)


def draft_tensors(m: Large) -> dict[str, tuple[int, ...]]:
    width, heads, ffn = m.draft
    heads = heads or m.heads
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, width),
        "output_norm.weight": (width,),
        "rope_freqs.weight": (256,),
        "nextn.pre_projection.weight": (width, 2 * m.width),
        "nextn.post_projection.weight": (m.width, width),
    }
    for i in range(4):
        d = 512 if i == 3 else 256
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q": (heads * d, width),
            "attn_q_norm": (d,),
            "attn_output": (width, heads * d),
            "post_attention_norm": (width,),
            "ffn_norm": (width,),
            "ffn_gate": (ffn, width),
            "ffn_up": (ffn, width),
            "ffn_down": (width, ffn),
            "post_ffw_norm": (width,),
            "layer_output_scale": (1,),
        }
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def weights_of(module: Module, source: str) -> list[Weight]:
    return [w for w in module.weights.values() if w.source == source]


def shapes(module: Module, source: str) -> dict[str, tuple[int, ...]]:
    """Shapes as a file has them: matrices of experts stacked."""
    return {w.names[0]: w.stored_shape for w in weights_of(module, source)}


def test_target_tensors(large: Large, module: Module) -> None:
    assert shapes(module, "target") == target_tensors(large)
    assert len(target_tensors(large)) == large.tensors


def test_parameters(large: Large, module: Module) -> None:
    total = sum(w.type.elements for w in weights_of(module, "target"))
    assert round(total / 1e9, 2) == large.parameters


def test_drafter_tensors(large: Large, module: Module) -> None:
    assert shapes(module, "draft") == draft_tensors(large)
    assert len(draft_tensors(large)) == 49


def test_caches(large: Large, module: Module) -> None:
    caches = {n: p for n, p in module.planes.items() if p.kind}
    per_token = sum(p.type.max_shape[0] * p.type.max_shape[2] for p in caches.values())
    assert per_token == large.kv_per_token
    assert len(caches) == 2 * len(large.owners)
    for i in large.owners:
        kv_heads, d = large.kind(i)
        windowed = large.kind(i) == large.swa
        for part in "kv":
            plane = caches[f"target.layers.{i}.{part}"]
            assert (plane.type.max_shape[0], plane.type.max_shape[2]) == (kv_heads, d)
            assert plane.ring == windowed
            assert plane.type.max_shape[1] == (large.window + 8 if windowed else 32768)
            assert plane.type.dtype == "f16"


def test_drafter_reads_the_last_caches(large: Large, module: Module) -> None:
    swa, full = large.kv_targets
    assert cache_reads(module, "draft") == [swa, swa, swa, full]


def test_last_layers_read_the_last_caches(large: Large, module: Module) -> None:
    swa, full = large.kv_targets
    wanted = [
        i if large.owns(i) else swa if large.kind(i) == large.swa else full
        for i in range(large.layers)
    ]
    assert cache_reads(module, "verify") == cache_reads(module, "plain_step") == wanted


def cache_reads(module: Module, program: str) -> list[int]:
    """The layer whose cache each attention of a program reads."""
    found = []
    for node in module.programs[program].nodes:
        if node.op.name == "attention":
            layer = int(node.inputs[2].split(".")[2])
            assert node.inputs[2:] == (f"@target.layers.{layer}.k", f"@target.layers.{layer}.v")
            found.append(layer)
    return found


def test_attention_looks_back_a_window_or_everything(large: Large, module: Module) -> None:
    def spans(program: str) -> list[int]:
        nodes = module.programs[program].nodes
        return [n.op.attrs()["span"] for n in nodes if n.op.name == "attention"]

    layers = [large.window if large.kind(i) == large.swa else 0 for i in range(large.layers)]
    assert spans("verify") == spans("plain_step") == layers
    # the last layer that appends to a cache only appends in a prompt chunk, the rest is left out
    assert spans("prefill") == layers[: len(large.owners) - 1]
    assert spans("draft") == [large.window - 1] * 3 + [0]  # the query's own position has no row


def test_rotary_positions(large: Large, module: Module) -> None:
    angles = [n for n in module.programs["verify"].nodes if n.op.name == "rope_angles"]
    swa, full = (n.op.attrs() for n in angles)
    assert (swa["head_dim"], swa["base"], swa["rotated"]) == (256, 1e4, 128)
    assert (full["head_dim"], full["base"], full["rotated"]) == (512, 1e6, 256)
    assert [n.inputs[1:] for n in angles] == [(), ("$target.rope_freqs",)]
    # a source without the tensor has it made: 64 of 256 pairs turn
    assert module.weights["target.rope_freqs"].made == ("rope_factors", 64)


def test_scale_softcap_and_suppressed_tokens(large: Large, module: Module) -> None:
    nodes = module.programs["verify"].nodes
    ops = {n.op.name: n.op.attrs() for n in reversed(nodes)}
    assert ops["embed"]["scale"] == pytest.approx(large.width**0.5)
    assert ops["softcap"]["cap"] == 30.0
    assert ops["attention"]["scale"] == 1.0
    suppressed = {"gemma4_12b": (258882, 258883)}
    assert ops["argmax"]["suppress"] == suppressed.get(large.name, ())
    draft = Counter(n.op.name for n in module.programs["draft"].nodes)
    assert draft["softcap"] == 0


def test_a_row_meets_its_experts_only(large: Large, module: Module) -> None:
    """Bytes and operations of a plain step are those of the active parameters."""
    program = module.programs["plain_step"]
    ops = Counter(n.op.name for n in program.nodes)
    expected = large.layers if large.experts else 0
    for name in ("top_experts", "experts_gated", "experts_down"):
        assert ops[name] == expected
    if large.experts is None:
        return
    experts, active, inner = large.experts
    costs = [
        node.op.cost(1, *module.operand_types(program, node))
        for node in program.nodes
        if node.op.name.startswith("experts_")
    ]
    each = 3 * large.width * inner
    assert sum(cost.flops for cost in costs) == 2 * large.layers * active * each
    stored = large.layers * active * each * 18 / 32  # q4_0
    assert stored < sum(cost.bytes for cost in costs) < 1.01 * stored
    used = sum(w.type.elements for w in weights_of(module, "target"))
    used -= large.layers * (experts - active) * each
    assert round(used / 1e9, 2) == 3.82


@pytest.mark.alone
def test_compiles_for_the_cpu_in_a_minute(large: Large, tmp_path: Path, kernel_cache: Path) -> None:
    start = time.perf_counter()
    options = CompileOptions(cache=kernel_cache / large.name)  # nothing is known yet
    compiled = compile_spec(SPECS / f"{large.name}.yaml", tmp_path / "large.cpu.memra", options)
    assert time.perf_counter() - start < 60
    assert (compiled.folder / "programs.so").is_file()
    weights = sum(w.bytes for w in compiled.manifest.weights)
    assert compiled.manifest.weight_bytes == weights


def test_centroid_head_and_second_embedding_on_a_gpu() -> None:
    """What only rows are looked up in lies as stored: the second embedding is 1.9 GB."""
    head = {"drafter.head.centroids": "{count: 2048, active: 32}"}
    options = CompileOptions("cuda:sm_90a", overrides=head)
    module = lower(*load(SPECS / "gemma4_e2b.yaml", options), target=options.target)
    layouts = {name: weight.type.layout for name, weight in module.weights.items()}
    assert layouts["target.per_layer_embed"] == "plain"
    assert layouts["target.embed"] == "tiles16"  # the head multiplies by it
    assert layouts["drafter.embed"] == "row"
    ops = {n.op.name: module.operand_types(module.programs["draft"], n)
           for n in module.programs["draft"].nodes}  # fmt: skip
    assert ops["top_clusters"][0].max_shape == (1, 2048)
    assert ops["argmax"][0].max_shape == (1, 32 * 128)

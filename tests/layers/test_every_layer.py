"""Every layer kind, from the example it documents: compiled against interpreted, verify and plain.

A kind is found by its class; nothing here lists them. The example's own numbers are used in a small
model around it, with random weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from memra_compiler.codegen.build import Toolchain, build_artifact
from memra_compiler.codegen.cache import KernelCache
from memra_compiler.codegen.toolchain import find_linker
from memra_compiler.compile import lower, spec_facts
from memra_compiler.interpret import Interpreter
from memra_compiler.ir.graph import Module
from memra_compiler.layers.attention import AttentionParams
from memra_compiler.layers.base import FfnParams, MixerParams
from memra_compiler.layers.query_attention import QueryAttentionParams
from memra_compiler.ops.formats import dequantise, random_bytes
from memra_compiler.spec import Spec, load_spec
from memra_compiler.spec.archs import Checkpoints
from memra_runtime.artifact import Manifest, slot
from memra_runtime.device.cpu import CpuDevice

WIDTH, VOCAB, CONTEXT = 64, 256, 96
FFN = {"ffn": {"gated": {"width": 64, "act": "gelu_tanh"}}}
KINDS = [
    pytest.param(kind, id=f"{family.noun}-{name}")
    for family in (MixerParams, FfnParams)
    for name, kind in family.kinds().items()
]


def example(kind: type) -> dict[str, Any]:
    """The documented example of a kind, as data."""
    return dict(yaml.safe_load(kind.example.replace("1e4", "1.0e+4").replace("1e6", "1.0e+6")))


def layer(**parts: Any) -> dict[str, Any]:
    return {"norms": "sandwich", "out_scale": True, **FFN, **parts}


def spec_around(kind: type) -> dict[str, Any]:
    """A small pipeline whose target (or drafter, for a kind without keys) has a layer of `kind`."""
    base = layer(**example(AttentionParams))
    reader = layer(**example(QueryAttentionParams))
    target, drafter = {"swa": base}, {"reads": reader}
    if issubclass(kind, FfnParams) or kind.owns_kv:
        target["probe"] = layer(**{**example(AttentionParams), **example(kind)})
    else:
        drafter["probe"] = layer(**example(kind))
    stack = {"width": WIDTH, "norm_eps": 1e-6, "formats": {"matrix": "f32", "embed": "f32"}}
    return {
        "memra": 1,
        "name": "probe",
        "target": {
            "arch": "gemma4", "vocab": VOCAB, "max_positions": 4096, **stack,
            "head": {"tied": True}, "layer_kinds": target, "layers": [*target, "swa"],
        },
        "drafter": {
            "kind": "chained", "arch": "gemma4-assistant", **stack,
            "input": {"concat": ["target_embed", "carry"]},
            "carry": {"from": "target.hidden_post_norm", "via": "post_projection"},
            "head": {"tied": True}, "layer_kinds": drafter, "layers": [*drafter],
        },
        "round": {"depth": {"max": 3}},
        "runtime": {"max_context": CONTEXT, "kv": "f32"},
    }  # fmt: skip


def random_weights(module: Module) -> dict[str, np.ndarray]:
    """Stored bytes of small random weights, and ones for norms."""
    rng = np.random.default_rng(3)
    stored = {}
    for name, weight in module.weights.items():
        data = random_bytes(weight.type, rng)
        if weight.type.dtype == "f32":
            size = weight.type.max_shape[-1]
            values = data.view(np.float32)
            scale = values / np.sqrt(size) if len(weight.type.shape) > 1 else 1 + values / 8
            data = scale.astype(np.float32).view(np.uint8)
        stored[name] = data
    return stored


class Probe:
    """The pipeline around a kind, compiled and interpreted on the same weights."""

    def __init__(self, kind: type, folder: Path, cache: Path) -> None:
        path = folder / "probe.yaml"
        path.write_text(yaml.safe_dump(spec_around(kind), sort_keys=False), encoding="utf-8")
        self.spec: Spec = load_spec(path)
        self.module = lower(self.spec, Checkpoints())
        stored = random_weights(self.module)
        values = {n: dequantise(stored[n], w.type) for n, w in self.module.weights.items()}
        self.reference = Interpreter(self.module, values)
        tools = Toolchain(find_linker(), KernelCache(cache))
        self.manifest: Manifest
        self.manifest, _ = build_artifact(
            self.module, spec_facts(self.spec), folder / "probe.memra", tools, lambda *_: None
        )
        self.device = CpuDevice(self.manifest, folder / "probe.memra", list(stored.values()))

    def put(self, tokens: list[int], **counters: int) -> None:
        ours = {name: self.device.plane(name) for name in ("batch", "prompt", "state")}
        for planes in (self.reference.planes, ours):
            for name in ("batch", "prompt"):
                planes[name][: len(tokens)] = tokens
            for name, value in counters.items():
                planes["state"][slot(name)] = value

    def run(self, program: str) -> None:
        self.reference.run(program)
        self.device.launch(f"run_{program}")


@pytest.mark.parametrize("kind", KINDS)
def test_kind_agrees_with_interpreter_and_rows_are_exact(
    kind: type, tmp_path: Path, kernel_cache: Path
) -> None:
    probe = Probe(kind, tmp_path, kernel_cache)
    logits = probe.module.programs["verify"].results[0]
    tokens = [5, 17, 250, 3]

    probe.put([2, 9, 30, 44, 7], rows=5, capacity=CONTEXT)
    probe.run("prefill")
    probe.put(tokens, rows=4, position=5)
    probe.run("verify")
    rows = probe.device.value("verify", logits)[:4].copy()
    expected = probe.reference.values["verify"][logits][:4]
    np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-4 * np.abs(expected).max())

    for t, token in enumerate(tokens):  # each verified row has the bits of a plain step
        probe.put([token], rows=1, position=5 + t)
        probe.device.launch("run_plain_step")
        assert probe.device.value("plain_step", logits)[0].tobytes() == rows[t].tobytes()

    probe.put([tokens[0]], position=5, step=0)
    for planes in (probe.reference.planes, {"forced": probe.device.plane("forced")}):
        planes["forced"][:] = -1
    carry = np.linspace(-1, 1, WIDTH, dtype=np.float32)
    probe.reference.planes["carry"][:] = carry
    probe.device.plane("carry")[:] = carry
    probe.run("draft")
    np.testing.assert_allclose(
        probe.device.plane("carry"), probe.reference.planes["carry"], rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_kind_documents_itself(kind: type) -> None:
    assert kind.__doc__
    assert list(example(kind)) == [_section(kind)]


def _section(kind: type) -> str:
    return "ffn" if issubclass(kind, FfnParams) else "mixer"

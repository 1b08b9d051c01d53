"""Architecture tables: weight names, and what another file's metadata must say."""

from __future__ import annotations

import pytest
from bad_specs import ROOT
from spec_fakes import CONFIG_31B, TINY

from memra_compiler.spec import Spec, arch_table, known_archs, load_spec
from memra_runtime.checkpoint import Checkpoint, Expectation, check_metadata, open_checkpoint
from memra_runtime.errors import MemraError


def test_known_archs_and_their_spellings() -> None:
    assert (known_archs("target"), known_archs("drafter")) == (("gemma4",), ("gemma4-assistant",))
    assert arch_table("gemma4_unified_text").name == "gemma4"
    assert arch_table("gemma4_assistant").name == "gemma4-assistant"
    with pytest.raises(KeyError):
        arch_table("llama")


def test_weight_names_list_gguf_first() -> None:
    names = arch_table("gemma4").weight_names

    assert names("post_attention_norm", 3) == (
        "blk.3.post_attention_norm.weight",
        "model.layers.3.post_attention_layernorm.weight",
        "model.language_model.layers.3.post_attention_layernorm.weight",
        "language_model.model.layers.3.post_attention_layernorm.weight",
    )
    assert names("out_scale", 0)[:2] == ("blk.0.layer_output_scale.weight",
                                         "model.layers.0.layer_scalar")  # fmt: skip
    assert names("rope_freqs") == ("rope_freqs.weight",)
    assert names("head")[:2] == ("output.weight", "lm_head.weight")
    with pytest.raises(KeyError):
        arch_table("gemma4-assistant").weight_names("k", 0)


def test_both_spellings_of_the_projections() -> None:
    assert arch_table("gemma4-assistant").weight_names("pre_projection") == (
        "nextn.pre_projection.weight", "mtp.pre_projection.weight", "pre_projection.weight"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "file", "layers"),
    [
        ("gemma4", "gemma4-tiny-q8_0.gguf", 6),
        ("gemma4-assistant", "gemma4-tiny-assistant-q8_0.gguf", 4),
    ],
)
def test_names_cover_every_tensor_of_the_bundled_files(arch: str, file: str, layers: int) -> None:
    table = arch_table(arch)
    known = {name for role in table.roles for name in table.weight_names(role)}
    for layer in range(layers):
        known |= {name for role in table.layer_roles for name in table.weight_names(role, layer)}

    with open_checkpoint(TINY / file) as checkpoint:
        assert [name for name in checkpoint.tensors if name not in known] == []


def check(spec: Spec, section: str, checkpoint: Checkpoint) -> None:
    expected = spec.expected(section)
    check_metadata(checkpoint, [Expectation(e.keys, e.value, str(e.path)) for e in expected])


def test_bundled_files_meet_what_the_spec_expects() -> None:
    spec = load_spec(TINY / "gemma4_tiny.yaml")
    big = load_spec(ROOT / "model_specs" / "gemma4_31b.yaml")
    files = {"target": "gemma4-tiny-q8_0.gguf", "drafter": "gemma4-tiny-assistant-q8_0.gguf"}

    for section, file in files.items():
        with open_checkpoint(TINY / file) as checkpoint:
            check(spec, section, checkpoint)
            with pytest.raises(MemraError):
                check(big, section, checkpoint)


def test_config_keys_meet_what_the_spec_expects() -> None:
    spec = load_spec(ROOT / "model_specs" / "gemma4_31b.yaml")
    checked = 0
    for wanted in spec.expected("target"):
        for key in wanted.keys:
            if key not in CONFIG_31B:
                continue
            single = isinstance(wanted.value, list) and not isinstance(CONFIG_31B[key], list)
            assert CONFIG_31B[key] == (wanted.value[0] if single else wanted.value), key
            checked += 1

    assert checked >= 10

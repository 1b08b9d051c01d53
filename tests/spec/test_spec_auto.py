"""`auto`, and weight files that contradict a spec."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_specs import GOOD, ROOT
from spec_fakes import TINY, FakeTensor, bundled, config_31b, copy_of

from memra_compiler.spec import Checkpoints, Spec, load_spec
from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.errors import MemraError

#: What a checkpoint does not know: how things are wired, and what the user wants.
WRITTEN = (
    "memra", "name", "arch", "weights", "formats", "matrix", "norm", "kind", "input", "carry",
    "from", "via", "positions", "kv_target", "visible_rows", "max", "policy", "floor", "short",
    "deep", "boundary", "accept", "max_context", "kv", "activations", "concat", "fraction",
)  # fmt: skip


def all_auto() -> str:
    """Return the tiny spec with `auto` for everything its GGUF files know."""
    head, tail = GOOD.split("\nround:")
    lines = []
    for line in head.splitlines():
        if not re.search(r"\b(formats|concat|from|positions):", line):
            line = re.sub(
                r"\b([a-z_]+): (\[[^]]*\]|[^\s{},]+)",
                lambda m: m[0] if m[1] in WRITTEN else f"{m[1]}: auto",
                line,
            )
        lines.append(line)
    return "\n".join(lines) + "\nround:" + tail


def load(tmp_path: Path, text: str, checkpoints: Checkpoints) -> Spec:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return load_spec(path, checkpoints=checkpoints)


def report(tmp_path: Path, text: str, checkpoints: Checkpoints) -> str:
    with pytest.raises(MemraError) as caught:
        load(tmp_path, text, checkpoints)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_auto_everywhere_gives_the_written_spec(tmp_path: Path) -> None:
    text = all_auto()

    assert text.count("auto") > 50
    assert (
        load(tmp_path, text, bundled()).resolved()
        == load_spec(TINY / "gemma4_tiny.yaml").resolved()
    )


def test_shipped_tiny_spec_agrees_with_its_files() -> None:
    with (
        open_checkpoint(TINY / "gemma4-tiny-q8_0.gguf") as target,
        open_checkpoint(TINY / "gemma4-tiny-assistant-q8_0.gguf") as drafter,
    ):
        checkpoints = Checkpoints(target=target, drafter=drafter)
        spec = load_spec(TINY / "gemma4_tiny.yaml", checkpoints=checkpoints)

    assert spec.digest == load_spec(TINY / "gemma4_tiny.yaml").digest


def test_written_31b_agrees_with_a_config_of_global_keys() -> None:
    checkpoints = Checkpoints(target=config_31b())

    spec = load_spec(ROOT / "model_specs" / "gemma4_31b.yaml", checkpoints=checkpoints)

    assert len(spec.target.layers) == 60


def test_fraction_is_auto_from_a_config(tmp_path: Path) -> None:
    text = (ROOT / "model_specs" / "gemma4_31b.yaml").read_text().replace("0.25", "auto", 1)

    spec = load(tmp_path, text, Checkpoints(target=config_31b()))

    assert spec.resolved()["target"]["layer_kinds"]["full"]["mixer"]["attention"]["rope"] == {
        "base": 1e6, "fraction": 0.25, "factors": "rope_freqs"
    }  # fmt: skip


def test_auto_without_a_checkpoint_names_the_option(tmp_path: Path) -> None:
    text = report(tmp_path, GOOD.replace("width: 128\n", "width: auto\n"), Checkpoints())

    assert "`drafter.width` is `auto`, but there is no checkpoint" in text
    assert "hint: name the file in `drafter.weights`, give it with `--weights`" in text


def test_auto_that_the_file_does_not_say(tmp_path: Path) -> None:
    text = report(tmp_path, GOOD.replace("fraction: 0.25", "fraction: auto", 1), bundled())

    assert text == (
        "error[auto]: `target.layer_kinds.full.mixer.attention.rope.fraction` is `auto`, but "
        "weights/fake.gguf does not say it\n"
        "  --> spec.yaml:44:39\n"
        "   |\n"
        "44 |           rope: {base: 1e6, fraction: auto, factors: rope_freqs}\n"
        "   |                                       ^^^^ write the value"
    )


def test_auto_that_makes_no_sense_names_its_origin(tmp_path: Path) -> None:
    target = copy_of("gemma4-tiny-q8_0.gguf", gemma4__embedding_length=0)
    text = report(
        tmp_path, GOOD.replace("width: 256\n", "width: auto\n"), Checkpoints(target=target)
    )

    assert "`target.width` cannot be 0" in text
    assert "note: `auto` was read from `gemma4.embedding_length` of fake.gguf" in text


def test_contradiction_shows_both_values_and_both_places(tmp_path: Path) -> None:
    text = report(tmp_path, GOOD.replace("width: 256\n", "width: 512\n", 1), bundled())

    assert text == (
        "error[weights-mismatch]: `target.width` is 512 in the spec, but 256 in the weights\n"
        "  --> spec.yaml:11:10\n"
        "   |\n"
        "11 |   width: 512\n"
        "   |          ^^^ the weights say 256\n"
        "note: 256 comes from `gemma4.embedding_length` of fake.gguf\n"
        "hint: write `width: 256` or `width: auto`"
    )


def test_default_that_the_file_contradicts(tmp_path: Path) -> None:
    text = report(tmp_path, GOOD.replace("softcap: 30.0, ", ""), bundled())

    assert "`target.head.softcap` is null in the spec, but 30 in the weights" in text
    assert "--> spec.yaml:15:3" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value_from: key", "value_from: own", "value_from` is own in the spec, but key"),
        ("out_scale: true", "out_scale: false", "out_scale` is false in the spec, but true"),
        ("qk_norm: rms", "qk_norm: none", "qk_norm` is none in the spec, but rms"),
        ("tied: true", "tied: false", "`target.head.tied` is false in the spec, but true"),
        ("base: 1e4", "base: 2e4", "rope.base` is 20000 in the spec, but 10000"),
        (", factors: rope_freqs", "", "rope.factors` is null in the spec, but rope_freqs"),
        ("swa, swa, full]", "swa, full]", "the spec has 5 layers, the weights have 6"),
        ("swa, swa, full]", "swa, full, swa]", "layer 4 is `full` in the spec, but `swa`"),
        ("suppress_tokens: []", "suppress_tokens: [5]", "is [5] in the spec, but [] in"),
        ("act: gelu_tanh", "act: silu", "act` is silu in the spec, but gelu_tanh in the weights"),
    ],
)
def test_contradictions(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in report(tmp_path, GOOD.replace(old, new, 1), bundled())


def test_per_layer_arrays_are_checked_layer_by_layer(tmp_path: Path) -> None:
    target = copy_of("gemma4-tiny-q8_0.gguf", gemma4__attention__head_count_kv=[2, 2, 2, 4, 2, 1])

    text = report(tmp_path, GOOD, Checkpoints(target=target))

    assert (
        "layers 0 and 3 are both `swa`, but their `kv_heads` differs in the weights: 2 and 4"
        in (text)
    )
    assert "--> spec.yaml:18:5" in text


def test_pattern_is_checked_layer_by_layer(tmp_path: Path) -> None:
    pattern = [True, True, False, True, True, False]
    target = copy_of("gemma4-tiny-q8_0.gguf", gemma4__attention__sliding_window_pattern=pattern)

    text = report(tmp_path, GOOD, Checkpoints(target=target))

    assert "layer 2 is `swa` in the spec, but `full` by the weights" in text


def test_two_windowed_kinds_follow_the_written_order(tmp_path: Path) -> None:
    kind = GOOD[GOOD.index("    swa:") : GOOD.index("    full:")]
    text = GOOD.replace(kind, kind + kind.replace("    swa:", "    wide:"), 1)
    text = text.replace("layers: [swa, swa,", "layers: [wide, swa,", 1)

    assert load(tmp_path, text, bundled()).target.layers[:2] == ("wide", "swa")
    wrong = report(tmp_path, text.replace("swa, swa, full]", "swa, full, wide]", 1), bundled())
    assert "layer 4 is `full`, but in the weights it is windowed" in wrong
    auto = report(tmp_path, re.sub(r"layers: \[wide.*", "layers: auto", text), bundled())
    assert "`target.layers` is `auto`, but weights/fake.gguf does not say it" in auto


def test_drafter_of_another_target(tmp_path: Path) -> None:
    drafter = copy_of(
        "gemma4-tiny-assistant-q8_0.gguf", **{"gemma4-assistant.embedding_length_out": 320}
    )
    text = report(tmp_path, GOOD, Checkpoints(drafter=drafter))

    assert "`target.width` is 256 in the spec, but 320 in the weights" in text
    assert "320 comes from `gemma4-assistant.embedding_length_out` of fake.gguf" in text
    both = Checkpoints(target=bundled().target, drafter=drafter)
    auto = report(tmp_path, GOOD.replace("width: 256\n", "width: auto\n", 1), both)
    assert "`target.width` is 256 in the spec, but 320 in the weights" in auto


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    files = bundled()
    text = report(tmp_path, GOOD, Checkpoints(target=files.drafter, drafter=files.target))

    assert "the spec wants a `gemma4` model, but weights/fake.gguf is `gemma4-assistant`" in text
    assert "hint: the target's and the drafter's files are swapped" in text


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("gemma4__embedding_length_per_layer_input",
         "this checkpoint has per-layer embeddings 4 wide, the spec has none"),
        ("gemma4__attention__shared_kv_layers",
         "layer 2 is `swa`, but in the weights it reads the keys and values of an earlier layer"),
    ],
)  # fmt: skip
def test_parts_that_the_spec_lacks(tmp_path: Path, key: str, what: str) -> None:
    target = copy_of("gemma4-tiny-q8_0.gguf", **{key: 4})
    text = report(tmp_path, GOOD, Checkpoints(target=target))
    assert what in text
    assert key.replace("__", ".") in text


def moe_files(**changes: Any) -> Checkpoints:
    """The bundled target, as if its layers had four experts of which a row meets two."""
    tensors = {
        f"blk.{i}.{name}": FakeTensor(f"blk.{i}.{name}", shape)
        for i in range(6)
        for name, shape in {
            "ffn_gate_inp.weight": (4, 256),
            "ffn_gate_exps.weight": (4, 64, 256),
            "ffn_down_exps.weight": (4, 256, 64),
        }.items()
    }
    keys = {"gemma4__expert_count": 4, "gemma4__expert_used_count": 2, **changes}
    target = copy_of("gemma4-tiny-q8_0.gguf", **keys)
    target.tensors.update(tensors)
    return Checkpoints(target=target, drafter=bundled().drafter)


def with_experts(fields: str) -> str:
    """The good spec, its target's layers having experts."""
    gated = "ffn: {gated: {width: 1024, act: gelu_tanh}}"
    return GOOD.replace(gated, f"ffn: {{moe: {{{fields}, act: gelu_tanh}}}}")


def test_experts_are_read_from_keys_and_tensors(tmp_path: Path) -> None:
    fields = "experts: auto, active: auto, expert_width: auto, dense_width: auto, gate_up: auto"

    spec = load(tmp_path, with_experts(fields), moe_files())

    ffn = spec.target.layer_kinds["full"].ffn
    assert ffn.model_dump() == {
        "experts": 4, "active": 2, "expert_width": 64, "dense_width": 1024, "act": "gelu_tanh",
        "gate_up": "split",
    }  # fmt: skip


def test_experts_that_the_weights_contradict(tmp_path: Path) -> None:
    fields = "experts: 4, active: 3, expert_width: 32, dense_width: 1024"

    text = report(tmp_path, with_experts(fields), moe_files())

    assert "active` is 3 in the spec, but 2 in the weights" in text
    assert "2 comes from `gemma4.expert_used_count` of fake.gguf" in text
    assert "expert_width` is 32 in the spec, but 64 in the weights" in text
    assert "gate_up` is fused in the spec, but split in the weights" in text


def test_a_feed_forward_part_of_another_kind(tmp_path: Path) -> None:
    fields = "experts: 4, active: 2, expert_width: 64, dense_width: 1024"

    dense = report(tmp_path, with_experts(fields), bundled())
    experts = report(tmp_path, GOOD, moe_files())

    assert "the layers of kind `swa` have no experts in the weights" in dense
    assert "must be `gated`" in dense
    assert "the layers of kind `full` have experts beside a dense branch in the weights" in experts
    assert "hint: see `gemma4.expert_count` of fake.gguf" in experts


def test_older_spelling_of_a_drafter(tmp_path: Path) -> None:
    drafter = copy_of("gemma4-tiny-assistant-q8_0.gguf")
    drafter.arch = "gemma4_assistant"
    drafter.metadata = {
        key.replace("gemma4-assistant", "gemma4_assistant").replace(
            "embedding_length_out", "n_embd_backbone"
        ): value
        for key, value in drafter.metadata.items()
    }

    checkpoints = Checkpoints(target=bundled().target, drafter=drafter)

    assert load(tmp_path, all_auto(), checkpoints).drafter.width == 128


@pytest.mark.parametrize("value", ["x", -1, [1], {"a": 1}])
def test_odd_metadata_is_an_error_of_ours_or_none(tmp_path: Path, value: object) -> None:
    files, text = bundled(), all_auto()
    for section, file in (
        ("target", "gemma4-tiny-q8_0.gguf"), ("drafter", "gemma4-tiny-assistant-q8_0.gguf")
    ):  # fmt: skip
        for key in copy_of(file).metadata:
            whole = getattr(files, section)
            odd = replace(whole, metadata={**whole.metadata, key: value})
            try:
                load(tmp_path, text, Checkpoints(**{**vars(files), section: odd}))
            except MemraError:
                continue


def test_suppressed_tokens_outside_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    target = copy_of("gemma4-tiny-q8_0.gguf", tokenizer__ggml__suppress_tokens=[7, -1, 9999, 7])
    text = GOOD.replace("suppress_tokens: []", "suppress_tokens: auto")

    spec = load(tmp_path, text, Checkpoints(target=target))

    assert spec.target.head.suppress_tokens == (7,)

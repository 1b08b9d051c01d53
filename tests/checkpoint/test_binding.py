"""Binding: every tensor of a file is bound, ignored for a reason, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_files import DRAFT, F16, F32, TARGET, gguf

from memra_runtime.checkpoint import Checkpoint, WantedTensor, bind, open_checkpoint
from memra_runtime.errors import MemraError


def toy(tmp_path: Path, names: dict[str, tuple[int, ...]], kind: int = F32) -> Checkpoint:
    path = tmp_path / "toy.gguf"
    size = 4 if kind == F32 else 2
    tensors = []
    for name, shape in names.items():
        count = 1
        for dimension in shape:
            count *= dimension
        tensors.append((name, shape, kind, bytes(count * size)))
    path.write_bytes(gguf({"general.name": "Toy", "general.quantized_by": "someone"}, tensors))
    return open_checkpoint(path)


def refused(checkpoint: Checkpoint, wanted: list[WantedTensor], **options: str) -> str:
    with pytest.raises(MemraError) as caught:
        bind(checkpoint, wanted, ignored=options)
    return str(caught.value)


def test_a_whole_file_binds_and_reports() -> None:
    with open_checkpoint(TARGET) as checkpoint:
        wanted = [
            WantedTensor(f"t/{info.name}", (info.name,), info.shape)
            for info in checkpoint.tensors.values()
            if info.name != "rope_freqs.weight"
        ]
        wanted += [WantedTensor("head", ("output.weight",), (4096, 256), optional=True)]
        wanted += [WantedTensor("v5", ("blk.5.attn_k.weight",), (128, 256))]  # read by two ids
        binding = bind(checkpoint, wanted, ignored={"rope_*": "computed by the compiler"})
    assert binding["t/output_norm.weight"] is checkpoint.tensors["output_norm.weight"]
    assert binding["v5"] is binding["t/blk.5.attn_k.weight"]
    assert "head" not in binding
    assert binding.absent == ("head",)
    report = binding.report()
    assert "gemma4-tiny-q8_0.gguf: 85 of 86 tensors bound" in report
    assert "6  blk.{0-5}.attn_q.weight" in report
    assert "5  blk.{0-4}.attn_v.weight" in report
    assert "absent (optional): head" in report
    assert "ignored: rope_freqs.weight: computed by the compiler" in report


def test_accepted_spellings_are_tried_in_order(tmp_path: Path) -> None:
    checkpoint = toy(tmp_path, {"mtp.pre_projection.weight": (4, 8)})
    names = ("nextn.pre_projection.weight", "mtp.pre_projection.weight")
    assert bind(checkpoint, [WantedTensor("pre", names, (4, 8))])["pre"].name == names[1]


def test_matrices_of_experts_are_stacked_in_the_file(tmp_path: Path) -> None:
    name = "blk.0.ffn_down_exps.weight"
    wanted = [WantedTensor("down", (name,), (4 * 8, 32), stacked=4)]
    stored = {"right": (4, 8, 32), "flat": (32, 32), "other": (8, 4, 32)}
    files = {}
    for kind, shape in stored.items():
        (tmp_path / kind).mkdir()
        files[kind] = toy(tmp_path / kind, {name: shape})

    assert bind(files["right"], wanted)["down"].name == name
    for kind in ("flat", "other"):
        text = refused(files[kind], wanted)
        assert f"`{name}` has shape {list(stored[kind])}, wanted [4, 8, 32]" in text
    (tmp_path / "none").mkdir()
    text = refused(toy(tmp_path / "none", {"a": (1,)}), wanted)
    assert "wanted shape [4, 8, 32]" in text


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    names: dict[str, tuple[int, ...]] = {
        "blk.0.attn_q.weight": (8, 4), "blk.1.attn_q.weight": (4, 8),
        "blk.0.attn_kk.weight": (4, 8), "a": (2,), "b": (2,), "norm": (4,),
    }  # fmt: skip
    wanted = [
        WantedTensor("q0", ("blk.0.attn_q.weight",), (4, 8)),
        WantedTensor("q1", ("blk.1.attn_q.weight",), (4, 8)),
        WantedTensor("k0", ("blk.0.attn_k.weight", "old.0.k"), (4, 8)),
        WantedTensor("k1", ("blk.1.attn_k.weight",), (4, 8)),
        WantedTensor("ab", ("a", "b"), (2,)),
        WantedTensor("norm", ("norm",), (4,), format="q8_0"),
    ]
    message = refused(toy(tmp_path, names), wanted)
    for expected in (
        "2 tensors are missing: `blk.{0-1}.attn_k.weight`",
        "wanted shape [4, 8]",
        "also looked for `old.0.k`",
        "the file has 6 tensors; 6 are wanted, 2 missing",
        "written by: name 'Toy', quantized_by 'someone'",
        "did you mean `blk.0.attn_kk.weight`?",
        "`blk.0.attn_q.weight` has shape [8, 4], wanted [4, 8] (transposed)",
        "`ab` is in the file as `a` and as `b`",
        "`norm` is stored as f32, wanted q8_0",
        "1 tensors of the file are read by nothing",
        "note: blk.0.attn_kk.weight",
    ):
        assert expected in message


def test_many_missing_tensors_stay_readable(tmp_path: Path) -> None:
    wanted = [
        WantedTensor(f"{i}.{part}", (f"blk.{i}.{part}.weight",), (4, 4))
        for part in "abcdefghij"
        for i in range(200)
    ]
    message = refused(toy(tmp_path, {"x": (1,)}), wanted)
    assert "200 tensors are missing: `blk.{0-199}.a.weight`" in message
    assert "800 more tensors are missing" in message
    assert len(message.splitlines()) < 40


def test_unsupported_format_is_an_error_for_a_wanted_tensor(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(gguf({}, [("a", (4,), 999, bytes(8))]))
    message = refused(open_checkpoint(path), [WantedTensor("a", ("a",), (4,))])
    assert "`a` is stored as ggml_type_999; readable: bf16" in message


def test_declared_format_is_accepted(tmp_path: Path) -> None:
    checkpoint = toy(tmp_path, {"a": (4,)}, F16)
    assert bind(checkpoint, [WantedTensor("a", ("a",), (4,), "f16")])["a"].format == "f16"


def test_full_text_of_an_error() -> None:
    with open_checkpoint(DRAFT) as checkpoint:
        wanted = [
            WantedTensor(f"t/{info.name}", (info.name,), info.shape)
            for info in checkpoint.tensors.values()
            if "projection" not in info.name
        ]
        wanted.append(WantedTensor("pre", ("nextn.pre_projections.weight",), (128, 512)))
        message = refused(checkpoint, wanted).replace(str(DRAFT.parent), "TINY")
    place = "  --> TINY/gemma4-tiny-assistant-q8_0.gguf\n"
    assert message == (
        "error[tensor-missing]: `nextn.pre_projections.weight` is missing\n" + place +
        "note: wanted shape [128, 512]\n"
        "note: the file has 49 tensors; 48 are wanted, 1 missing\n"
        "note: written by: name 'Gemma4 Tiny Assistant', size_label '1.3M'\n"
        "hint: did you mean `nextn.pre_projection.weight`, `nextn.post_projection.weight`?\n"
        "\n"
        "error[tensor-unused]: 2 tensors of the file are read by nothing\n" + place +
        "note: nextn.post_projection.weight\n"
        "note: nextn.pre_projection.weight\n"
        "hint: the spec may describe another model, or miss a part of this one"
    )  # fmt: skip

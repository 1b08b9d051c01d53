"""Drafters without a head for every token: one that its file has trimmed, one that has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from cli_tools import rewrite

from memra_compiler.compile import CompileOptions, compile_spec
from memra_compiler.rounds.programs import build_module
from memra_compiler.spec import load_spec
from memra_compiler.spec.archs import Checkpoints
from memra_runtime.errors import MemraError
from memra_runtime.model import Model, load_model
from memra_runtime.session import Session
from tiny_pair import TINY_DRAFT, TINY_SPEC, TINY_TARGET

ROWS, TOKENS, PROMPT = 200, 64, "The :mod:`json` module provides"
EMBED = "token_embd.weight"


def compiled(folder: Path, cache: Path, draft: Path, overrides: dict[str, str]) -> Path:
    options = CompileOptions(draft=draft, overrides=overrides, cache=cache)
    return compile_spec(TINY_SPEC, folder / "tiny.cpu.memra", options).folder


def drafted(model: Model) -> tuple[list[int], list[list[int]], float]:
    """Text, drafts of each round, acceptance."""
    session = Session(model.device)
    ids = model.tokenizer.encode(PROMPT)
    session.prime(ids, 2 * TOKENS)
    tokens, drafts = [], []
    while len(tokens) < TOKENS:
        tokens += session.step()
        count = model.device.get("drafted") + 1
        drafts.append(model.device.plane("batch")[1:count].tolist())
    done = model.device.get("total_accepted") / model.device.get("total_drafted")
    return tokens, drafts, done


@pytest.fixture(scope="module")
def frequent(tiny_model: Model) -> np.ndarray:
    """Tokens that the text is made of, and others: what a file's own trim would hold."""
    said = np.array(drafted(tiny_model)[0])
    others = np.random.default_rng(4).permutation(4096)
    both = np.concatenate([said, others])
    unique = both[np.sort(np.unique(both, return_index=True)[1])]
    return np.sort(unique[:ROWS])  # as EAGLE has it: ascending, so offsets never fall


def trimmed_file(path: Path, ids: np.ndarray, values: np.ndarray) -> Path:
    """The tiny drafter with the rows of `ids` as its head, and a map."""
    table = next(t for t in gguf.GGUFReader(TINY_DRAFT).tensors if t.name == EMBED)
    rows = (np.array(table.data)[ids], table.tensor_type)
    return rewrite(TINY_DRAFT, path, drop=[EMBED], add={"output.weight": rows, "d2t": values})


def mapped(kind: str, rows: int = ROWS) -> dict[str, str]:
    return {"drafter.head": f"{{tied: false, map: {{rows: {rows}, kind: {kind}}}}}"}


@pytest.mark.parametrize(("kind", "dtype"), [("absolute", np.int32), ("offset", np.int64)])
def test_a_map_leads_to_the_drafts_of_the_same_trim(
    kernel_cache: Path, tmp_path: Path, frequent: np.ndarray, kind: str, dtype: type
) -> None:
    """The file's own trim, and ours by a ranks file: the same rows, the same drafts."""
    values = frequent - np.arange(ROWS) if kind == "offset" else frequent
    draft = trimmed_file(tmp_path / "d2t.gguf", frequent, values.astype(dtype))
    folder = compiled(tmp_path, kernel_cache, draft, mapped(kind))
    theirs = load_model(folder, TINY_TARGET, draft)
    ranks = tmp_path / "ranks.txt"
    order = np.roll(frequent, 1)  # in any other order: no logits are equal
    ranks.write_text("".join(f"{i}\n" for i in order))
    trim = {"drafter.head.trim": f"{{ranks: {ranks}, spare: 0}}"}
    folder = compiled(tmp_path / "ours", kernel_cache, TINY_DRAFT, trim)
    ours = load_model(folder, TINY_TARGET, TINY_DRAFT)
    assert drafted(theirs) == drafted(ours)
    assert drafted(theirs)[2] > 0.3


@pytest.mark.parametrize(
    ("damage", "dtype", "what"),
    [
        (lambda ids: np.r_[ids[:-1], 4096], np.int64, "row 199 would be token 4096, outside"),
        (lambda ids: np.r_[-1, ids[1:]], np.int32, "row 0 would be token -1, outside"),
        (lambda ids: np.r_[ids[:-1], ids[0]], np.int64, "belongs to rows 0 and 199"),
        (lambda ids: ids - np.arange(ROWS), np.int64, "make sense as `kind: offset`"),
        (lambda ids: ids, np.float32, "is stored as f32; a map holds i32 or i64"),
    ],
)
def test_a_wrong_map_is_refused_at_load(
    kernel_cache: Path, tmp_path: Path, frequent: np.ndarray, damage: Callable[[np.ndarray],
    np.ndarray], dtype: type, what: str,
) -> None:  # fmt: skip
    draft = trimmed_file(tmp_path / "d2t.gguf", frequent, damage(frequent).astype(dtype))
    folder = compiled(tmp_path, kernel_cache, draft, mapped("absolute"))
    with pytest.raises(MemraError, match=what):
        load_model(folder, TINY_TARGET, draft)


def test_a_map_of_another_size_or_none_is_refused(
    kernel_cache: Path, tmp_path: Path, frequent: np.ndarray
) -> None:
    draft = trimmed_file(tmp_path / "d2t.gguf", frequent, frequent[:-1].astype(np.int64))
    folder = compiled(tmp_path, kernel_cache, draft, mapped("absolute"))
    with pytest.raises(MemraError, match=r"`d2t` has shape \[199\], wanted \[200\]"):
        load_model(folder, TINY_TARGET, draft)
    without = rewrite(draft, tmp_path / "without.gguf", drop=["d2t"])
    with pytest.raises(MemraError, match="`d2t` is missing"):
        load_model(folder, TINY_TARGET, without)


#: A drafter as wide as the target, without a table: it multiplies with the target's.
WIDE = {"drafter.width": "256"}


@pytest.fixture(scope="module")
def wide_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights for such a drafter, in the shapes that a module of it asks for."""
    overrides = WIDE | {"drafter.head": "{tied: true, table: target}"}
    module = build_module(load_spec(TINY_SPEC, overrides=overrides), Checkpoints())
    rng = np.random.default_rng(6)
    add = {}
    for weight in module.weights.values():
        if weight.source == "draft" and not weight.made:
            shape = weight.type.max_shape
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            values = (rng.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)
            kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else None
            add[weight.names[0]] = (gguf.quantize(values, kind), kind) if kind else values
    old = [t.name for t in gguf.GGUFReader(TINY_DRAFT).tensors if t.name != "rope_freqs.weight"]
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return rewrite(
        TINY_DRAFT, path, drop=old, add=add,
        metadata={"gemma4-assistant.embedding_length": 256},
    )  # fmt: skip


def test_a_drafter_without_a_table_uses_the_targets(
    tiny_model: Model, kernel_cache: Path, tmp_path: Path, wide_draft: Path
) -> None:
    """Whole, and trimmed to all tokens in another order: the same drafts, and the plain text."""
    head = {"drafter.head": "{tied: true, table: target}"}
    whole = compiled(tmp_path, kernel_cache, wide_draft, WIDE | head)
    first = drafted(load_model(whole, TINY_TARGET, wide_draft))
    ranks = tmp_path / "ranks.txt"
    ranks.write_text("".join(f"{i}\n" for i in np.random.default_rng(5).permutation(4096)))
    head = {"drafter.head": f"{{tied: true, table: target, trim: {{ranks: {ranks}, spare: 0}}}}"}
    trimmed = compiled(tmp_path / "trimmed", kernel_cache, wide_draft, WIDE | head)
    model = load_model(trimmed, TINY_TARGET, wide_draft)
    assert drafted(model)[:2] == first[:2]
    said = drafted(tiny_model)[0]
    assert first[0][:TOKENS] == said[:TOKENS], "a drafter may never change the text"
    entry = next(w for w in model.manifest.weights if w.of_rows)
    assert (entry.source, entry.of_rows) == ("target", 4096)

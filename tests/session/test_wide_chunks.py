"""Prompt chunks that are wider than a ring has room for, as on a GPU, against narrow ones.

On the CPU a row has the same bits in any step, so whatever chunks a prompt ran in, every row that
is left, the hidden one and the next token must be the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from short_context import CHUNK, CONTEXT, DEPTH, RING, WINDOW, Plain, left, refusal
from test_random_sessions import Lives

from memra_compiler.compile import CompileOptions, compile_spec
from memra_compiler.rounds import programs
from memra_runtime.check.rows import ring_edges
from memra_runtime.model import Model, load_model
from memra_runtime.session import Policy, Session
from memra_runtime.session.text import least_kept, round_rows
from tiny_pair import TINY_DRAFT, TINY_SPEC, TINY_TARGET

#: All that a CPU kernel can take; the ring has room for `CHUNK` rows beside its window.
WIDE = 16


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Model:
    folder = tmp_path_factory.mktemp("wide") / "tiny.cpu.memra"
    overrides = {"runtime.max_context": str(CONTEXT), "round.depth.max": str(DEPTH)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(programs.CHUNK_ROWS, "cpu", WIDE)
        compile_spec(TINY_SPEC, folder, CompileOptions(overrides=overrides, cache=kernel_cache))
    return load_model(folder, TINY_TARGET, TINY_DRAFT)


@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_rows_that_attention_rounds_itself(
    activations: str, words: list[int], tmp_path: Path, kernel_cache: Path
) -> None:
    """Fused with what follows it, attention still reads a ring before the chunk moves in."""
    overrides = {"runtime.max_context": str(CONTEXT), "runtime.activations": activations}
    found = []
    for rows in (programs.CHUNK_ROWS["cpu"], WIDE):
        folder = tmp_path / f"{rows}.cpu.memra"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(programs.CHUNK_ROWS, "cpu", rows)
            compile_spec(TINY_SPEC, folder, CompileOptions(overrides=overrides, cache=kernel_cache))
        session = Session(load_model(folder, TINY_TARGET, TINY_DRAFT).device)
        session.prime(words[: RING + WIDE])
        found.append(left(session))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def words(wide: Model) -> list[int]:
    return wide.tokenizer.encode(TINY_SPEC.read_text(encoding="utf-8"))


def test_a_ring_has_room_for_a_round_and_no_more(wide: Model) -> None:
    manifest = wide.manifest
    assert next(p.rows for p in manifest.programs if p.name == "prefill") == WIDE
    assert round_rows(manifest) == CHUNK == DEPTH + 1
    assert ring_edges(manifest) == [WINDOW, RING]
    chunks = {p.id: p for p in manifest.planes if "chunk" in p.id}
    assert list(chunks) == ["chunk.swa.k", "chunk.swa.v"]
    assert all(p.shape[1] == WIDE and p.rollback == "none" for p in chunks.values())


@pytest.mark.parametrize(
    "length",
    [2, WIDE, WIDE + 1, WIDE + 2, *range(WINDOW, WINDOW + 3), *range(RING - 1, RING + 3),
     RING + WIDE, 2 * RING - 1],
)  # fmt: skip
def test_a_prompt_leaves_what_narrow_chunks_leave(
    wide: Model, oracle: Plain, words: list[int], length: int
) -> None:
    """Also in parts, whose chunks begin anywhere; and rounds go on from there."""
    text, session = words[:length], Session(wide.device)
    expected = oracle.left_by(text)
    session.prime(text)
    assert left(session) == expected
    parts = Session(wide.device)
    parts.prime(text[: max(1, length - WIDE - 3)])
    if rest := text[max(1, length - WIDE - 3) :]:
        parts.extend(rest)
    assert left(parts) == expected
    wanted = oracle.after(text, 20)
    assert list(parts.generate(len(wanted))) == wanted


@pytest.mark.parametrize("before", [WINDOW + 2, RING - 1, RING + 1, 2 * RING - 3])
def test_a_text_is_cut_back_by_the_rows_of_a_round(
    wide: Model, oracle: Plain, words: list[int], before: int
) -> None:
    """Not by those of a chunk: the ring never held them."""
    session = Session(wide.device, Policy.of(wide.manifest).fixed(DEPTH))
    session.prime(words[:before])
    snapshot = session.snapshot()
    least = least_kept(wide.manifest, before)
    assert least == (before - CHUNK if before > RING else 0)
    suffix = words[200 : 200 + WIDE + 5]  # more than a chunk behind the cut
    for keep in range(before - WIDE, before):
        why = refusal(lambda keep=keep: session.restore(snapshot, suffix, keep=keep))
        assert bool(why) == (keep < least)
        if not why:
            assert left(session) == oracle.left_by([*words[:keep], *suffix])


def test_random_lives(wide: Model, oracle: Plain) -> None:
    lives = Lives(wide, oracle, seed=77)
    for life in range(60):
        lives.live(life)
    assert lives.done["looks"] > 3

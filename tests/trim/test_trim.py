"""A trimmed head on the bundled pair: the text never changes, and learning finds what was lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.artifact import HEAD_IDS, HEAD_ROWS, LEARNED_FILE, RANKS_FILE, load_manifest
from memra_runtime.check.report import Parted, Tally
from memra_runtime.check.rig import Options, Rig
from memra_runtime.check.trim import check_trim
from memra_runtime.errors import MemraError
from memra_runtime.model import Model, load_model
from memra_runtime.session import Session
from tiny_pair import TINY_DRAFT, TINY_SPEC, TINY_TARGET

TOKENS = 300
PROMPT = "The :mod:`json` module provides"
#: Points of acceptance that learning may stay behind the whole head.
POINTS = 0.02


def loaded(artifact: Path) -> Model:
    """A model of its own: what one test learns, another must not know."""
    return load_model(artifact, TINY_TARGET, TINY_DRAFT)


def compiled(folder: Path, cache: Path, trim: str) -> Path:
    options = CompileOptions(overrides={"drafter.head.trim": trim}, cache=cache)
    return compile_spec(TINY_SPEC, folder / "tiny.cpu.memra", options).folder


def ranks_of(folder: Path, ids: np.ndarray) -> Path:
    path = folder / "ranks.txt"
    path.write_text("".join(f"{i}\n" for i in ids))
    return path


def said(model: Model, *, learn: bool = True, prompt: str = PROMPT) -> tuple[list[int], Session]:
    session = Session(model.device, trim=model.trim if learn else None)
    session.prime(model.tokenizer.encode(prompt), TOKENS)
    return list(session.generate(TOKENS)), session


@pytest.fixture(scope="module")
def whole(tiny_model: Model) -> tuple[list[int], float]:
    """Text and acceptance of the head that holds every token."""
    tokens, session = said(tiny_model)
    return tokens, session.stats.acceptance


def test_learning_recovers_the_acceptance_that_a_poor_ranks_file_costs(
    trimmed_artifact: Path, whole: tuple[list[int], float]
) -> None:
    model = loaded(trimmed_artifact)
    tokens, static = said(model, learn=False)
    assert tokens == whole[0]
    assert static.stats.acceptance < whole[1] / 2, "the ranks file is not poor"
    tokens, adaptive = said(model)
    assert tokens == whole[0], "a trim may never change the text"
    assert adaptive.stats.acceptance >= whole[1] - POINTS
    assert model.trim is not None
    stats = model.trim.stats
    assert 0 < stats.from_prompts < len(model.tokenizer.encode(PROMPT)) + 1
    assert stats.used == stats.from_prompts + stats.from_verify == model.trim.used - stats.ranked


def test_bursts_are_short_while_there_is_something_to_learn(
    trimmed_artifact: Path, whole: tuple[list[int], float]
) -> None:
    """Where one launch is many rounds, the choices of the last one only are there to be seen."""
    model = loaded(trimmed_artifact)
    assert model.trim is not None
    model.device.burst_tokens = 64
    before = model.device.launches
    tokens, session = said(model)
    assert tokens == whole[0]
    assert session.stats.acceptance >= whole[1] - POINTS
    first = model.device.launches - before
    assert first > TOKENS // 64 + 10
    for turn in range(4):
        before = model.device.launches
        tokens, session = said(model)
        assert tokens == whole[0], turn
    assert model.device.launches - before < first / 2, "and long again once nothing is new"


def test_launches_grow_with_what_taught_nothing(trimmed_artifact: Path) -> None:
    trim = loaded(trimmed_artifact).trim
    assert trim is not None
    unknown = [i for i in range(4096) if i not in set(trim.ids.tolist())]
    wanted = [trim.launch_tokens]
    for ids in ([], [], unknown[:1], unknown[:1], []):
        trim.learn_choices(ids)
        wanted.append(trim.launch_tokens)
    assert wanted == [1, 2, 4, 1, 2, 4]
    trim.learn_choices(unknown[1:200])
    assert (trim.room, trim.launch_tokens > 4096) == (0, True), "nothing more can be learned"


def test_a_head_that_holds_all_tokens_drafts_what_the_whole_head_drafts(
    tiny_model: Model, kernel_cache: Path, tmp_path: Path
) -> None:
    order = np.random.default_rng(2).permutation(4096)
    trim = f"{{ranks: {ranks_of(tmp_path, order)}, spare: 0}}"
    model = loaded(compiled(tmp_path, kernel_cache, trim))
    ids = model.tokenizer.encode(PROMPT)
    drafts: list[list[list[int]]] = []
    for one in (tiny_model, model):
        session = Session(one.device, trim=one.trim)
        session.prime(ids, TOKENS)
        found = []
        while len(session.committed) < len(ids) + TOKENS // 2:
            tokens = session.step()
            count = one.device.get("drafted") + 1
            found.append([*tokens, -1, *one.device.plane("batch")[1:count].tolist()])
        drafts.append(found)
    assert drafts[0] == drafts[1]


def test_empty_rows_do_not_lower_the_confidence(kernel_cache: Path, tmp_path: Path) -> None:
    """A head of all tokens with 200 rows to spare is as sure of its drafts as the whole head."""
    order = np.random.default_rng(2).permutation(4096)
    gates = {"round.confidence.next_round": "0.2"}
    trim = {"drafter.head.trim": f"{{ranks: {ranks_of(tmp_path, order)}, spare: 200}}"}
    sure: list[list[float]] = []
    for name, overrides in (("whole", gates), ("trimmed", gates | trim)):
        options = CompileOptions(overrides=overrides, cache=kernel_cache)
        model = loaded(compile_spec(TINY_SPEC, tmp_path / name, options).folder)
        session = Session(model.device)
        session.prime(model.tokenizer.encode(PROMPT), TOKENS)
        found = []
        for _ in range(12):
            session.step()
            for program in ("run_begin", "run_draft"):  # the next round starts over
                model.device.launch(program)
            found.append(float(model.device.value("draft", "drafter.confidence")[0]))
        sure.append(found)
    assert max(sure[0]) > 0.3
    np.testing.assert_allclose(sure[1], sure[0], rtol=1e-5)


@pytest.mark.parametrize("learn", ["[]", "[prompt]", "[verify]"])
def test_only_what_is_asked_for_is_learned(
    poor_ranks: Path, kernel_cache: Path, tmp_path: Path, learn: str
) -> None:
    trim = f"{{ranks: {poor_ranks}, spare: 200, learn: {learn}}}"
    model = loaded(compiled(tmp_path, kernel_cache, trim))
    said(model)
    assert model.trim is not None
    stats = model.trim.stats
    assert (stats.from_prompts > 0, stats.from_verify > 0) == ("prompt" in learn, "verify" in learn)


def test_spare_rows_run_out(
    poor_ranks: Path, kernel_cache: Path, tmp_path: Path, whole: tuple[list[int], float]
) -> None:
    """One prompt takes its share only; when no row is left, tokens are turned away and counted."""
    trim = f"{{ranks: {poor_ranks}, spare: 8, per_prompt: 5}}"
    model = loaded(compiled(tmp_path, kernel_cache, trim))
    tokens, _ = said(model)
    assert tokens == whole[0]
    assert model.trim is not None
    stats = model.trim.stats
    assert (stats.used, stats.from_prompts, stats.from_verify) == (8, 5, 3)
    assert stats.turned_away > 0
    assert "8 of 8 spare ones used" in stats.line()
    assert "tokens found no row" in stats.line()
    assert (model.device.plane(HEAD_IDS)[264:] == -1).all()
    assert model.device.plane(HEAD_ROWS).tolist() == [264]


def test_a_learned_row_is_drafted(trimmed_artifact: Path) -> None:
    """Of a token that the ranks lack: the whole way, from the file's row to the drafted id."""
    model = loaded(trimmed_artifact)
    assert model.trim is not None
    tokens, session = said(model)
    drafted = {t for t in tokens if t in set(model.trim.ids[256 : model.trim.used].tolist())}
    assert drafted, "the text has no learned token"
    accepted = session.stats.accepted
    _, without = said(loaded(trimmed_artifact), learn=False)
    assert accepted > without.stats.accepted


def break_ids(model: Model) -> None:
    """Every row stands for the token of the one before."""
    assert model.trim is not None
    plane, used = model.device.plane(HEAD_IDS), model.trim.used
    plane[:used] = np.roll(plane[:used], 1)


def break_write(model: Model) -> None:
    """A row that is written where no kernel looks: a second copy of the head."""
    device = model.device
    assert model.trim is not None
    at = next(i for i, w in enumerate(model.manifest.weights) if w.id == model.trim.entry.weight)
    device._weights[at] = device._weights[at].copy()  # type: ignore[attr-defined]
    device._table[at, 0] = device._weights[at].ctypes.data  # type: ignore[attr-defined]
    device.write_rows = lambda *_: None  # type: ignore[method-assign]


@pytest.mark.parametrize("damage", [break_ids, break_write])
def test_the_check_sees_a_wrong_map_and_a_row_written_elsewhere(
    trimmed_artifact: Path, damage: Callable[[Model], None]
) -> None:
    model = loaded(trimmed_artifact)
    rig = Rig(model, Options(prompts=(PROMPT,), max_new=24, quick=True))
    check_trim(rig, Tally())
    damage(model)
    with pytest.raises(Parted, match="trimmed head drafts"):
        check_trim(rig, Tally())


def test_an_artifact_carries_its_ids(trimmed_artifact: Path, poor_ranks: Path) -> None:
    manifest = load_manifest(trimmed_artifact)
    kept = [line for line in poor_ranks.read_text().splitlines() if not line.startswith("#")]
    assert (trimmed_artifact / RANKS_FILE).read_text().splitlines() == kept
    assert RANKS_FILE in manifest.files
    assert manifest.spec["drafter"]["head"]["trim"]["ranks"].startswith("sha256:")
    assert str(poor_ranks.parent) not in (trimmed_artifact / "manifest.json").read_text()


def test_other_ids_are_another_artifact(kernel_cache: Path, tmp_path: Path) -> None:
    order = np.random.default_rng(3).permutation(4096)[:64]
    ranks = ranks_of(tmp_path, order)
    trim = f"{{ranks: {ranks}, spare: 0}}"
    first = load_manifest(compiled(tmp_path, kernel_cache, trim))
    ranks_of(tmp_path, order[::-1])
    second = load_manifest(compiled(tmp_path, kernel_cache, trim))
    assert first.build_key != second.build_key


def test_a_bad_ranks_file_is_told_before_anything_is_compiled(
    kernel_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "ranks.txt").write_text("5\n4096\n")
    with pytest.raises(MemraError, match=r"ranks\.txt:2"):
        compiled(tmp_path, kernel_cache, f"{{ranks: {tmp_path / 'ranks.txt'}}}")


@pytest.fixture
def sidecar_artifact(poor_ranks: Path, kernel_cache: Path, tmp_path: Path) -> Path:
    trim = f"{{ranks: {poor_ranks}, spare: 40, sidecar: true}}"
    return compiled(tmp_path, kernel_cache, trim)


def test_learned_tokens_outlive_a_process(sidecar_artifact: Path) -> None:
    model = loaded(sidecar_artifact)
    said(model)
    assert model.trim is not None
    assert not (sidecar_artifact / LEARNED_FILE).exists(), "nothing is saved unless asked for"
    learned = model.trim.ids[256 : model.trim.used].tolist()
    assert "40 learned ids added" in model.trim.save()
    assert model.trim.save().startswith("0 learned ids added")
    again = loaded(sidecar_artifact)
    assert again.trim is not None
    assert again.trim.ids[256 : again.trim.used].tolist() == learned
    assert again.trim.stats.from_sidecar == 40
    other = sidecar_artifact / LEARNED_FILE
    other.write_text(other.read_text().replace("vocab=4096", "vocab=4097"))
    with pytest.raises(MemraError, match="foreign"):
        loaded(sidecar_artifact)
    other.write_text(other.read_text()[:-3])
    with pytest.raises(MemraError, match="corrupt"):
        loaded(sidecar_artifact)

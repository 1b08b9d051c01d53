"""A text that is split, cut back, kept aside, demoted: at every edge, and what is refused there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from short_context import CHUNK, CONTEXT, DEPTH, RING, WINDOW, Plain, left, refusal

from memra_runtime.artifact import slot
from memra_runtime.errors import MemraError
from memra_runtime.model import Model, another_model
from memra_runtime.session import Policy, Session
from memra_runtime.session import text as text_module
from memra_runtime.session.text import least_kept
from tiny_pair import TINY_SPEC


@pytest.fixture(scope="module")
def words(model: Model) -> list[int]:
    """Running text as ids."""
    return model.tokenizer.encode(TINY_SPEC.read_text(encoding="utf-8"))


def fixed(model: Model, depth: int) -> Policy:
    return Policy.of(model.manifest).fixed(depth)


def force(session: Session, tokens: Sequence[int]) -> None:
    """Draft these, from the token behind the pending one on."""
    at = session.position + 1
    session.device.plane("forced")[at : at + len(tokens)] = tokens


class Spy:
    """A device that notes the rows of prompts it runs: (position, tokens)."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.prefilled: list[tuple[int, list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, name: str) -> None:
        if name == "prefill":
            rows, at = self.get("rows"), self.get("position")
            self.prefilled.append((at, self.plane("prompt")[:rows].tolist()))
        self._device.launch(name)


@pytest.mark.parametrize("length", [*range(2, 21), WINDOW + 1, RING + 2])
def test_a_given_text_leaves_the_same_rows_however_it_is_split(
    model: Model, oracle: Plain, words: list[int], length: int
) -> None:
    text = words[:length]
    cold = oracle.left_by(text)
    for cut in {1, 2, length // 2, length - 1} & set(range(1, length)):
        session = Session(model.device)
        session.prime(text[:cut])
        snapshot = session.snapshot()
        session.extend(text[cut:])
        assert left(session) == cold
        session.prime(words[50:60])
        session.restore(snapshot, text[cut:])
        assert left(session) == cold
        assert session.committed == text
        assert (session.stats.kept_tokens, session.stats.prompt_tokens) == (
            cut - 1,
            length - cut + 1,
        )


def test_the_row_a_plain_step_left_runs_again_with_the_prompt(
    model: Model, words: list[int]
) -> None:
    """Prompt rows may be of another class than those of steps: no split may show in a text."""
    spy = Spy(model.device)
    session = Session(spy)
    session.prime(words[:5])
    session.extend(words[5:7])
    assert spy.prefilled == [(0, words[:4]), (4, words[4:6])]
    next(session.burst(1))
    shown = list(session.committed)
    session.extend(words[20:23])
    assert spy.prefilled[2:] == [(len(shown), words[20:22])]  # produced rows stay as they are
    session.extend(words[30:32], keep=7)  # the end of a given text again
    assert spy.prefilled[3:] == [(6, [words[6], words[30]])]
    assert session.text.seams == (9,)


def test_a_snapshot_goes_on_as_if_nothing_had_been(model: Model, words: list[int]) -> None:
    """Every counter, the batch, the carried row and every visible cache row."""
    session = Session(model.device)
    session.prime(words[:30])
    for _ in range(2):
        session.step()
    snapshot, before = session.snapshot(), left(session)
    ends = []
    for again in (False, True):
        if again:
            session.prime(words[60:200])
            session.step()
            session.restore(snapshot)
            assert left(session) == before
        for _ in range(4):
            session.step()
        state = np.delete(model.device.state, [slot("burst_end"), slot("more")])
        ends.append((state.tolist(), list(session.committed), left(session)))
    assert ends[0] == ends[1]


def test_a_snapshot_under_another_policy_has_that_policys_depth(
    model: Model, words: list[int]
) -> None:
    session = Session(model.device)
    session.prime(words[:30])
    snapshot = session.snapshot()
    for depth in (0, 2, DEPTH):
        other = Session(model.device, fixed(model, depth))
        other.restore(snapshot)
        assert model.device.get("depth") == depth


@pytest.mark.parametrize("before", [WINDOW + 2, RING - 1, RING, RING + 1, 2 * RING - 3])
def test_a_text_is_cut_back_as_far_as_its_rings_reach(
    model: Model, oracle: Plain, words: list[int], before: int
) -> None:
    """What is allowed is right, for every length; what is refused is what a ring has lost."""
    session = Session(model.device, fixed(model, DEPTH))
    session.prime(words[: before - 3])
    session.step()
    snapshot = session.snapshot()
    have = len(session.committed)
    written = before - 3 + DEPTH + 1
    assert session.text.written == written
    turned = written > RING
    refused = []
    for keep in [1, 2, *range(have - CHUNK - 2, have + 1)]:
        if why := refusal(lambda k=keep: session.restore(snapshot, words[200:202], keep=k)):
            assert turned
            assert f"{keep} tokens cannot be kept of {have}" in why
            assert f"those before {written - RING} are gone" in why
            refused.append(keep)
            continue
        text = [*snapshot.text.tokens[:keep], *words[200:202]]
        assert session.committed == text
        assert session.pending == oracle.after(text, 1)[0]
        assert left(session) == oracle.left_by(text)
    least = least_kept(model.manifest, written)
    assert least == (written - CHUNK if turned else 0)
    allowed = [k for k in range(have - CHUNK - 2, have + 1) if k not in refused]
    seam = before - 3  # from there on, the row before runs again
    assert allowed[0] == max(have - CHUNK - 2, least + (least == seam))


def test_a_row_a_ring_has_lost_would_have_been_missed(
    model: Model, oracle: Plain, words: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the refusal a cut text reads rows of other positions, and its rows say so."""
    session = Session(model.device, fixed(model, DEPTH))
    session.prime(words[: RING + 20])
    monkeypatch.setattr(text_module, "least_kept", lambda *_: 0)
    session.extend(words[200:204], keep=RING)
    assert left(session) != oracle.left_by([*words[:RING], *words[200:204]])


def test_a_cut_does_not_bring_back_what_a_ring_has_lost(model: Model, words: list[int]) -> None:
    """A text that was cut and is short again has lost what its longest form had overwritten."""
    session = Session(model.device)
    session.prime(words[: RING + 20])
    least = RING + 20 - CHUNK
    session.extend(words[200:202], keep=least + 2)
    assert session.text.written == RING + 20
    assert "tokens cannot be kept" in refusal(lambda: session.extend([5], keep=least - 1))
    session.restore(session.snapshot())
    assert "tokens cannot be kept" in refusal(lambda: session.extend([5], keep=least - 1))
    session.extend([5], keep=least)


@pytest.mark.parametrize("place", range(DEPTH + 2))
def test_an_end_at_every_slot_and_a_turn_behind_it(
    model: Model, oracle: Plain, words: list[int], place: int
) -> None:
    """All drafts right: the end falls into every slot of a round; the next turn starts there."""
    for length in (6, 12, RING + 4):
        prompt = words[3 : 3 + length]
        answer = oracle.after(prompt, DEPTH + 3)
        if answer[place] in answer[:place]:
            continue
        session = Session(model.device, fixed(model, DEPTH), [answer[place]])
        session.prime(prompt)
        force(session, answer[1:])
        found = [token for tokens in session.burst(50) for token in tokens]
        assert session.ended
        if place == 0:
            assert found == []
            assert session.pending == answer[0]
        pending_end = place == DEPTH + 1
        assert found == answer[: place + (not pending_end and place > 0)]
        assert [token for tokens in session.burst(5) for token in tokens] == []
        assert list(session.generate(3)) == ([answer[place]] if place in (0, DEPTH + 1) else [])
        turn = [*prompt, *answer[: place + 1], *words[90:94]]
        session.extend(words[90:94])
        assert session.committed == turn
        assert not session.ended or oracle.after(turn, 1)[0] == answer[place]
        assert left(session) == oracle.left_by(turn)


def test_an_end_in_a_given_text_ends_nothing(model: Model, oracle: Plain, words: list[int]) -> None:
    prompt = words[:9]
    answer = oracle.after(prompt, 12)
    assert prompt[-1] not in answer
    session = Session(model.device, eos=[prompt[-1], prompt[2]])
    session.prime(prompt)
    assert not session.ended
    assert model.device.get("ended") == 0
    assert [token for tokens in session.burst(10) for token in tokens][:10] == answer[:10]


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 40])
def test_bursts_of_any_width_are_one_text(
    model: Model, oracle: Plain, words: list[int], width: int
) -> None:
    prompt = words[5:25]
    session = Session(model.device)
    session.prime(prompt)
    found: list[int] = []
    while len(found) < 40:
        burst = [token for tokens in session.burst(width) for token in tokens]
        assert width <= len(burst) <= width + DEPTH
        assert session.committed == prompt + found + burst  # a boundary: every token has its row
        assert session.position == len(session.committed)
        found += burst
    assert found == oracle.after(prompt, len(found))


def test_generate_goes_on_where_it_stopped(model: Model, oracle: Plain, words: list[int]) -> None:
    session = Session(model.device)
    session.prime(words[:20])
    found = [token for count in (1, 1, 7, 2, 30) for token in session.generate(count)]
    assert found == oracle.after(words[:20], 41)
    burst = [token for tokens in session.burst(4) for token in tokens]
    assert found + burst == oracle.after(words[:20], 41 + len(burst))


def test_a_full_context_is_an_end_not_a_crash(
    model: Model, oracle: Plain, words: list[int]
) -> None:
    prompt = words[: CONTEXT - 5]
    session = Session(model.device)
    session.prime(prompt)
    found = [token for tokens in session.burst(100) for token in tokens]
    assert found == oracle.after(prompt, 5)
    assert session.position == CONTEXT
    assert list(session.burst(1)) == []
    with pytest.raises(MemraError, match="all 304 rows of the context are taken"):
        session.step()
    snapshot = session.snapshot()
    with pytest.raises(MemraError, match="the context holds 304"):
        session.extend([5])
    session.restore(snapshot)
    assert list(session.generate(3)) == oracle.after(prompt, 6)[5:]
    assert session.stats.finish == "context"


def test_plain_steps_and_rounds_take_turns(model: Model, oracle: Plain, words: list[int]) -> None:
    """Demoted, the pending token is carried over; promoted, so is what the drafter starts from."""
    prompt = words[:40]
    session = Session(model.device, fixed(model, DEPTH))
    session.prime(prompt)
    session.step()
    drafted = model.device.get("total_drafted")
    session.demote()
    found = [token for tokens in session.burst(12) for token in tokens]
    assert model.device.get("total_drafted") == drafted
    assert len(found) == 12  # a plain step commits one token
    said = oracle.after(prompt, len(session.committed) - len(prompt))
    assert session.committed == prompt + said
    assert left(session) == oracle.left_by(session.committed)
    session.promote()
    text = list(session.committed)
    session.step()
    drafts = model.device.plane("batch")[: DEPTH + 1].tolist()
    session.prime(text)  # a cold session of this very text drafts the same
    session.step()
    assert model.device.plane("batch")[: DEPTH + 1].tolist() == drafts


def test_two_texts_on_one_model_do_not_know_of_each_other(model: Model, words: list[int]) -> None:
    prompts = [words[:17], words[60 : 60 + RING + 3]]
    alone = []
    for prompt in prompts:
        session = Session(model.device)
        session.prime(prompt)
        for _ in range(6):
            session.step()
        alone.append((list(session.committed), left(session), model.device.state.tolist()))
    devices = [model.device, another_model(model).device]
    sessions = [Session(device) for device in devices]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.prime(prompt)
    for _ in range(6):
        for session in sessions:
            session.step()
    for session, end in zip(sessions, alone, strict=True):
        assert (list(session.committed), left(session), session.device.state.tolist()) == end


def test_a_snapshot_moves_to_another_device(model: Model, words: list[int]) -> None:
    session = Session(model.device)
    session.prime(words[:50])
    session.step()
    there = Session(another_model(model).device)
    there.restore(session.snapshot())
    session.step()
    there.step()
    assert left(there) == left(session)
    assert there.committed == session.committed


# -- what is refused -------------------------------------------------------------------------------


def test_a_session_refuses_a_device_that_holds_another_text(model: Model, words: list[int]) -> None:
    first, second = Session(model.device), Session(model.device)
    with pytest.raises(MemraError, match="the device holds no text yet"):
        first.step()
    first.prime(words[:9])
    kept = first.snapshot()
    second.prime(words[:5])
    for act in (first.step, first.snapshot, lambda: list(first.burst(1)),
                lambda: list(first.generate(1)), lambda: first.extend([5])):  # fmt: skip
        with pytest.raises(MemraError, match="the device holds another session's text by now"):
            act()
    first.restore(kept)
    first.step()


def test_a_burst_that_is_being_read_must_end_first(model: Model, words: list[int]) -> None:
    session = Session(model.device)
    session.prime(words[:9])
    burst = session.burst(50)
    next(burst)
    for act in (session.step, session.snapshot, session.demote, lambda: session.prime([5]),
                lambda: session.extend([5])):  # fmt: skip
        with pytest.raises(MemraError, match="a burst is still being read"):
            act()
    burst.close()
    session.step()


@pytest.mark.parametrize(
    ("keep", "suffix", "message"),
    [
        (None, [], "there is no token to run behind the first 9"),
        (4, [], "there is no token to run behind the first 4"),
        (0, [5], "0 tokens cannot be kept of a text of 9"),
        (10, [5], "10 tokens cannot be kept of a text of 9"),
        (None, [-1], "token id -1 is outside the vocabulary"),
        (None, [5] * CONTEXT, "the context holds 304"),
    ],
)
def test_a_wrong_suffix_leaves_the_session_as_it_was(
    model: Model, words: list[int], keep: int | None, suffix: list[int], message: str
) -> None:
    session = Session(model.device)
    session.prime(words[:9])
    before = left(session)
    with pytest.raises(MemraError, match=message):
        session.extend(suffix, keep=keep)
    assert (session.committed, left(session)) == (words[:9], before)
    snapshot = session.snapshot()
    if keep is not None or suffix:  # kept whole and without a suffix, it just goes on
        with pytest.raises(MemraError, match=message):
            session.restore(snapshot, suffix, keep=keep)
        assert (session.committed, left(session)) == (words[:9], before)


def test_memory_that_is_not_there_is_refused_with_numbers(
    model: Model, words: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(model.device)
    session.prime(words[:9])
    monkeypatch.setattr(model.device, "free", lambda: 1 << 10)
    with pytest.raises(MemraError, match=r"a snapshot of 9 tokens needs .* MiB, 0\.0 MiB are free"):
        session.snapshot()
    arena = f"{model.manifest.arena_bytes / 2**20:.1f} MiB"
    with pytest.raises(MemraError, match=f"another text beside those .* needs {arena}"):
        another_model(model)


@pytest.mark.parametrize("field", ["artifact", "weights"])
def test_a_snapshot_of_something_else_is_refused(
    model: Model, words: list[int], field: str
) -> None:
    session = Session(model.device)
    session.prime(words[:9])
    before = left(session)
    foreign = replace(session.snapshot(), **{field: "0" * 64})
    with pytest.raises(MemraError, match=f"made with other {field} \\(000000000000\\)"):
        session.restore(foreign)
    assert left(session) == before

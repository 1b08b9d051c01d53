"""Random requests: whatever a session is asked for, its stream is that of plain decoding.

Prompts of lengths around every edge (1, the prefill chunk, the window, the ring, several wraps),
random budgets, policies, forced drafts and end tokens, all on one device, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from short_context import CHUNK, CONTEXT, DEPTH, RING, WINDOW

from memra_runtime.artifact import slot
from memra_runtime.errors import MemraError
from memra_runtime.model import Model
from memra_runtime.session import Policy, Session
from tiny_pair import TINY_SPEC

#: Prompt lengths on both sides of every edge.
LENGTHS = (
    *(1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK, 2 * CHUNK + 1, 40),
    *range(WINDOW - 8, WINDOW + 3, 2),
    *range(RING - 3, RING + 4),
    *(200, 2 * RING - 1, 2 * RING, 2 * RING + 1, 2 * RING + 9),
)
LONGEST_ANSWER = 24


@dataclass(frozen=True)
class Prompt:
    """A prompt and what plain decoding says after it."""

    ids: list[int]
    answer: list[int]


def plain(model: Model, ids: list[int], tokens: int) -> list[int]:
    """Greedy tokens, one plain step each: the oracle."""
    session = Session(model.device, Policy.of(model.manifest).fixed(0))
    session.prime(ids, tokens)
    answer = []
    for _ in range(tokens):
        answer.append(session.pending)
        if len(answer) < tokens:
            session.step("plain")
    return answer


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Prompt]:
    """One prompt of each length: documentation text, or tokens at random."""
    rng = np.random.default_rng(11)
    text = model.tokenizer.encode(TINY_SPEC.read_text(encoding="utf-8"))
    found = []
    for i, length in enumerate(LENGTHS):
        start = int(rng.integers(0, max(1, len(text) - length)))
        ids = list(text[start : start + length]) if i % 3 else []
        ids += [int(t) for t in rng.integers(5, 4096, length - len(ids))]
        tokens = min(LONGEST_ANSWER, CONTEXT - length + 1)
        found.append(Prompt(ids, plain(model, ids, tokens)))
    return found


def random_policy(rng: np.random.Generator) -> Policy:
    cap = int(rng.integers(0, DEPTH + 1))
    short, deep, initial = (int(n) for n in rng.integers(0, cap + 1, 3))
    boundary, patience = int(rng.integers(0, 300)), int(rng.integers(1, 4))
    return Policy(cap, initial, bool(rng.integers(2)), short, deep, boundary, patience)


def force(model: Model, prompt: Prompt, rng: np.random.Generator) -> float:
    """Force random drafts: none, or right ones with a random probability. Returns that."""
    right = float(rng.choice([-1.0, 0.0, 0.5, 0.9, 1.0]))
    if right >= 0:
        plane, at = model.device.plane("forced"), len(prompt.ids)
        for i, token in enumerate(prompt.answer):
            agree = rng.random() < right
            plane[at + i] = token if agree else (token + int(rng.integers(1, 99))) % 4096
    return right


@pytest.fixture(params=[1, 9, 1000])
def burst_tokens(request: pytest.FixtureRequest, model: Model) -> Iterator[int]:
    """Tokens asked for in one launch: a round, several, or all that a request can want."""
    usual = model.device.burst_tokens
    model.device.burst_tokens = request.param
    yield request.param
    model.device.burst_tokens = usual


def check_stats(session: Session, prompt: Prompt, out: list[int]) -> None:
    stats = session.stats
    assert stats.prompt_tokens == len(prompt.ids)
    assert stats.tokens == len(out)
    assert session.position == len(session.committed)  # every committed token has its row
    assert len(session.committed) - len(prompt.ids) == stats.rounds + stats.accepted
    assert sum(stats.attempted_at) == stats.drafted
    assert sum(stats.accepted_at) == stats.accepted
    for counts in (stats.attempted_at, stats.accepted_at):
        assert counts == sorted(counts, reverse=True)  # a draft is tried only after the one before
    pairs = zip(stats.accepted_at, stats.attempted_at, strict=True)
    assert all(accepted <= tried for accepted, tried in pairs)
    assert 0 <= stats.acceptance <= 1
    said = (prompt.ids + prompt.answer)[: len(session.committed)]
    assert session.committed[: len(said)] == said


@pytest.mark.parametrize("seed", range(3))
def test_stream_equals_plain_decoding(
    model: Model, prompts: list[Prompt], burst_tokens: int, seed: int
) -> None:
    """250 requests in all: one of each length for each seed and size of bursts."""
    rng = np.random.default_rng(seed)
    for index in rng.permutation(len(prompts)):
        prompt = prompts[index]
        max_new = int(rng.integers(1, len(prompt.answer) + 1))
        ends = [prompt.answer[int(rng.integers(len(prompt.answer)))]] if rng.random() < 0.3 else []
        session = Session(model.device, random_policy(rng), ends)
        session.prime(prompt.ids, max_new)
        right = force(model, prompt, rng)

        out = list(session.generate(max_new))

        want = prompt.answer[:max_new]
        first = next((i for i, token in enumerate(want) if token in ends), None)
        assert out == (want if first is None else want[: first + 1]), session.policy
        assert session.stats.finish == ("length" if first is None else "eos")
        check_stats(session, prompt, out)
        if right == 0:
            assert session.stats.accepted == 0
        if right == 1:
            seen = sum(a == b for a, b in zip(session.committed[len(prompt.ids):],
                                              prompt.answer, strict=False))  # fmt: skip
            assert seen >= len(out) - 1


def test_burst_is_its_rounds(model: Model, prompts: list[Prompt], burst_tokens: int) -> None:
    """Every counter and every visible row after a burst is that of as many single rounds."""
    for prompt in prompts[::3]:
        session = Session(model.device)
        session.prime(prompt.ids, 20)
        burst = [token for tokens in session.burst(12) for token in tokens]
        state, rows = model.device.state.copy(), visible(model)
        assert session.committed == prompt.ids + burst
        assert len(burst) >= min(12, burst_tokens)

        session.prime(prompt.ids, 20)
        steps: list[int] = []
        while len(steps) < len(burst):
            steps += session.step()
        assert steps == burst
        own = [slot("burst_end"), slot("more")]  # of the burst alone
        assert (np.delete(model.device.state, own) == np.delete(state, own)).all()
        for name, row in visible(model).items():
            assert row.tobytes() == rows[name].tobytes(), name


def test_stopping_early_leaves_a_session_that_goes_on(
    model: Model, prompts: list[Prompt], burst_tokens: int
) -> None:
    prompt = prompts[9]
    session = Session(model.device)
    session.prime(prompt.ids, len(prompt.answer))
    answer = session.generate(len(prompt.answer))
    assert [next(answer) for _ in range(3)] == prompt.answer[:3]
    answer.close()
    assert session.position == len(session.committed)
    session.step()
    assert session.committed[: len(prompt.ids) + 4] == prompt.ids + prompt.answer[:4]


def test_depth_follows_its_rule(model: Model, prompts: list[Prompt]) -> None:
    """Round by round: the next depth is the rule's, and never more than the context holds."""
    rng = np.random.default_rng(3)
    for prompt in prompts:
        policy = random_policy(rng)
        session = Session(model.device, policy)
        session.prime(prompt.ids, len(prompt.answer))
        force(model, prompt, rng)
        room = CONTEXT - session.position - 1
        assert model.device.get("depth") == max(0, min(policy.initial, policy.cap, room))
        misses = 0
        for _ in range(6):
            depth = model.device.get("depth")
            if session.position >= CONTEXT:
                break
            tokens = session.step()
            accepted, n = model.device.get("accepted"), session.position
            assert model.device.get("drafted") == depth
            assert len(tokens) == accepted + 1
            floor = policy.floor_short if n < policy.floor_boundary else policy.floor_deep
            misses = 0 if accepted else misses + (depth > 0)
            if misses >= policy.floor_patience:
                floor = min(floor, 1)
            wanted = max(accepted + 1, min(floor, policy.cap)) if policy.adaptive else policy.cap
            room = CONTEXT - n - 1
            assert model.device.get("depth") == max(0, min(wanted, policy.cap, room))


@pytest.mark.parametrize("accept", [0, 1, 4, DEPTH - 1, DEPTH])
def test_planes_after_a_round_are_those_of_plain_steps(
    model: Model, prompts: list[Prompt], accept: int
) -> None:
    """Accept a forced number of drafts; every visible row has the bits of a run without drafts."""
    for prompt in prompts[accept % 2 :: 2]:
        session = Session(model.device, Policy.of(model.manifest).fixed(DEPTH))
        session.prime(prompt.ids, DEPTH + 2)
        assert len(prompt.answer) >= DEPTH + 2
        plane = model.device.plane("forced")
        for i, token in enumerate(prompt.answer[: DEPTH + 1]):
            plane[len(prompt.ids) + i] = token if i <= accept else (token + 1) % 4096
        session.step()
        assert model.device.get("accepted") == accept
        after = visible(model)
        session.prime(prompt.ids, DEPTH + 2)
        for _ in range(accept + 1):
            session.step("plain")
        for name, rows in visible(model).items():
            assert after[name].tobytes() == rows.tobytes(), f"{name} after {len(prompt.ids)}"


def visible(model: Model) -> dict[str, np.ndarray]:
    """Of each cache the rows that a later token can see, the carried hidden and the next token."""
    device = model.device
    end = device.get("position")
    found = {"hidden": device.plane("hidden").copy(), "pending": np.array(device.get("pending"))}
    for plane in device.manifest.planes:
        if plane.rollback == "truncate":
            first = max(0, end - WINDOW + 1) if plane.ring else 0
            at = np.arange(first, end) % plane.shape[1]
            found[plane.id] = device.plane(plane.id)[:, at].copy()
    assert len(found) > 2
    return found


def test_context_can_be_filled_to_its_last_row(model: Model) -> None:
    """The last token needs no row, so one more fits than there are rows."""
    ids, new = [7] * (CONTEXT - 9), 10
    want = plain(model, ids, new)
    for depth in range(DEPTH + 1):
        session = Session(model.device, Policy.of(model.manifest).fixed(depth))
        session.prime(ids, new)
        assert list(session.generate(new)) == want
        assert session.position <= CONTEXT
        assert session.stats.finish == "length"


def test_text_that_outgrows_the_context_ends_with_it(model: Model) -> None:
    ids = [9] * (CONTEXT - 6)
    want = plain(model, ids, 7)
    for depth in (0, 3, DEPTH):
        session = Session(model.device, Policy.of(model.manifest).fixed(depth))
        session.prime(ids, 3)
        assert list(session.generate(50)) == want  # the last token needs no row
        assert session.stats.finish == "context"
        assert session.position == CONTEXT


@pytest.mark.parametrize(
    ("length", "new", "message"),
    [
        (CONTEXT, 2, f"need {CONTEXT + 1} rows, the context holds {CONTEXT}"),
        (CONTEXT + 9, 1, f"need {CONTEXT + 9} rows"),
        (CONTEXT - 3, 5, "ask for at most 4 new tokens"),
        (0, 1, "the prompt is empty"),
        (4, 0, "cannot produce 0 tokens"),
    ],
)
def test_request_that_cannot_be_served_is_refused(
    model: Model, length: int, new: int, message: str
) -> None:
    with pytest.raises(MemraError, match=message):
        Session(model.device).prime([5] * length, new)


@pytest.mark.parametrize("token", [-1, 4096])
def test_token_outside_the_vocabulary_is_refused(model: Model, token: int) -> None:
    with pytest.raises(MemraError, match=f"token id {token} is outside the vocabulary of 4096"):
        Session(model.device).prime([5, token], 1)


def test_end_token_that_is_pending_needs_no_round(model: Model, prompts: list[Prompt]) -> None:
    prompt = prompts[0]
    session = Session(model.device, eos=[prompt.answer[0]])
    session.prime(prompt.ids, 5)
    assert list(session.generate(5)) == prompt.answer[:1]
    assert (session.stats.finish, session.stats.rounds) == ("eos", 0)
    assert session.position == len(prompt.ids)


def test_end_token_inside_a_round_cuts_what_is_seen(model: Model, prompts: list[Prompt]) -> None:
    """At every place of a round: the visible text ends with the end token, the state is whole."""
    prompt = next(p for p in prompts if len(set(p.answer[: DEPTH + 2])) == DEPTH + 2)
    for place in range(DEPTH + 2):
        end = prompt.answer[place]
        session = Session(model.device, Policy.of(model.manifest).fixed(DEPTH), [end])
        session.prime(prompt.ids, LONGEST_ANSWER)
        model.device.plane("forced")[len(prompt.ids) :][: len(prompt.answer)] = prompt.answer
        assert list(session.generate(LONGEST_ANSWER)) == prompt.answer[: place + 1]
        assert session.stats.finish == "eos"
        check_stats(session, prompt, prompt.answer[: place + 1])


def test_timed_rounds_are_the_same_rounds(model: Model, prompts: list[Prompt]) -> None:
    prompt = prompts[-6]
    session = Session(model.device)
    session.prime(prompt.ids, len(prompt.answer))
    assert list(session.generate(len(prompt.answer), timed=True)) == prompt.answer
    assert set(session.stats.phase_s) == {"draft", "verify", "rest"}

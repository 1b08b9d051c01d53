"""Depth and confidence policies: they follow their rules, and never change a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memra_compiler.compile import CompileOptions, compile_spec, load, lower
from memra_compiler.ops.confidence import WeighDraft
from memra_compiler.ops.settle import AdaptDepth
from memra_runtime.artifact import MAX_DEPTH, STATE, STATE_SIZE, slot
from memra_runtime.device import calls
from memra_runtime.errors import MemraError
from memra_runtime.model import Model, load_model
from memra_runtime.session import Policy, Session
from tiny_pair import TINY_DRAFT, TINY_SPEC, TINY_TARGET

CONTEXT, DEPTH = 304, 7
OVERRIDES = {
    "runtime.max_context": str(CONTEXT),
    "round.depth.max": str(DEPTH),
    "round.confidence.next_round": "0.3",
    "round.confidence.in_round.when": "always",
}
TEXTS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Model:
    """The bundled pair with both gates armed."""
    folder = tmp_path_factory.mktemp("gates") / "tiny.cpu.memra"
    compile_spec(TINY_SPEC, folder, CompileOptions(overrides=OVERRIDES, cache=kernel_cache))
    return load_model(folder, TINY_TARGET, TINY_DRAFT)


@dataclass(frozen=True)
class Text:
    """A prompt and what plain decoding says after it."""

    ids: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def texts(model: Model) -> list[Text]:
    rng = np.random.default_rng(4)
    words = list(model.tokenizer.encode(TINY_SPEC.read_text(encoding="utf-8")))
    found = []
    for length in (1, 5, 40, 127, 150, 240, 280):
        ids = words[(start := int(rng.integers(len(words) - length))) : start + length]
        session = Session(model.device, Policy.of(model.manifest).fixed(0))
        session.prime(ids)
        tokens = min(TEXTS, CONTEXT - length)
        found.append(Text(ids, list(session.generate(tokens, sequence="plain"))))
    return found


def random_policy(rng: np.random.Generator) -> Policy:
    cap = int(rng.integers(0, DEPTH + 1))
    initial, short, deep = (int(n) for n in rng.integers(0, cap + 1, 3))
    boundary, patience, probe = int(rng.integers(300)), *map(int, rng.integers(1, 4, 2))
    late, cut = (float(rng.choice([0, 0.2, 0.5, 0.8, 1.0, 2.0])) for _ in range(2))
    adaptive, least, *flags = (bool(n) for n in rng.integers(0, 2, 5))
    return Policy(cap, initial, adaptive, short, deep, boundary, patience, int(least), probe,
                  late, cut, *flags)  # fmt: skip


def force(device: Any, text: Text, rng: np.random.Generator, right: float) -> None:
    """Force drafts, some of them right; a negative share leaves all to the drafter."""
    plane, at = device.plane("forced"), len(text.ids)
    for i, token in enumerate(text.answer if right >= 0 else ()):
        wrong = (token + int(rng.integers(1, 99))) % 4096
        plane[at + i] = token if rng.random() < right else wrong


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_changes_a_token(model: Model, texts: list[Text], seed: int) -> None:
    """Random policies over every text: in rounds, in bursts, and program by program."""
    rng = np.random.default_rng(seed)
    cuts = plain_rounds = 0
    for text in texts * 4:
        policy = random_policy(rng)
        session = Session(model.device, policy)
        session.prime(text.ids)
        force(model.device, text, rng, float(rng.choice([-1, -1, 0.0, 0.7, 1.0])))
        found = list(session.generate(len(text.answer), timed=bool(rng.integers(2))))
        assert found == text.answer, policy
        stats = session.stats
        assert session.position == len(session.committed)
        assert len(session.committed) - len(text.ids) == stats.rounds + stats.accepted
        assert sum(stats.rounds_at_depth) == stats.rounds
        assert sum(k * n for k, n in enumerate(stats.rounds_at_depth)) == stats.drafted
        assert min(stats.rounds_at_depth) >= 0
        assert stats.cut_rounds <= stats.rounds * bool(policy.cut_below)
        cuts += stats.cut_rounds
        plain_rounds += stats.rounds_at_depth[0]
    assert cuts > 100
    assert plain_rounds > 100


def test_program_by_program_is_the_whole_round(model: Model, texts: list[Text]) -> None:
    """The compiled round breaks off its chain where a caller of single programs would."""
    rng = np.random.default_rng(8)
    for text in texts[:5] * 2:
        policy = replace(random_policy(rng), cap=DEPTH, cut_below=0.5, cut_always=True)
        ends = []
        for timed in (False, True):
            session = Session(model.device, policy)
            session.prime(text.ids)
            tokens: list[int] = []
            while len(tokens) < len(text.answer) - DEPTH - 1:
                tokens += session.step(timed=timed)
            ends.append((tokens, model.device.state.copy()))
        assert ends[0][0] == ends[1][0]
        assert (ends[0][1] == ends[1][1]).all()


# -- the rules, round by round ---------------------------------------------------------------------


@dataclass
class Rule:
    """The policy as greedy_round would say it, in Python: an oracle for the device."""

    policy: Policy
    full: bool = True
    misses: int = 0
    idle: int = 0

    def chain(self, depth: int, position: int, sure: Sequence[float]) -> int:
        """How many drafts a round verifies, given the confidence of each that it would make."""
        p = self.policy
        armed = p.cut_always or (position >= p.floor_boundary and not self.full)
        below = p.cut_below if armed else 0.0
        if not p.cut_drops:
            first = next((j for j in range(depth) if sure[j] < below), depth)
            return min(depth, first + 1)
        return keep(sure[:depth], below, zero=p.cut_first)

    def next(self, drafted: int, accepted: int, position: int, sure: Sequence[float]) -> int:
        """The next depth, after a round that left `position` rows."""
        p = self.policy
        self.full = accepted == drafted
        self.misses = 0 if accepted else self.misses + (drafted > 0)
        tired = self.misses >= p.floor_patience
        self.idle = self.idle + 1 if tired and not drafted else 0
        floor = p.floor_short if position < p.floor_boundary else p.floor_deep
        floor = min(floor, 1) if tired else floor
        wanted = p.cap
        if p.adaptive:
            wanted = max(accepted + 1, floor)
            doubtful = next((j for j, s in enumerate(sure) if s < p.late_below), None)
            if doubtful is not None:
                wanted = min(wanted, max(doubtful + 1, min(floor, p.cap)))
            if tired and p.floor_least == 0 and self.idle < p.floor_probe:
                wanted = 0
        return max(0, min(wanted, p.cap, CONTEXT - position - 1))


def keep(sure: Sequence[float], below: float, *, zero: bool) -> int:
    """The zero-draft gate: slots up to the first below a threshold, which is dropped.

    The first slot stays unless `zero`; keeping it does not end the scan.
    """
    for j, s in enumerate(sure):
        if s < below and (j > 0 or zero):
            return j
    return len(sure)


@pytest.mark.parametrize(
    ("sure", "below", "zero", "kept"),
    [
        ([0.9, 0.2, 0.9], 0.5, False, 1),
        ([0.9, 0.2, 0.9], 0.5, True, 1),
        ([0.2, 0.9], 0.5, False, 2),
        ([0.2, 0.2], 0.5, False, 1),
        ([0.2, 0.9], 0.5, True, 0),
        ([0.5, 0.5], 0.5, True, 2),
        ([0.2, 0.1], 0.0, True, 2),
    ],
)
def test_zero_draft_gate(sure: list[float], below: float, zero: bool, kept: int) -> None:
    """The table of the rule, of the op that decides it draft by draft, and of its other form."""
    assert keep(sure, below, zero=zero) == kept
    assert weighed(sure, below, drops=True, zero=zero)[0] == kept
    first = next((j + 1 for j, s in enumerate(sure) if s < below), len(sure))
    assert weighed(sure, below, drops=False, zero=False)[0] == first


def weighed(
    sure: Sequence[float], below: float, *, drops: bool, zero: bool, late: float = 0.0
) -> tuple[int, int, int]:
    """Drafts kept, drafts made and the first doubtful one, by the op."""
    state = np.zeros(STATE_SIZE, np.int32)
    policy = Policy(len(sure), 0, True, 0, 0, 0, late_below=late, cut_below=below,
                    cut_drops=drops, cut_first=zero)  # fmt: skip
    for name, value in policy.counters().items():
        state[slot(name)] = value
    state[slot("doubt")] = state[slot("cut_below")]
    state[slot("drafted")], state[slot("doubtful")] = len(sure), MAX_DEPTH
    made = 0
    while made < state[slot("drafted")]:
        made += 1
        state[slot("step")] = made
        WeighDraft().reference(1, np.array([sure[made - 1]]), state)
    return int(state[slot("drafted")]), made, int(state[slot("doubtful")])


def test_op_keeps_what_the_rule_keeps() -> None:
    rng = np.random.default_rng(2)
    for _ in range(2000):
        sure = np.round(rng.random(int(rng.integers(0, 9))), 1).tolist()
        below, late = np.round(rng.random(2), 1).tolist()
        drops, zero = (bool(n) for n in rng.integers(0, 2, 2))
        rule = Rule(replace(Policy(8, 8, True, 0, 0, 0), cut_below=below, cut_always=True,
                            cut_drops=drops, cut_first=zero and drops))  # fmt: skip
        kept, made, doubtful = weighed(sure, below, drops=drops, zero=zero, late=late)
        assert kept == rule.chain(len(sure), 0, sure)
        assert kept <= made <= kept + drops
        first = next((j for j in range(made) if sure[j] < late), MAX_DEPTH)
        assert doubtful == first


@pytest.mark.parametrize("seed", range(3))
def test_rounds_follow_the_rules(model: Model, texts: list[Text], seed: int) -> None:
    """Every decision of the compiled programs, from the confidences that they leave."""
    rng = np.random.default_rng(seed)
    device, rests, cuts, bounded = model.device, 0, 0, 0
    for text in texts * 4:
        policy = random_policy(rng)
        session, rule = Session(device, policy), Rule(policy)
        session.prime(text.ids)
        force(device, text, rng, float(rng.choice([-1, 0.0, 0.0, 0.8])))
        depth = max(0, min(policy.initial, policy.cap, CONTEXT - len(text.ids) - 1))
        for _ in range(16):
            before = session.position
            if before >= CONTEXT:
                break
            assert device.get("depth") == depth
            sure = round_by_hand(model)
            drafted, accepted = device.get("drafted"), device.get("accepted")
            assert drafted == rule.chain(depth, before, sure)
            assert len(sure) <= drafted + policy.cut_drops, "a draft was made for nothing"
            free = Rule(replace(policy, late_below=0.0), rule.full, rule.misses, rule.idle)
            at = drafted, accepted, session.position, sure
            cuts += drafted < depth
            bounded += free.next(*at) > (depth := rule.next(*at))
            rests += rule.misses >= policy.floor_patience and depth == 0
    assert rests > 5
    assert cuts > 20
    assert bounded > 5


def round_by_hand(model: Model) -> list[float]:
    """Run a round program by program; the confidence of each draft that was made."""
    sure = []
    for program in calls(model.device, "round"):
        model.device.launch(f"run_{program}")
        if program == "draft":
            sure.append(float(model.device.value("draft", "drafter.confidence")[0]))
    assert all(0 < s <= 1 for s in sure)
    return sure


def test_confidence_is_the_softmax_of_the_choice(model: Model, texts: list[Text]) -> None:
    """Far from uniform, and as the drafter's acceptance goes: sure drafts are right more often."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    policy = replace(Policy.of(model.manifest).fixed(1), cap=1)
    for text in texts[:5]:
        session = Session(model.device, policy)
        session.prime(text.ids)
        for _ in range(30):
            (sure,) = round_by_hand(model)
            right[sure > 0.5].append(model.device.get("accepted") == 1)
    assert min(len(r) for r in right.values()) > 20
    assert np.mean(right[True]) > np.mean(right[False]) + 0.2


# -- depth 0 ---------------------------------------------------------------------------------------


def test_drafter_that_is_always_wrong_rests(model: Model, texts: list[Text]) -> None:
    text = texts[2]
    policy = Policy(DEPTH, 5, True, 4, 4, 0, floor_patience=2, floor_least=0, floor_probe=6)
    session = Session(model.device, policy)
    session.prime(text.ids)
    wrong = [(token + 1) % 4096 for token in text.answer]
    at = len(text.ids)
    model.device.plane("forced")[at : at + len(wrong)] = wrong
    depths = []
    for _ in range(24):
        depths.append(model.device.get("depth"))
        session.step()
    assert depths == [5, 4, *[*[0] * 6, 1] * 4][:24]
    assert session.committed[at:] == text.answer[:24]


def test_right_drafts_end_the_rest(model: Model, texts: list[Text]) -> None:
    text = texts[2]
    policy = Policy(DEPTH, 3, True, 1, 1, 0, floor_patience=1, floor_least=0, floor_probe=5)
    session = Session(model.device, policy)
    session.prime(text.ids)
    at, half = len(text.ids), 20
    answer = np.array(text.answer)
    model.device.plane("forced")[at : at + half] = (answer[:half] + 1) % 4096
    model.device.plane("forced")[at + half : at + len(answer)] = answer[half:]
    depths = []
    while len(session.committed) < at + len(answer) - DEPTH:
        depths.append(model.device.get("depth"))
        session.step()
    assert depths[0] == 3
    assert set(depths[1:half]) == {0, 1}
    assert max(depths) == DEPTH
    assert session.committed[at:] == text.answer[: len(session.committed) - at]


# -- bounds ----------------------------------------------------------------------------------------


def test_depth_is_bounded_whatever_the_counters_hold(model: Model) -> None:
    """The compiled op on random counters: as its reference says, and within cap and context."""
    rng = np.random.default_rng(6)
    device = model.device
    for i in range(1500):
        fresh = bool(i % 2)
        state = rng.integers(0, 20, STATE_SIZE).astype(np.int32)
        for name in ("adaptive", "floor_least", "cut_always", "cut_drops", "cut_first"):
            state[slot(name)] %= 2
        state[slot("capacity")] = state[slot("position")] + rng.integers(0, 12)
        want = state.copy()
        AdaptDepth(fresh).reference(1, want)
        device.state[:] = state
        device.launch("run_adapt_fresh" if fresh else "run_adapt")
        differ = [name for name in STATE if device.get(name) != want[slot(name)]]
        assert not differ, dict(zip(STATE, state.tolist(), strict=False))
        room = state[slot("capacity")] - state[slot("position")] - 1
        assert 0 <= device.get("depth") <= min(state[slot("depth_cap")], max(0, room))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cap": DEPTH + 1}, f"depth {DEPTH + 1} is not between 0 and 5"),
        ({"cap": -1}, "depth -1 is not between 0 and 5"),
        ({"cut_below": 0.5}, "a threshold of 0.5 would do nothing: .* no confidence in round"),
        ({"late_below": 0.1}, "a threshold of 0.1 would do nothing: .* no confidence next round"),
    ],
)
def test_policy_beyond_the_artifact_is_refused(
    tiny_model: Model, change: dict[str, Any], message: str
) -> None:
    policy = replace(Policy.of(tiny_model.manifest), **change)
    with pytest.raises(MemraError, match=message):
        Session(tiny_model.device, policy).prime([5])


def test_gates_are_compiled_only_where_armed() -> None:
    """A spec that asks for no confidence has the programs it had without the question."""
    found = {}
    for when in ("never", "always"):
        overrides = {"round.confidence.in_round.when": when}
        module = lower(*load(TINY_SPEC, CompileOptions(overrides=overrides)))
        ops = [node.op.name for _, node in module.nodes()]
        begins = [node.op.attrs() for _, node in module.nodes() if node.op.name == "begin"]
        found[when] = ("confidence" in ops, "weigh_draft" in ops, any(b["cuts"] for b in begins))
        live = [c.live for s in module.sequences.values() for c in s.calls if c.repeat]
        assert live == [when == "always"] * len(live)
    assert found == {"never": (False,) * 3, "always": (True,) * 3}

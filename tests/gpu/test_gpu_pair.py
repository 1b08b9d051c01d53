"""The bundled pair on a GPU: numbers of the CPU target, plain text at every depth, replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_support import NEAR_TIE
from pair_bundle import DEPTH, MAIN, VARIANTS, Loaded, on_devices, on_gpu
from pair_truth import distance, spread
from random_rounds import RandomRounds
from worst_errors import note, remark

from memra_runtime.check import Options, run_checks
from memra_runtime.check.prompts import Prompt
from memra_runtime.check.report import CAUGHT, PASS, Parted, Tally
from memra_runtime.check.rig import Rig, free
from memra_runtime.check.rows import CacheReader
from memra_runtime.device.cuda_driver import Memory, Stream
from memra_runtime.model import load_opened, open_model
from memra_runtime.session import Session

#: Largest difference of a logit where nothing is rounded to few bits on the way.
EXACT = 1e-3
#: Other differences, as a multiple of the CPU target's own from float64. Where a value is rounded
#: to int8, bf16 or f16, the last bit of a sum can turn the rounding: two devices then differ as
#: much as float32 and float64 do on one.
SPREADS = 2.0
#: Beside f32 activations, a cache of 16 bits: tensor cores want queries and softmax weights of
#: 16 bits, too (the class of attention says `1 x f16`), while the CPU keeps them in float32. That
#: is one more rounding than the CPU's own distance knows: on an H200 the root mean square of the
#: difference is 1.9 to 3.2 times it.
SPREADS_OF_QUERIES = 4.0
#: Tokens of a text in rounds of one depth.
TOKENS = 64


def limits(pair: Loaded) -> tuple[float, float, float]:
    """Largest and root mean square difference of logits, largest margin of a turned choice."""
    if pair.target == "cpu":
        return 0.0, 0.0, 0.0  # the truth is its own
    own, near = spread(pair.truth), NEAR_TIE
    if (pair.variant.activations, pair.variant.kv) == ("f32", "f32"):
        return EXACT, EXACT, near
    if pair.variant.activations == "f32":
        return SPREADS_OF_QUERIES * own.largest, max(SPREADS_OF_QUERIES * own.rms, EXACT), near
    return SPREADS * own.largest, SPREADS * own.rms, max(near, own.largest)


@pytest.mark.parametrize("pair", on_devices(VARIANTS), indirect=True)
def test_logits_and_tokens_are_those_of_the_cpu_target(pair: Loaded) -> None:
    largest, rms, near = limits(pair)
    found = distance(pair.session(0), pair.truth)
    note(f"{pair.name} max", found.largest, largest)
    note(f"{pair.name} rms", found.rms, rms)
    remark(f"{pair.name}: logits differ by {found}")
    assert found.tokens > 500
    assert found.largest <= largest
    assert found.rms <= rms
    assert found.margin <= near, f"a choice differs at margin {found.margin:.4f}"


@pytest.mark.parametrize("pair", on_devices([]), indirect=True)
def test_a_turned_choice_and_a_wrong_logit_are_noticed(pair: Loaded) -> None:
    truth = {name: value.copy() for name, value in pair.truth.items()}
    truth["logits1"][5, 7] += 0.5
    truth["tokens2"][9] += 1
    found = distance(pair.session(0), truth)
    assert found.largest >= 0.4
    assert (2, 9) in [(prompt, step) for prompt, step, _ in found.turned]


@pytest.mark.parametrize("pair", on_devices(VARIANTS), indirect=True)
def test_speculation_leaves_what_plain_decoding_leaves(pair: Loaded) -> None:
    """Whole rounds of each depth: tokens, counters, the carried row, the bytes of all caches."""
    all_prompts = pair.target == "cuda" and pair.variant in MAIN
    rounds = RandomRounds(pair.device, pair.prompts()[: None if all_prompts else 2], seed=0)
    for depth in range(1, DEPTH + 1):
        before = rounds.tally.accepted
        try:
            for index in range(len(rounds.prompts)):
                found = rounds.text(index, TOKENS, depth=depth)
                plain = rounds.plain_end(index, len(found.tokens))
                rounds.compare(found, plain, f"depth {depth}, prompt {index}")
        except Parted as parted:
            pytest.fail("\n".join(parted.difference.lines()))
        assert rounds.tally.accepted > before, f"no draft was accepted at depth {depth}"


@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
@pytest.mark.parametrize("pair", on_gpu(MAIN), indirect=True)
def test_rows_of_verify_have_the_bits_of_plain_steps(pair: Loaded, depth: int) -> None:
    """Logits, hidden rows and choices; rounds are launched program by program."""
    rig = Rig(pair.model, Options(max_new=TOKENS))
    setting, tally = (f"depth {depth}", rig.fixed(depth)), Tally()
    try:
        for i in (0, 3):
            prompt = Prompt(f"golden {i}", tuple(pair.prompts()[i]))
            rig.follow(tally, prompt, setting, free)
    except Parted as parted:
        pytest.fail("\n".join(parted.difference.lines()))
    assert tally.counts["rows of verify"] > TOKENS


def state_of(device: Any) -> dict[str, bytes]:
    """Everything that a round leaves behind."""
    planes = {p.id: np.array(device.plane(p.id)).tobytes() for p in device.manifest.planes}
    count = device.get("drafted") + 1
    logits = device.value("verify", "target.logits")[:count]
    return {**planes, "logits": logits.tobytes()}


@pytest.mark.parametrize("pair", on_gpu(MAIN), indirect=True)
def test_replay_equals_eager(pair: Loaded) -> None:
    """Captured rounds and the same launches one by one: every bit, after every round."""
    variant = pair.variant
    opened = open_model(variant.artifact, variant.pair.target, variant.pair.draft)
    # fresh devices, so that rows that no round wrote are equal, too
    devices: list[Any] = [load_opened(opened, graphs=graphs).device for graphs in (True, False)]
    sessions = [Session(device, pair.session(DEPTH).policy) for device in devices]
    for ids in pair.prompts()[:3]:
        for session in sessions:
            session.prime(ids, 2 * TOKENS)
        while sessions[0].position < len(ids) + TOKENS:
            replayed, stepped = (session.step() for session in sessions)
            assert replayed == stepped
            a, b = (state_of(device) for device in devices)
            assert [name for name in a if a[name] != b[name]] == []
    assert devices[0].launches > 0
    assert devices[1].launches == 0


@pytest.mark.parametrize("pair", on_gpu(MAIN), indirect=True)
def test_a_round_is_one_launch_and_one_read(pair: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device's own counters, and by the calls that copy or wait."""
    calls: list[str] = []
    for cls, name in ((Memory, "read"), (Memory, "write"), (Stream, "wait")):
        original = getattr(cls, name)

        def counted(self: Any, *args: Any, _name: str = name, _do: Any = original) -> Any:
            calls.append(_name)
            return _do(self, *args)

        monkeypatch.setattr(cls, name, counted)
    device, total = pair.device, 0
    for depth in range(DEPTH + 1):
        session = pair.session(depth)
        session.prime(pair.prompts()[0], 2 * TOKENS)
        session.step()  # captures the graph
        calls.clear()
        before = device.launches, device.reads
        rounds = 8
        for _ in range(rounds):
            session.step()
        assert (device.launches - before[0], device.reads - before[1]) == (rounds, rounds)
        assert calls == ["wait"] * rounds
        total += rounds
    remark(f"{pair.name}: {total} rounds, {total} graph launches, {total} host reads")


@pytest.mark.parametrize("pair", on_gpu(MAIN), indirect=True)
def test_a_burst_is_one_launch(pair: Loaded) -> None:
    """Where the driver can repeat rounds on the device; and it is the text of single rounds."""
    device, session, ids = pair.device, pair.session(), pair.prompts()[0]
    assert device.loops, (
        "the driver cannot repeat rounds on the device (it is older than CUDA 12.8)"
    )
    session.prime(ids, 2 * TOKENS)
    before = device.launches
    wanted = min(TOKENS, device.burst_tokens)
    burst = [token for tokens in session.burst(wanted) for token in tokens]
    assert device.launches == before + 1
    assert device.get("rounds") > 1
    assert len(burst) >= wanted
    session.prime(ids, 2 * TOKENS)
    single: list[int] = []
    while len(single) < len(burst):
        single += session.step()
    assert single == burst


@pytest.mark.parametrize("pair", on_gpu(MAIN), indirect=True)
def test_memra_check_passes(pair: Loaded) -> None:
    """All checks hold, and all planted faults are caught."""
    report = run_checks(pair.model, Options(quick=True))
    assert report.passed, report.render()
    assert {c.name: c.status for c in report.checks if c.status != PASS} == {}
    assert {a.name: a.status for a in report.red_arms if a.status != CAUGHT} == {}
    assert len(report.red_arms) == 3


@pytest.mark.parametrize("pair", on_gpu(MAIN), indirect=True)
def test_caches_are_written_by_the_gpu(pair: Loaded) -> None:
    """The comparisons above see real rows: a prompt fills each cache with other bytes."""
    reader, session = CacheReader(pair.device), pair.session(0)
    reader.clear()
    empty = reader.whole()
    session.prime(pair.prompts()[0], 1)
    assert reader.whole() != empty
    assert all(np.asarray(reader.read(plane)).any() for plane in reader.planes)

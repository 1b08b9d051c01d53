"""Each check turns red when the thing it guards is broken by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tampered import QUICK, Damage, Tampered, after_round, tampered

from memra_runtime.check import run as run_module
from memra_runtime.check import sessions, wiring
from memra_runtime.check.arms import run_arms
from memra_runtime.check.report import FAIL, NOT_CAUGHT, PASS, Outcome
from memra_runtime.check.rig import Options, Rig
from memra_runtime.check.run import run_check, run_checks
from memra_runtime.device.memory import HostBytes
from memra_runtime.model import Model
from memra_runtime.session import Session, text

#: Two prompts, so that texts can take turns.
SESSIONS = Options(prompts=(*QUICK.prompts, "The quick brown fox"), max_new=24, quick=True)


def flip(view: np.ndarray[Any, Any], *index: int) -> None:
    """Flip the lowest bit of one element."""
    view.view(np.uint32)[index] ^= np.uint32(1)


def cache_row(device: Any) -> None:
    flip(device.plane("target.layers.2.k"), 0, (device.get("position") - 1) % 136, 3)


def oldest_visible_row(device: Any) -> None:
    if device.get("position") > 130:
        flip(device.plane("target.layers.4.v"), 0, (device.get("position") - 128) % 136, 3)


def hidden_bit(device: Any, name: str) -> None:
    if name == "run_verify":
        flip(device.plane("verified"), 1, 17)


def logit_bit(device: Any, name: str) -> None:
    if name == "run_verify":
        flip(device.value("verify", "target.logits"), 0, 5)


def lost_token(device: Any) -> None:
    if device.get("accepted"):
        device.put({"ring_count": device.get("ring_count") - 1})


def wrong_pending(device: Any) -> None:
    device.put({"pending": (device.get("pending") + 1) % 4096})


def next_position(device: Any) -> None:
    device.put({"position": device.get("position") + 1})


def one_more_accepted(device: Any, name: str) -> None:
    if name == "run_accept" and device.get("accepted") < device.get("drafted"):
        device.put({"accepted": device.get("accepted") + 1})


def miscounted(device: Any) -> None:
    device.put({"total_accepted": device.get("total_accepted") + 1})


def never_shallower(device: Any) -> None:
    device.put({"depth": 5})


def never_ended(device: Any) -> None:
    device.put({"ended": 0})


def only_stepwise(device: Any, name: str) -> None:
    if name == "run_commit":
        flip(device.plane("carry"), 0)


def other_draft_each_time() -> Damage:
    calls = iter(range(1 << 20))

    def act(device: Any, name: str) -> None:
        if name == "run_draft":
            device.plane("batch")[device.get("step")] = next(calls) % 4096

    return act


def chain_writes_cache(device: Any, name: str) -> None:
    if name == "run_draft":
        device.plane("target.layers.5.k")[0, 0, 0] += 1


FAULTS: dict[str, tuple[str, Damage, str]] = {
    "a cache row": ("row bits", after_round(cache_row), "a cache row has other bits"),
    "a cache row, forced": ("forced", after_round(cache_row), "a cache row has other bits"),
    "the oldest row of a ring": ("windows", after_round(oldest_visible_row), "a cache row"),
    "a bit of a hidden row": ("row bits", hidden_bit, "the hidden row of verify"),
    "a bit of a logit": ("row bits", logit_bit, "`target.logits` of verify"),
    "a lost token": ("stream", after_round(lost_token), "the stream has another token"),
    "a lost token, forced": ("forced", after_round(lost_token), "tokens in the ring"),
    "a wrong pending token": ("stream", after_round(wrong_pending), "the stream has another"),
    "a wrong pending token, forced": ("forced", after_round(wrong_pending), "the pending token"),
    "a position one too far": ("forced", after_round(next_position), "position after the round"),
    "a position one too far, stream": ("stream", after_round(next_position), "the stream has"),
    "one accepted too many": ("forced", one_more_accepted, "accepted drafts"),
    "a wrong count": ("forced", after_round(miscounted), "drafts counted"),
    "a depth past the context": ("windows", after_round(never_shallower), "drafts of a round"),
    "an end that is not seen": ("requests", after_round(never_ended), "why the stream ended"),
    "stepwise differs": ("launches", only_stepwise, "plane `carry` after round 1"),
    "random drafts": ("wiring", other_draft_each_time(), "drafts other tokens the second time"),
    "a chain that writes": ("wiring", chain_writes_cache, "changes the target's caches"),
}


def red(rig: Rig, check: str) -> Outcome:
    outcome, _ = run_check(rig, check)
    assert outcome.status == FAIL
    assert outcome.difference is not None
    return outcome


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_turns_its_check_red(tiny_model: Model, fault: str) -> None:
    check, damage, what = FAULTS[fault]
    outcome = red(tampered(tiny_model, damage), check)
    assert outcome.difference is not None
    assert what in outcome.difference.what


def test_first_difference_names_everything(tiny_model: Model) -> None:
    outcome = red(tampered(tiny_model, after_round(wrong_pending)), "stream")
    text = "\n".join(outcome.lines())
    for part in ("prompt `prompt 1`", "depth 1", "position", "expected token", "found token",
                 "logit margin of the plain step there", "first row whose bits part"):  # fmt: skip
        assert part in text, part


def test_stream_failure_names_the_row_that_parted_first(tiny_model: Model) -> None:
    def other_key(device: Any) -> None:
        device.plane("target.layers.5.k")[0, device.get("position") - 1] *= -3.0

    outcome = red(tampered(tiny_model, after_round(other_key)), "stream")
    assert outcome.difference is not None
    assert outcome.difference.first_row.startswith("cache `target.layers.5.k`, position ")


def test_stale_rows_of_an_earlier_request_are_seen(tiny_model: Model) -> None:
    class Forgetful:
        """Leaves one row of the prompt as it was before."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_model.device, name)

        def launch(self, name: str) -> None:
            rows = tiny_model.device.plane("target.layers.5.v")[0, 5]
            before = rows.copy()
            tiny_model.device.launch(name)
            if name == "prefill" and not np.isnan(before).any():
                rows[:] = before

    rig = tampered(tiny_model)
    rig.device = rig.cache.device = Forgetful()  # type: ignore[assignment]
    assert "second request" in red(rig, "requests").difference.what  # type: ignore[union-attr]


@pytest.mark.parametrize("extra", [1, -1])
def test_a_budget_off_by_one_is_seen(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    right = Session.generate

    def generate(self: Session, max_new: int, **options: Any) -> Iterator[int]:
        return right(self, max(1, max_new + extra), **options)

    monkeypatch.setattr(Session, "generate", generate)
    assert "budget" in red(tampered(tiny_model), "requests").difference.what  # type: ignore[union-attr]


class Broken(Tampered):
    """A device on which something that sessions need does another thing."""

    def __init__(self, device: Any, fault: str) -> None:
        super().__init__(device, instead={"plain": "round"} if fault == "plain drafts" else None)
        self.fault = fault

    def start(self, name: str) -> None:
        super().start(name)
        if self.fault == "a burst loses a token":
            lost_token(self)

    def put_back(self, spans: Sequence[tuple[int, int]], kept: Any) -> None:
        data = kept.bytes().copy()
        self._device.put_back(spans, kept)
        if self.fault == "the last row is not put back" and (data != 0xFF).any():
            offset, size = spans[-1]
            self._device.put_back([(offset + size - 4, 4)], HostBytes(np.zeros(4, np.uint8)))

    def another(self) -> Any:
        """A second device, which should have planes of its own."""
        return copy.copy(self._device) if self.fault == "one arena" else self._device.another()


SESSION_FAULTS = {
    "a burst loses a token": "tokens shown and rows committed",
    "the last row is not put back": "a cache row has other bits",
    "plain drafts": "drafts after demotion",
    "one arena": "the text",
}


@pytest.mark.parametrize("fault", SESSION_FAULTS)
def test_a_broken_session_is_seen(tiny_model: Model, fault: str) -> None:
    rig = Rig(replace(tiny_model, device=Broken(tiny_model.device, fault)), SESSIONS)
    outcome = red(rig, "sessions")
    assert outcome.difference is not None
    assert outcome.difference.what.startswith(SESSION_FAULTS[fault])


def test_a_lost_hidden_row_is_seen(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays right without it; only what the drafter starts from is another."""
    right = Session.restore

    def restore(self: Session, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        if len(args) == 1:
            self.device.plane("hidden")[:] = 0

    monkeypatch.setattr(Session, "restore", restore)
    outcome = red(Rig(tiny_model, SESSIONS), "sessions")
    assert outcome.difference is not None
    assert outcome.difference.setting == "restored whole"


def test_a_cut_behind_a_turned_ring_is_seen(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it not refused, a text that is cut back too far would have other rows."""
    monkeypatch.setattr(text, "least_kept", lambda *_: 0)
    monkeypatch.setattr(sessions, "least_kept", lambda manifest, written: written - 20)
    outcome = red(Rig(tiny_model, Options(max_new=24, quick=True)), "sessions")
    assert outcome.difference is not None
    assert "cut back to" in outcome.difference.setting


def test_no_room_for_a_second_text_is_said(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = tiny_model.manifest.arena_bytes
    monkeypatch.setattr(tiny_model.device, "free", lambda: arena - 1)
    outcome, _ = run_check(Rig(tiny_model, SESSIONS), "sessions")
    assert outcome.status == PASS
    assert "two texts at once were not tried" in outcome.notes[0]


SHIFTED = {
    "round": "round_fault_shift_kv_target",
    "run_draft": "run_draft_fault_shift_kv_target",
}


def test_a_wrong_kv_target_in_the_spec_is_called_wrong_wiring(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "PROBED_TOKENS", 24)
    swapped = SHIFTED | {wrong: right for right, wrong in SHIFTED.items()}
    outcome = red(tampered(tiny_model, instead=swapped), "wiring")
    assert outcome.difference is not None
    assert outcome.difference.what.startswith("the spec's wiring looks wrong: with `shift_kv_tar")


def test_acceptance_of_zero_fails(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "PROBED_TOKENS", 24)
    outcome = red(tampered(tiny_model, instead=SHIFTED), "wiring")
    assert outcome.difference is not None
    assert outcome.difference.what.startswith("acceptance is about zero")


def test_an_arm_that_breaks_nothing_is_not_caught(tiny_model: Model) -> None:
    harmless = {"round_fault_skip_rollback": "round",
                "run_rollback_fault_skip_rollback": "run_rollback"}  # fmt: skip
    rig = tampered(tiny_model, instead=harmless)
    arm = run_arms(rig, [])[0]
    assert (arm.name, arm.status) == ("skip_rollback", NOT_CAUGHT)


def test_a_draft_side_arm_that_changes_the_text_fails(tiny_model: Model) -> None:
    worse = {"round_fault_wrong_carry_row": "round_fault_skip_rollback"}
    arm = {a.name: a for a in run_arms(tampered(tiny_model, instead=worse), [])}["wrong_carry_row"]
    assert arm.status == NOT_CAUGHT
    assert "a broken drafter changed the text" in arm.reason


def test_one_failure_fails_the_report(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_module, "CHECKS", {n: c for n, c in run_module.CHECKS.items() if n == "row bits"}
    )
    device: Callable[..., Rig] = tampered
    rig = device(tiny_model, hidden_bit)
    report = run_checks(rig.model, rig.options)
    assert not report.passed
    assert "checks that failed: row bits" in report.verdict()
    assert "red arms not caught: shift_kv_target" in report.verdict()

"""Red arms: the artifact's own broken rounds, each of which some check must see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memra_runtime.check.report import (
    CAUGHT,
    NOT_APPLICABLE,
    NOT_CAUGHT,
    Arm,
    Parted,
    Tally,
    Verdict,
)
from memra_runtime.check.rig import Rig, right_until
from memra_runtime.check.streams import compare_stream
from memra_runtime.check.trim import check_trim
from memra_runtime.check.wiring import DRAFT_SIDE
from memra_runtime.errors import MemraError

ARMS = {"skip_rollback": "the rows of rejected drafts stay committed", **DRAFT_SIDE}
_PREFIX = "round_fault_"


def run_arms(rig: Rig, verdicts: Sequence[Verdict]) -> list[Arm]:
    """Run every red arm; `verdicts` are those of the check `wiring`."""
    planted = [n.removeprefix(_PREFIX) for n in rig.manifest.sequences if n.startswith(_PREFIX)]
    whole = rig.manifest.head is None
    known = [name for name in ARMS if not (whole and name == "skip_remap")]  # there is no map
    return [run_arm(rig, name, planted, verdicts) for name in dict.fromkeys([*known, *planted])]


def run_arm(rig: Rig, name: str, planted: Sequence[str], verdicts: Sequence[Verdict]) -> Arm:
    """Run one red arm and say which check catches it."""
    does = ARMS.get(name, "a fault this memra-check does not know")
    if name not in planted:
        reason = "the artifact has no such arm, since the fault would change nothing here"
        return Arm(name, does, NOT_APPLICABLE, reason=reason)
    sequence = _PREFIX + name
    stream = sees(lambda: _streams(rig, sequence))
    found = ["stream"] if stream else []
    found += ["forced"] if sees(lambda: _forced(rig, sequence)) else []
    if name == "skip_remap" and sees(lambda: check_trim(rig, Tally(), sequence)):
        found.append("trim")
    found += ["wiring"] if any(v.arm == name and v.caught for v in verdicts) else []
    if name not in DRAFT_SIDE:
        return Arm(name, does, CAUGHT if found else NOT_CAUGHT, tuple(found))
    if stream:
        reason = f"a broken drafter changed the text, which must be impossible: {stream}"
        return Arm(name, does, NOT_CAUGHT, reason=reason)
    if "wiring" not in found:
        return Arm(name, does, NOT_CAUGHT, reason="the check `wiring` cannot tell it apart")
    return Arm(name, does, CAUGHT, tuple(found), "the text stayed the same, as it must")


def sees(check: Callable[[], None]) -> str:
    """What a check finds, in words; empty when it stays green."""
    try:
        check()
    except Parted as parted:
        return " ".join(parted.difference.lines())
    except MemraError as error:
        return str(error)
    return ""


def _streams(rig: Rig, sequence: str) -> None:
    for prompt in rig.prompts:
        for setting in (
            (f"depth {rig.cap}", rig.fixed(rig.cap)),
            ("the spec's policy", rig.policy),
        ):
            compare_stream(rig, prompt, setting, sequence)


def _forced(rig: Rig, sequence: str) -> None:
    setting = (f"depth {rig.cap}", rig.fixed(rig.cap))
    for wrong in range(rig.cap + 1):
        script = right_until(wrong, rig.vocab)
        rig.follow(Tally(), rig.prompts[0], setting, script, sequence=sequence)

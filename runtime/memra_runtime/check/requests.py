"""Check `requests`: what a caller sees at the edges of a generation, and on a used session."""

from __future__ import annotations

from memra_runtime.check.prompts import Prompt
from memra_runtime.check.report import Tally, differ
from memra_runtime.check.rig import Rig
from memra_runtime.check.rows import Trace, first_unequal
from memra_runtime.check.streams import first_apart
from memra_runtime.session import Policy, Session


def check_requests(rig: Rig, tally: Tally) -> None:
    """A second request, end of sequence at every slot, exact budgets."""
    second_request(rig, tally)
    prompt = next((p for p in rig.prompts if p.name == "code"), rig.prompts[0])
    policies = [rig.fixed(rig.cap), rig.policy]
    for policy in policies:
        for forced in (False, True):
            end_of_sequence(rig, tally, prompt, policy, forced)
            exact_budget(rig, tally, prompt, policy, forced)


def second_request(rig: Rig, tally: Tally) -> None:
    """A request after another one equals the same request on caches full of NaN."""
    short = min(rig.built_in, key=lambda p: len(p.ids))
    long = max(rig.built_in, key=lambda p: len(p.ids))
    for first, second in ((long, short), (short, long)):
        session = rig.session(rig.policy)
        rig.cache.poison()
        fresh = _answer(rig, session, second)
        rig.cache.clear()
        _answer(rig, session, first)
        used = _answer(rig, session, second)
        place = {"prompt": second.name, "setting": f"after a request `{first.name}`"}
        at = first_apart(fresh[0], used[0])
        if at is not None:
            position = len(second.ids) + at
            differ("a second request differs from a fresh one",
                   rig.text(_at(fresh[0], at)), rig.text(_at(used[0], at)),
                   position=position, **place)  # fmt: skip
        bad = first_unequal(fresh[1], used[1])
        if bad is not None:
            differ("a cache row of a second request differs from a fresh one", "equal bits",
                   "other bits", position=bad[1], first_row=f"cache `{bad[0]}`",
                   **place)  # fmt: skip
        tally.add("second requests")


def _answer(
    rig: Rig, session: Session, prompt: Prompt
) -> tuple[list[int], dict[tuple[str, int], bytes]]:
    session.prime(prompt.ids, rig.max_new)
    tokens = list(session.generate(rig.max_new))
    return tokens, rig.cache.all(session.position)


def _at(tokens: list[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def start(
    rig: Rig, prompt: Prompt, policy: Policy, forced: bool, eos: tuple[int, ...] = ()
) -> tuple[Session, Trace]:
    """A primed session; `forced` makes every draft right, so that rounds are as long as can be."""
    trace = rig.trace(prompt)
    session = rig.session(policy, eos)
    session.prime(prompt.ids)
    if forced:
        first, plane = len(prompt.ids), rig.device.plane("forced")
        known = min(len(trace.tokens), len(plane) - first)
        plane[first : first + known] = trace.tokens[:known]
    return session, trace


def end_of_sequence(rig: Rig, tally: Tally, prompt: Prompt, policy: Policy, forced: bool) -> None:
    """Let a token of the stream end it: at every slot of the first rounds."""
    trace = rig.trace(prompt)
    for at in range(min(3 * (rig.cap + 1), rig.max_new)):
        token = trace.tokens[at]
        if token in trace.tokens[:at]:
            continue  # it would end the stream earlier
        session, _ = start(rig, prompt, policy, forced, (token,))
        found = list(session.generate(rig.max_new))
        place = {"prompt": prompt.name, "position": len(prompt.ids) + at,
                 "setting": f"end of sequence is {rig.text(token)}"}  # fmt: skip
        if found != trace.tokens[: at + 1]:
            differ("tokens up to an end of sequence", f"{at + 1} tokens of the plain run",
                   f"{len(found)} tokens", **place)  # fmt: skip
        if session.stats.finish != "eos" or not rig.device.get("ended"):
            found_end = f"{session.stats.finish}, ended = {rig.device.get('ended')}"
            differ("why the stream ended", "eos, ended = 1", found_end, **place)
        tally.add("ends of sequence")


def exact_budget(rig: Rig, tally: Tally, prompt: Prompt, policy: Policy, forced: bool) -> None:
    """`max_new` tokens are exactly that many, wherever a round happens to end."""
    for budget in range(1, min(rig.cap + 3, rig.max_new) + 1):
        session, trace = start(rig, prompt, policy, forced)
        found = list(session.generate(budget))
        place = {"prompt": prompt.name, "setting": f"max_new {budget}"}
        if found != trace.tokens[:budget] or session.stats.finish != "length":
            differ("a budget of tokens", f"{budget} tokens of the plain run, finish `length`",
                   f"{len(found)} tokens, finish `{session.stats.finish}`", **place)  # fmt: skip
        tally.add("budgets")

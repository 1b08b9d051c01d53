"""Check `sessions`: bursts, snapshots, demotion and turns change nothing in a text."""

from __future__ import annotations

from typing import Any

import numpy as np

from memra_runtime.check.prompts import Prompt
from memra_runtime.check.report import Tally, differ
from memra_runtime.check.rig import Rig
from memra_runtime.check.rows import CacheReader, bits_apart, first_unequal, same_bits
from memra_runtime.check.streams import first_apart
from memra_runtime.device.memory import HostBytes, gib
from memra_runtime.model import another_model
from memra_runtime.session import Session
from memra_runtime.session.snapshot import row_spans
from memra_runtime.session.text import least_kept

#: Tokens of the texts that are compared, and rounds of each turn.
_TOKENS = 24
_TURNS = 4


def check_sessions(rig: Rig, tally: Tally) -> None:
    """Bursts of every width, restored prefixes, demotion, and two texts that take turns."""
    prompts = [
        min(rig.prompts, key=lambda p: len(p.ids)),
        max(rig.prompts, key=lambda p: len(p.ids)),
    ]
    prompts = list({p.ids: p for p in prompts}.values())
    for prompt in prompts:
        rig.trace(prompt)  # first, since it runs on the same device
        bursts(rig, tally, prompt)
        goes_on(rig, tally, prompt)
        restored(rig, tally, prompt)
        demoted(rig, tally, prompt)
    turns(rig, tally, (prompts[0], prompts[-1]))


def _start(rig: Rig, prompt: Prompt) -> Session:
    session = rig.session(rig.policy)
    session.prime(prompt.ids)
    return session


def _expect_text(rig: Rig, prompt: Prompt, found: list[int], setting: str) -> None:
    """The tokens behind a prompt are plain decoding's."""
    trace = rig.trace(prompt, len(found))
    at = first_apart(trace.tokens[: len(found)], found)
    if at is not None:
        position = len(prompt.ids) + at
        differ("the text is not that of plain decoding", rig.text(trace.token(position)),
               rig.text(found[at] if at < len(found) else None), prompt=prompt.name,
               setting=setting, position=position, margin=trace.margin(position))  # fmt: skip


def bursts(rig: Rig, tally: Tally, prompt: Prompt) -> None:
    """Bursts of one width, put together, are the text of one; none ends inside a round."""
    count = min(_TOKENS, rig.max_new)
    for width in (1, 2, rig.cap + 2) if rig.options.quick else range(1, rig.cap + 3):
        session, found = _start(rig, prompt), list[int]()
        setting = f"bursts of {width}"
        while len(found) < count and session.position < rig.capacity:
            burst = [token for tokens in session.burst(width) for token in tokens]
            found += burst
            rows = session.position - len(prompt.ids)
            if rows != len(found) or not burst:
                differ("tokens shown and rows committed", rows, len(found), prompt=prompt.name,
                       setting=setting, position=len(prompt.ids) + len(found))  # fmt: skip
        _expect_text(rig, prompt, found, setting)
        tally.add("burst widths")


def goes_on(rig: Rig, tally: Tally, prompt: Prompt) -> None:
    """A snapshot, taken up after another text, leaves what going straight on leaves."""
    session = _start(rig, prompt)
    room = rig.capacity - len(prompt.ids) - rig.cap
    rounds = max(0, min(3, room // (rig.cap + 1) // 2))
    for _ in range(rounds):
        session.step()
    snapshot, ends = session.snapshot(), []
    for again in (False, True):
        if again:
            _other_text(rig, len(session.committed))
            session.restore(snapshot)
        ends.append(_end(session))
        for _ in range(rounds):
            session.step()
        ends.append(_end(session))
    place = {"prompt": prompt.name, "setting": "restored whole"}
    _compare(tally, ends[0], ends[2], place)
    _compare(tally, ends[1], ends[3], place | {"setting": f"restored whole, {rounds} rounds on"})


def restored(rig: Rig, tally: Tally, prompt: Prompt) -> None:
    """A prompt in two parts, with another text between, leaves what it leaves in one."""
    ids, length = list(prompt.ids), len(prompt.ids)
    session = _start(rig, prompt)
    cold = _end(session)
    whole = session.snapshot()
    least = max(1, least_kept(rig.manifest, session.text.written))
    for cut in sorted({1, length // 2, length - 1} - {0, length}):
        session.prime(ids[:cut])
        part = session.snapshot()
        _other_text(rig, length)
        session.restore(part, ids[cut:])
        place = {"prompt": prompt.name, "setting": f"a prefix of {cut} tokens"}
        _compare(tally, cold, _end(session), place)
    for keep in sorted({least, length - 1} & set(range(least, length))):
        _other_text(rig, length)
        session.restore(whole, ids[keep:], keep=keep)
        place = {"prompt": prompt.name, "setting": f"cut back to {keep} tokens"}
        _compare(tally, cold, _end(session), place)


def demoted(rig: Rig, tally: Tally, prompt: Prompt) -> None:
    """Plain decoding takes over the pending token, and drafts nothing."""
    count = min(_TOKENS, rig.max_new)
    session = _start(rig, prompt)
    found = [token for tokens in session.burst(count // 2) for token in tokens]
    before = rig.device.get("total_drafted")
    session.demote()
    found += [token for tokens in session.burst(count // 2) for token in tokens]
    place = {"prompt": prompt.name, "setting": "demoted to plain decoding"}
    _expect_text(rig, prompt, found, place["setting"])
    drafted = rig.device.get("total_drafted") - before
    if drafted:
        differ("drafts after demotion", 0, drafted, **place)
    trace = rig.trace(prompt, len(found))
    rows = rig.cache.all(session.position)
    bad = first_unequal(trace.cache, rows)
    if bad is not None:
        differ("a cache row has other bits than in a run that never drafted", "equal bits",
               "other bits", position=bad[1], **place)  # fmt: skip
    tally.add("cache rows", len(rows))


def turns(rig: Rig, tally: Tally, prompts: tuple[Prompt, Prompt]) -> None:
    """Two texts on one model, a round of each in turn, are the two alone."""
    need, free = rig.manifest.arena_bytes, rig.device.free()
    if free is not None and need > free:
        tally.notes.append(f"two texts at once were not tried: the second needs {gib(need)}, "
                           f"{gib(free)} are free")  # fmt: skip
        return
    room = rig.capacity - max(len(p.ids) for p in prompts)
    rounds = min(_TURNS, room // (rig.cap + 1))
    alone = []
    for prompt in prompts:
        session = _start(rig, prompt)
        for _ in range(rounds):
            session.step()
        alone.append(_end(session))
    devices = (rig.device, another_model(rig.model).device)
    sessions = [Session(device, rig.policy) for device in devices]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.prime(prompt.ids)
    for _ in range(rounds):
        for session in sessions:
            session.step()
    for session, prompt, end in zip(sessions, prompts, alone, strict=True):
        place = {"prompt": prompt.name, "setting": "two texts in turns"}
        _compare(tally, end, _end(session), place)
    tally.add("turns", 2 * rounds)


def _other_text(rig: Rig, tokens: int) -> None:
    """Begin another text, and leave NaN where `tokens` of this one had their rows."""
    rig.session(rig.fixed(0)).prime(rig.built_in[0].ids)
    spans = row_spans(rig.manifest, tokens)
    size = sum(size for _, size in spans)
    rig.device.put_back(spans, HostBytes(np.full(size, 0xFF, np.uint8)))


def _end(session: Session) -> dict[str, Any]:
    """What a session has left: its tokens, the device block, the carried row, the caches."""
    device = session.device
    return {
        "tokens": list(session.committed),
        "device block": np.array(device.state),
        "hidden": np.array(device.plane("hidden")),
        "caches": CacheReader(device).all(session.position),
    }


def _compare(
    tally: Tally, wanted: dict[str, Any], found: dict[str, Any], place: dict[str, Any]
) -> None:
    at = first_apart(wanted["tokens"], found["tokens"])
    if at is not None:
        differ("the text", f"token {wanted['tokens'][at : at + 1]}",
               f"token {found['tokens'][at : at + 1]}", position=at, **place)  # fmt: skip
    bad = first_unequal(wanted["caches"], found["caches"])
    if bad is not None:
        differ("a cache row has other bits", "equal bits", "other bits", position=bad[1],
               first_row=f"cache `{bad[0]}`, position {bad[1]}", **place)  # fmt: skip
    if not same_bits(wanted["hidden"], found["hidden"]):
        differ("the carried hidden row", "equal bits",
               bits_apart(wanted["hidden"], found["hidden"]), **place)  # fmt: skip
    if not same_bits(wanted["device block"], found["device block"]):
        slots = np.flatnonzero(wanted["device block"] != found["device block"]).tolist()
        differ(f"counters {slots} of the device block", wanted["device block"][slots].tolist(),
               found["device block"][slots].tolist(), **place)  # fmt: skip
    tally.add("cache rows", len(found["caches"]))

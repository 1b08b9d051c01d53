"""Check `windows`: prompts whose length straddles the edges of rings, and a context that fills."""

from __future__ import annotations

from memra_runtime.artifact import Manifest
from memra_runtime.check.prompts import Prompt
from memra_runtime.check.report import Tally, differ
from memra_runtime.check.rig import Rig, free, right_until
from memra_runtime.check.rows import ring_edges
from memra_runtime.session import Policy

#: The longest context that is filled to its true end; a longer one would take minutes.
LONGEST_FILL = 8192


def check_windows(rig: Rig, tally: Tally) -> None:
    """Prompts around each window and ring edge, and the end of the context."""
    lengths = edge_lengths(rig.manifest, rig.cap, quick=rig.options.quick)
    after = 2 * (rig.cap + 1)
    lengths = [n for n in lengths if n + after + rig.cap + 1 <= rig.capacity]
    adaptive = ("the spec's policy", rig.policy)
    deep = (f"depth {rig.cap}", rig.fixed(rig.cap))
    for length in lengths:
        prompt = rig.long_prompt(length)
        rig.follow(tally, prompt, adaptive, free, count=after)
        for wrong in (rig.cap,) if rig.options.quick else (rig.cap, 0, 1):
            rig.follow(tally, prompt, deep, right_until(wrong, rig.vocab), count=after)
        tally.add("prompt lengths")
    if not lengths:
        tally.notes.append("no cache is a ring here: only the end of the context has an edge")
    fill_short(rig, tally)
    fill_whole(rig, tally)


def edge_lengths(manifest: Manifest, depth: int, *, quick: bool) -> list[int]:
    """Prompt lengths around each edge: from a round before it to two tokens past it."""
    around = range(-1, 2) if quick else range(-depth - 1, 3)
    return sorted({edge + d for edge in ring_edges(manifest) for d in around if edge + d > 0})


def fill_short(rig: Rig, tally: Tally) -> None:
    """A context that ends soon: the depth must shrink to 0, and every token must still be right."""
    prompt = min(rig.built_in, key=lambda p: len(p.ids))
    room = 2 * rig.cap + 3
    for name, policy in rig.policies():
        fill(rig, tally, prompt, (name, policy), len(prompt.ids) + room)


def fill_whole(rig: Rig, tally: Tally) -> None:
    """The true end of the context."""
    room = 2 * rig.cap + 3
    if rig.capacity > LONGEST_FILL:
        tally.notes.append(
            f"the true end of the context ({rig.capacity:,} tokens) was not filled: "
            f"more than {LONGEST_FILL:,}"
        )
        return
    prompt = rig.long_prompt(max(1, rig.capacity - room))
    setting = (f"depth {rig.cap}", rig.fixed(rig.cap))
    rig.follow(tally, prompt, setting, right_until(rig.cap, rig.vocab), count=room)
    fill(rig, tally, prompt, setting, rig.capacity)


def fill(
    rig: Rig, tally: Tally, prompt: Prompt, setting: tuple[str, Policy], capacity: int
) -> None:
    """Generate until `capacity` rows are committed, watching the depth."""
    name, policy = setting
    count = capacity - len(prompt.ids) + 1
    trace = rig.trace(prompt, count)
    session = rig.session(policy)
    session.capacity = capacity
    session.prime(prompt.ids, count)
    tokens: list[int] = []
    place = {"prompt": prompt.name, "setting": f"{name}, context of {capacity}"}
    while session.position < capacity:
        before, depth = session.position, rig.device.get("depth")
        if before + depth + 1 > capacity:
            room = f"{capacity - before - 1} at most"
            differ("drafts of a round as the context ends", room, depth, position=before, **place)
        tokens += session.step()
        if session.position <= before:
            differ("position after a round", f"more than {before}", session.position, **place)
    tokens.append(session.pending)
    for i, (wanted, found) in enumerate(zip(trace.tokens, tokens, strict=False)):
        if wanted != found:
            at = len(prompt.ids) + i
            differ("the stream has another token than plain decoding", rig.text(wanted),
                   rig.text(found), position=at, margin=trace.margin(at), **place)  # fmt: skip
    if len(tokens) != count or session.position != capacity:
        differ("tokens in a full context", count, len(tokens), **place)
    tally.add("contexts filled")

"""The prompts a check runs on: the user's, or a few built-in ones of different kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memra_runtime.tokenizer import Tokenizer

BUILT_IN = {
    "prose": "Once upon a time there was a lighthouse keeper who counted the ships and",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "question": "Question: how many legs does a spider have, and why?\nAnswer:",
    "numbers": "1, 2, 3, 5, 8, 13, 21, 34, 55,",
}
_LONG = (
    "The harbour lay quiet. Two boats came in before noon, three after it; none of them "
    "carried fish. `for boat in harbour: print(boat.name)` was all the clerk had written, "
    "in a hand of 1904, under a heading that said: arrivals, cargo, weather. "
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids."""

    name: str
    ids: tuple[int, ...]


def given(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> list[Prompt]:
    """The user's prompts, cut to `limit` tokens."""
    return [
        Prompt(f"prompt {i + 1}", tuple(tokenizer.encode(text)[:limit]))
        for i, text in enumerate(texts)
    ]


def built_in(tokenizer: Tokenizer, longest: int, limit: int) -> list[Prompt]:
    """One token, four short kinds, and one of `longest` tokens; none above `limit`."""
    found = [Prompt(name, tuple(tokenizer.encode(text))) for name, text in BUILT_IN.items()]
    one = Prompt("one token", found[0].ids[:1])
    long = Prompt("long", long_ids(tokenizer, longest))
    return [Prompt(p.name, p.ids[:limit]) for p in (one, *found, long)]


def long_ids(tokenizer: Tokenizer, count: int) -> tuple[int, ...]:
    """`count` ids of running text."""
    ids = tokenizer.encode(_LONG)
    part = tokenizer.encode(_LONG, add_bos=False)
    while len(ids) < count:
        ids += part
    return tuple(ids[:count])

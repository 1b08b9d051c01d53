"""What both sources of a tokenizer are reduced to: tokens, their kinds, merges, ends of a text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    """What a token is; the numbers are those of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    CONTROL = 3  # not printed
    VISIBLE = 4  # matched whole like a control token, but printed: user-defined tokens
    UNUSED = 5  # padding of the vocabulary
    BYTE = 6  # `<0xE2>`, one byte of a character without a token


_UNKNOWN = 2  # `<unk>`: a control token here
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: Text that can only be a marker. A converter types some of these as normal tokens; no merge makes
#: them, so without a rule of their own a prompt could not contain them.
_MARKER = re.compile(r"<\|[^<>|]*\w[^<>|]*\|?>|<[^<>|]*\w[^<>|]*\|>|<unused\d+>")
#: Printed although they are control tokens, because whoever parses a reply needs them.
#: Source: llama.cpp, `conversion/gemma.py` (Gemma4Model.set_vocab).
_SHOWN = frozenset(
    {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
     "<tool_response|>", '<|"|>'}
)  # fmt: skip
#: End a reply by their text alone: files name one end, models use several.
#: Source: llama.cpp, `src/llama-vocab.cpp` (special_eog_ids).
_ENDS = frozenset(
    {"<eos>", "<turn|>", "<|tool_response>", "<end_of_turn>", "<|im_end|>", "<|endoftext|>",
     "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"}
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, a kind for each, and the merges in order of rank (`left right`)."""

    tokens: Sequence[str]
    kinds: Sequence[Kind]
    merges: Sequence[str]

    def ends(self, named: Iterable[object]) -> frozenset[int]:
        """Return the ids that end a text: those a config names, and those known by their text."""
        ids = {i for item in named if (i := self.valid(item)) is not None}
        ids |= {i for i in self.matched() if self.tokens[i] in _ENDS}
        return frozenset(ids)

    def valid(self, value: object) -> int | None:
        """Return a value if it is the id of a token."""
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def matched(self) -> list[int]:
        """Return the ids that are matched whole in a text before any merging."""
        return [i for i, kind in enumerate(self.kinds) if kind in (Kind.CONTROL, Kind.VISIBLE)]

    def fingerprint(self) -> str:
        """Return a hash that two files share when they tokenize alike."""
        state = hashlib.blake2b(digest_size=16)
        for strings in (self.tokens, self.merges):
            raw = [string.encode("utf-8", "surrogatepass") for string in strings]
            state.update(np.array([len(item) for item in raw], dtype="<u4").tobytes())
            state.update(b"".join(raw))
        state.update(bytes(self.kinds))
        return state.hexdigest()


def kind_in_gguf(token: str, number: int) -> Kind:
    """Return the kind of a token from its text and its `token_type` (1 to 6)."""
    if number == Kind.NORMAL and not token.startswith("<"):
        return Kind.NORMAL  # nearly all: a vocabulary has a quarter of a million
    if token in _SHOWN and number != Kind.UNUSED:
        return Kind.VISIBLE
    if number == Kind.NORMAL:
        return Kind.CONTROL if _MARKER.fullmatch(token) else kind_in_json(token, None)
    return Kind.CONTROL if number == _UNKNOWN else Kind(number)


def kind_in_json(token: str, special: bool | None) -> Kind:
    """Return the kind of a token of tokenizer.json; `special` is None unless it is an added one."""
    if special is None:
        return Kind.BYTE if _BYTE.fullmatch(token) else Kind.NORMAL
    return Kind.CONTROL if special and token not in _SHOWN else Kind.VISIBLE


def steers(token: str, kind: Kind) -> bool:
    """Tell a token that `special=False` leaves as plain text, printed or not."""
    return kind == Kind.CONTROL or token in _SHOWN

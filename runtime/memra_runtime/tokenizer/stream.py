"""Decode ids one by one without ever emitting half of a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Text as it becomes certain; all of it together equals `Tokenizer.decode` of all ids.

    A character without a token comes as two to four byte tokens: the text appears with the last.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        """`piece` gives the bytes of a token id."""
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is now certain, possibly empty."""
        return self._decoder.decode(self._piece(token_id))

    def flush(self) -> str:
        """Return what is left: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)

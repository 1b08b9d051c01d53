"""The algorithm of llama.cpp for tokenizer kind `gemma4`, restated plainly, as a second opinion.

Source: llama.cpp `src/llama-vocab.cpp` at 00ad355: tokenizer_st_partition (control tokens first,
longest text first), llm_tokenizer_bpe_session::tokenize (lowest rank first, leftmost on a tie; a
run of newlines that is a token is taken whole; bytes for what is no token).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise


class LlamaReference:
    def __init__(
        self, tokens: Sequence[str], merges: Iterable[str], matched: Iterable[int]
    ) -> None:
        self.ids = {text: i for i, text in enumerate(tokens)}
        self.ranks: dict[tuple[str, str], int] = {}
        for rank, merge in enumerate(merges):
            split = merge.index(" ", 1)
            self.ranks.setdefault((merge[:split], merge[split + 1 :]), rank)
        self.matched = sorted((tokens[i] for i in matched), key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        parts: list[str | int] = [text]
        for token in self.matched:
            parts = [piece for part in parts for piece in self._cut(part, token)]
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            for word in re.findall(r"[^\n]+|\n+", part.replace(" ", "\u2581")):
                ids += self._word(word)
        return ids

    def _cut(self, part: str | int, token: str) -> list[str | int]:
        if isinstance(part, int):
            return [part]
        pieces: list[str | int] = []
        for index, rest in enumerate(part.split(token)):
            pieces += [self.ids[token]] if index else []
            pieces += [rest] if rest else []
        return pieces

    def _word(self, word: str) -> list[int]:
        if not word.strip("\n") and word in self.ids:
            return [self.ids[word]]
        symbols = list(word)
        while True:
            ranked = [
                (self.ranks[pair], at)
                for at, pair in enumerate(pairwise(symbols))
                if pair in self.ranks
            ]
            if not ranked:
                break
            at = min(ranked)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        ids: list[int] = []
        for symbol in symbols:
            if symbol in self.ids:
                ids.append(self.ids[symbol])
            else:
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids

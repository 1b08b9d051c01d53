"""The tokenizer of a model: encode, decode, ends of a text, chat template."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memra_runtime.errors import fail
from memra_runtime.tokenizer.chat import render
from memra_runtime.tokenizer.stream import StreamDecoder
from memra_runtime.tokenizer.vocabulary import Kind, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
    """Token ids of one model; safe to use from several threads.

    `vocab_size` counts tokens that have a text; an embedding may have more rows than that.
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        place: str,
        *,
        bos_id: int | None,
        add_bos: bool,
        eos_id: int | None,
        eos_ids: frozenset[int],
        suppress_ids: Sequence[int] = (),
        chat_template: str | None = None,
        byte_alphabet: Mapping[str, int] | None = None,
    ) -> None:
        """`eos_id` is the end that templates write, `eos_ids` are all that end a text.

        `byte_alphabet` is for vocabularies whose characters stand for bytes (GPT-2's way).
        """
        self._engine = engine
        self._lock = threading.Lock()
        self._alphabet = byte_alphabet
        self.vocabulary = vocabulary
        self.place = place
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.eos_id = eos_id
        self.eos_ids = eos_ids
        self.suppress_ids = tuple(suppress_ids)
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokens, kinds and merges: equal for files that tokenize alike."""
        return self.vocabulary.fingerprint()

    def token(self, token_id: int) -> str:
        """Return the text of a token as the vocabulary stores it; empty for a padded row."""
        return self.vocabulary.tokens[token_id] if 0 <= token_id < self.vocab_size else ""

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the ids of a text.

        The id that begins a text comes first if the model wants it (`self.add_bos`) and `add_bos`.
        `special` lets text such as `<|turn>` become the control token; say False for text that
        must not steer the model. Raises: MemraError for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            fail(
                "text-surrogate",
                f"character {error.start} of the text is half of a surrogate pair "
                f"(U+{ord(text[error.start]):04X}) and has no UTF-8 form",
                hints=("decode the input as UTF-8, or with errors='replace'",),
            )
        with self._lock:
            self._engine.encode_special_tokens = not special
            ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        if add_bos and self.add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """Return the bytes that a token adds to a text.

        Control tokens add nothing unless `special`; a padded row without a text gives U+FFFD.
        """
        if not 0 <= token_id < self.vocab_size:
            return _REPLACEMENT
        token, kind = self.vocabulary.tokens[token_id], self.vocabulary.kinds[token_id]
        if kind == Kind.CONTROL:
            return token.encode() if special else b""
        if kind == Kind.VISIBLE:
            return token.encode()
        if kind == Kind.BYTE:
            return bytes([int(token[3:5], 16)])
        if self._alphabet is not None and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        return token.replace(_SPACE, " ").encode()

    def stream(self, *, special: bool = False) -> StreamDecoder:
        """Return a decoder that takes ids one by one."""
        return StreamDecoder(lambda token_id: self.piece(token_id, special=special))

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        pieces = [self.piece(token_id, special=special) for token_id in ids]
        return b"".join(pieces).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Render messages with the model's chat template.

        Raises: MemraError if the model has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            fail(
                "chat-template",
                "this model has no chat template",
                self.place,
                hints=("give a plain prompt, without `--chat`",),
            )
        values: dict[str, object] = {"add_generation_prompt": add_generation_prompt}
        for name, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if token_id is not None:
                values[name] = self.token(token_id)
        values |= variables
        return render(self.chat_template, messages, values, self.place)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Render messages and encode them, with exactly one id that begins the text."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        ids = self.encode(text, add_bos=False)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_turn(self, content: str, text: Sequence[int]) -> list[int]:
        """Encode a user's next message, to be put behind `text`, which ends with a reply.

        What the template writes behind a reply closes it, unless the reply has its end already.
        Raises: MemraError as `render_chat`.
        """
        reply = "reply-to-be-cut-off"  # words that a template has no reason to change
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": content},
        ]
        _, found, turn = self.render_chat(messages).partition(reply)
        if not found:
            fail(
                "chat-template",
                "the model's chat template leaves out earlier replies, so no turn can follow one",
                self.place,
                hints=("begin anew with the whole conversation as `--prompt`",),
            )
        ids = self.encode(turn, add_bos=False)
        if text and ids and text[-1] == ids[0] and ids[0] in self.eos_ids:
            del ids[0]
        return ids

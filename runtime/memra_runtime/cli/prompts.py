"""The prompt of a request, in the four ways the command line takes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_runtime.tokenizer import Tokenizer

#: Tokens produced unless `--max-new` says otherwise or the context ends before.
DEFAULT_NEW = 128


@dataclass(frozen=True)
class Prompt:
    """A text or ids, read and checked before anything is loaded."""

    text: str = ""
    chat: bool = False
    ids: tuple[int, ...] = ()

    def encode(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> list[int]:
        """The ids of the prompt, as they follow the ids of a text.

        Raises: MemraError without a chat template.
        """
        if self.ids:
            return list(self.ids)
        if self.chat and after:
            return tokenizer.encode_turn(self.text, after)
        if self.chat:
            return tokenizer.encode_chat([{"role": "user", "content": self.text}])
        return tokenizer.encode(self.text, add_bos=not after) if self.text else []


def read_prompt(
    prompt: str | None,
    prompt_file: str | None,
    chat: str | None,
    ids: str | None,
    *,
    needed: bool = True,
) -> Prompt:
    """Read the one prompt option that is given, if one is `needed`. Raises: MemraError."""
    options = {"--prompt": prompt, "--prompt-file": prompt_file, "--chat": chat, "--ids": ids}
    given = [option for option, value in options.items() if value is not None]
    if not given and not needed:
        return Prompt()
    if len(given) != 1:
        found = " and ".join(f"`{option}`" for option in given)
        fail(
            "usage",
            f"only one prompt can be given, found {found}" if given else "there is no prompt",
            hints=("give one of `--prompt TEXT`, `--prompt-file F`, `--chat TEXT`, `--ids 1,2,3`",),
        )
    if ids is not None:
        return Prompt(ids=_ids(ids))
    text = _read(prompt_file) if prompt_file is not None else prompt or chat or ""
    if not text:
        place = f"{given[0]} {prompt_file}" if prompt_file is not None else given[0]
        fail("prompt", "the prompt is empty", place, hints=("give some text",))
    return Prompt(text, chat is not None)


def _read(name: str) -> str:
    place = f"--prompt-file {name}"
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        fail("prompt", f"the prompt cannot be read: {error.strerror or error}", place,
             hints=("give a text file, or `-` for stdin",))  # fmt: skip
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        fail(
            "prompt",
            f"the prompt is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}",
            place,
            hints=(f"convert it, for example: iconv -f latin1 -t utf-8 {name}",),
        )


def _ids(given: str) -> tuple[int, ...]:
    """Read `1,2,3`, or a JSON file that holds a list of ids."""
    place = f"--ids {given}"

    def wrong(what: str) -> NoReturn:
        hint = "write `--ids 2,651,1902`, or give a JSON file with a list of ids"
        fail("ids", what, place, hints=(hint,))

    if given.endswith(".json"):
        try:
            found = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            wrong(f"the ids cannot be read: {error}")
        found = found.get("ids") if isinstance(found, dict) else found
        if not isinstance(found, list) or not all(type(item) is int for item in found):
            wrong("the file does not hold a list of ids")
        ids = tuple(found)
    else:
        parts = [part.strip() for part in given.split(",")] if given.strip() else []
        bad = [part for part in parts if not part.removeprefix("-").isdecimal()]
        if bad:
            wrong(f"`{bad[0]}` is not a token id")
        ids = tuple(map(int, parts))
    if not ids:
        wrong("the prompt is empty")
    return ids

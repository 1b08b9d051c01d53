"""memra-run with saved sessions: a text that is put aside and taken up again is the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_tools import DRAFT, TARGET, WEIGHTS, Ended, call, rewrite

from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.errors import MemraError
from memra_runtime.model import Model
from memra_runtime.tokenizer import Tokenizer, load_tokenizer

#: `<turn|>` of the pair's vocabulary.
TURN_END = 6
PROMPT = "The quick brown fox"


def run(artifact: Path, *typed: str | Path) -> Ended:
    return call("memra-run", artifact, *WEIGHTS, *typed)


def answer(artifact: Path, *typed: str | Path) -> dict[str, Any]:
    ended = run(artifact, "--json", *typed)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


@pytest.fixture(scope="module")
def whole(tiny_artifact: Path) -> list[int]:
    """What one run says without a stop."""
    found: list[int] = answer(tiny_artifact, "-p", PROMPT, "-n", "40")["ids"]
    return found


@pytest.mark.parametrize("how", [(), ("--plain",), ("--depth", "5"), ("--stats",)])
@pytest.mark.parametrize("stop", [1, 2, 13])
def test_a_text_goes_on_where_it_was_saved(
    tiny_artifact: Path, whole: list[int], tmp_path: Path, stop: int, how: tuple[str, ...]
) -> None:
    file = tmp_path / "s"
    first = answer(tiny_artifact, "-p", PROMPT, "-n", str(stop), "--save-session", file, *how)
    then = answer(tiny_artifact, "--session", file, "-n", str(40 - stop), *how)
    assert first["ids"] + then["ids"] == whole
    assert then["stats"]["prompt_tokens"] == 0
    assert then["stats"]["kept_tokens"] > 0


def test_a_prompt_behind_a_saved_text_is_one_text(
    tiny_artifact: Path, tiny_model: Model, whole: list[int], tmp_path: Path
) -> None:
    """The same as one long prompt, and only the new part is run."""
    file, again = tmp_path / "s", tmp_path / "t"
    run(tiny_artifact, "-p", PROMPT, "-n", "9", "--save-session", file)
    ended = run(tiny_artifact, "--session", file, "-p", " and so", "-n", "20", "--json",
                "--save-session", again)  # fmt: skip
    tokenizer = tiny_model.tokenizer
    behind = tokenizer.encode(" and so", add_bos=False)
    ids = [*tokenizer.encode(PROMPT), *whole[:9], *behind]
    found, cold = json.loads(ended.out), answer(
        tiny_artifact, "--ids", ",".join(map(str, ids)), "-n", "20")  # fmt: skip
    assert found["ids"] == cold["ids"]
    stats = found["stats"]
    assert stats["kept_tokens"] + stats["prompt_tokens"] == len(ids)
    assert 0 < stats["prompt_tokens"] <= len(behind) + 1  # and the last one shown, if it had no row
    kept, ran = stats["kept_tokens"], stats["prompt_tokens"]
    assert f"session  {file}: {kept} tokens kept, {ran} run" in ended.err
    assert f"saved    {again}: " in ended.err
    assert " tokens, of which the first 1 to " in ended.err


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
)
BEHIND = "<turn|>\n<|turn>user\nAnd then?<turn|>\n<|turn>assistant\n"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """The weights of the pair, with a chat template."""
    target = tmp_path_factory.mktemp("chat") / "chat.gguf"
    rewrite(TARGET, target, metadata={"tokenizer.chat_template": TEMPLATE})
    return "--weights", target, "--draft", DRAFT


def test_a_chat_goes_on_turn_by_turn(
    tiny_artifact: Path, tiny_model: Model, chat: tuple[str | Path, ...], tmp_path: Path
) -> None:
    def say(*typed: str | Path) -> list[int]:
        ended = call("memra-run", tiny_artifact, *chat, "--json", "-n", "12", *typed)
        assert ended.code == 0, ended.err
        found: list[int] = json.loads(ended.out)["ids"]
        return found

    encode, file = tiny_model.tokenizer.encode, tmp_path / "s"
    first = say("--chat", "Hello", "--save-session", file)
    then = say("--session", file, "--chat", "And then?", "--save-session", file)
    text = [*encode("<|turn>user\nHello<turn|>\n<|turn>assistant\n"), *first]
    text += encode(BEHIND, add_bos=False)[first[-1] == TURN_END :]
    assert then == say("--ids", ",".join(map(str, text)))


def test_a_turn_closes_a_reply_once(chat: tuple[str | Path, ...]) -> None:
    tokenizer = load_tokenizer(open_checkpoint(Path(chat[1])))
    turn = tokenizer.encode_turn("And then?", [5])
    assert tokenizer.decode(turn, special=True) == BEHIND
    assert turn[0] == TURN_END
    assert tokenizer.encode_turn("And then?", [5, TURN_END]) == turn[1:]


def test_a_template_that_hides_replies_takes_no_turn(tmp_path: Path) -> None:
    template = "{{ messages[-1].content }}"
    path = rewrite(TARGET, tmp_path / "t.gguf", metadata={"tokenizer.chat_template": template})
    with pytest.raises(MemraError, match="leaves out earlier replies"):
        load_tokenizer(open_checkpoint(path)).encode_turn("More", [5])


def test_a_text_that_has_ended_wants_a_prompt(
    tiny_artifact: Path, tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny_model.tokenizer.encode(PROMPT)
    ids = answer(tiny_artifact, "-p", PROMPT, "-n", "6")["ids"]
    init = Tokenizer.__init__

    def ends(self: Tokenizer, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "eos_ids": frozenset({ids[4]})})

    monkeypatch.setattr(Tokenizer, "__init__", ends)
    file = tmp_path / "s"
    assert ids[4] not in ids[:4]
    assert ids[4] not in prompt
    found = answer(tiny_artifact, "-p", PROMPT, "-n", "20", "--save-session", file)
    assert (found["ids"], found["finish"]) == (ids[:5], "eos")
    ended = run(tiny_artifact, "--session", file)
    assert ended.code == 2
    assert "error[session]: the saved text has come to its end" in ended.err
    then = answer(tiny_artifact, "--session", file, "-p", " So", "-n", "3")
    text = [*prompt, *ids[:5], *tiny_model.tokenizer.encode(" So", add_bos=False)]
    assert then["ids"] == answer(tiny_artifact, "--ids", ",".join(map(str, text)), "-n", "3")["ids"]


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        (("--session", "no.session"), "session-file", ("cannot be read", "no.session")),
        (("--session", __file__), "session-file", ("is not a session file",)),
        (
            ("-p", "x", "--save-session", "no/such/folder/s"),
            "save-session",
            ("there is no folder",),
        ),
        (("-p", "x", "--save-session", "."), "save-session", ("over a folder",)),
        ((), "usage", ("there is no prompt",)),
    ],
)
def test_a_wrong_session_file_is_one_clear_error(
    tiny_artifact: Path, typed: tuple[str, ...], code: str, words: tuple[str, ...]
) -> None:
    ended = run(tiny_artifact, *typed)
    assert ended.code == 2
    assert ended.err.count("error[") == 1
    assert f"error[{code}]" in ended.err
    assert "hint: " in ended.err
    for word in words:
        assert word in ended.err


def test_a_session_too_long_for_the_context_is_refused_before_loading(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    file = tmp_path / "s"
    run(tiny_artifact, "-p", PROMPT, "-n", "9", "--save-session", file)
    ended = run(tiny_artifact, "--session", file, "-p", "x", "-n", "5000")
    assert "error[context-full]" in ended.err
    assert "memory" not in ended.err

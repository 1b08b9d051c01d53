"""memra-run: text, ids, statistics, memory, and what it must not import."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_tools import DRAFT, MAINS, ROOT, SPEC, TARGET, WEIGHTS, call, launch, rewrite

from memra_runtime.device.cpu import CpuDevice
from memra_runtime.model import Model

PROMPT = "The quick brown fox"


def answer(artifact: Path, *typed: str) -> dict[str, Any]:
    ended = call("memra-run", artifact, *WEIGHTS, "--json", *typed)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def process(artifact: Path, *typed: str) -> list[str]:
    return [sys.executable, "-m", "memra_runtime.cli.run", str(artifact), *WEIGHTS, *typed]


def test_run_streams_the_text_to_stdout_and_the_rest_to_stderr(
    tiny_artifact: Path, tiny_model: Model
) -> None:
    typed = ("-p", PROMPT, "-n", "40")
    ended = call("memra-run", tiny_artifact, *WEIGHTS, *typed)
    found = answer(tiny_artifact, *typed)
    assert ended.out == found["text"] + "\n"
    assert found["text"] == tiny_model.tokenizer.decode(found["ids"])
    assert (len(found["ids"]), found["finish"]) == (40, "length")
    labels = [line.split()[0] for line in ended.err.splitlines()]
    assert labels == ["memory", "weights", "weights", "rounds"]
    assert re.search(r"arena 3\.\d MiB \+ weights 8\.5 MiB \+ process \S+ MiB = peak", ended.err)
    assert "rounds   cpu: one call a round, depth 1..5 (accepted_plus_one)" in ended.err


def test_run_writes_each_piece_as_it_comes(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pieces(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[str] = []

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return super().write(text)

    pieces = Pieces()
    monkeypatch.setattr(sys, "stdout", pieces)
    with pytest.raises(SystemExit):
        MAINS["memra-run"]([str(tiny_artifact), *WEIGHTS, "-p", PROMPT, "-n", "20", "-q"])
    assert len(pieces.pieces) > 10
    monkeypatch.undo()
    assert pieces.getvalue() == answer(tiny_artifact, "-p", PROMPT, "-n", "20")["text"] + "\n"


@pytest.mark.parametrize(
    "how", [("--plain",), ("--depth", "0"), ("--depth", "3"), ("--depth", "5"), ("--stats",)]
)
def test_text_does_not_depend_on_how_it_is_decoded(tiny_artifact: Path, how: Sequence[str]) -> None:
    typed = ("-p", PROMPT, "-n", "60")
    assert answer(tiny_artifact, *typed, *how)["ids"] == answer(tiny_artifact, *typed)["ids"]


@pytest.mark.parametrize("count", [1, 2, 7, 128])
def test_run_produces_exactly_what_is_asked_for(tiny_artifact: Path, count: int) -> None:
    found = answer(tiny_artifact, "-p", PROMPT, "-n", str(count))
    assert (len(found["ids"]), found["stats"]["tokens"]) == (count, count)


def test_default_length_is_what_the_context_has_room_for(tiny_artifact: Path) -> None:
    assert len(answer(tiny_artifact, "-p", PROMPT)["ids"]) == 128
    full = answer(tiny_artifact, "--ids", ",".join(["5"] * 2040))
    assert len(full["ids"]) <= 9
    assert full["finish"] in ("length", "eos")


def test_prompts_given_in_several_ways_agree(tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(PROMPT)
    by_text = answer(tiny_artifact, "-p", PROMPT, "-n", "5")
    assert (
        answer(tiny_artifact, "--prompt-file", str(tmp_path / "p.txt"), "-n", "5")["ids"]
        == (by_text["ids"])
    )
    one = answer(tiny_artifact, "--ids", "2, 30,41", "-n", "5")
    for content in ([2, 30, 41], {"ids": [2, 30, 41]}):
        (tmp_path / "i.json").write_text(json.dumps(content))
        again = answer(tiny_artifact, "--ids", str(tmp_path / "i.json"), "-n", "5")
        assert again["ids"] == one["ids"]


def test_chat_puts_the_message_into_the_models_template(
    tiny_artifact: Path, tiny_model: Model, tmp_path: Path
) -> None:
    template = "user: {{ messages[0].content }}, reply:"
    target = rewrite(
        TARGET, tmp_path / "chat.gguf", metadata={"tokenizer.chat_template": template}
    )  # fmt: skip
    files = ("--weights", target, "--draft", DRAFT)
    ended = call("memra-run", tiny_artifact, *files, "--chat", "hello", "-n", "9", "-q")
    assert ended.code == 0, ended.err
    ids = tiny_model.tokenizer.encode("user: hello, reply:")
    same = answer(tiny_artifact, "--ids", ",".join(map(str, ids)), "-n", "9")
    assert ended.out == same["text"] + "\n"


def test_stats_tell_acceptance_time_and_break_even(tiny_artifact: Path) -> None:
    ended = call("memra-run", tiny_artifact, *WEIGHTS, "-p", PROMPT, "-n", "60", "--stats", "-q")
    said = ended.err
    for part in (
        "(accepted / drafted)", "by position (accepted/attempted)", "tokens a round",
        "ms a round; a plain step takes ", "plain steps: it ", "measured, ", "stated",
        "tok/s", "with the prompt", "program by program: draft ",
        "ran      cpu: one call a round: 1.00 launches and 0.00 host reads a round, counted",
        "finish   length: 60 tokens were asked for",
    ):  # fmt: skip
        assert part in said, said
    stats = answer(tiny_artifact, "-p", PROMPT, "-n", "60", "--stats")["stats"]
    assert stats["accepted_tokens"] == sum(stats["accepted_by_position"])
    assert stats["drafted_tokens"] >= sum(stats["attempted_by_position"])
    assert stats["acceptance"] == stats["accepted_tokens"] / stats["drafted_tokens"]
    assert set(stats["split"]["round_ms"]) == {"draft", "verify", "rest"}
    assert stats["split"]["depth"] == round(stats["drafted_tokens"] / stats["rounds"])
    assert min(stats["plain_step_ms"], stats["round_ms"]) > 0


@pytest.mark.parametrize("how", [(), ("--plain",), ("--depth", "0"), ("--stats",)])
def test_strict_accepts_one_call_a_round(tiny_artifact: Path, how: Sequence[str]) -> None:
    found = answer(tiny_artifact, "-p", PROMPT, "-n", "20", "--strict", *how)
    stats = found["stats"]
    assert (len(found["ids"]), stats["host_reads"]) == (20, 0)
    assert stats["launches"] == stats["rounds"] > 0


@pytest.mark.parametrize("command", ["memra-run", "memra-check"])
def test_strict_refuses_rounds_in_pieces(
    command: str, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "whole", False)
    ended = call(command, tiny_artifact, *WEIGHTS, "--prompt", PROMPT, "--max-new", "9", "--strict")
    assert (ended.code, ended.out) == (2, "")
    assert "error[strict]: a round is not one launch here: cpu: one call a round" in ended.err


def test_strict_counts_what_ran(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says it is whole, and is not, is found out by its counts."""
    right = CpuDevice.launch

    def launch(self: CpuDevice, name: str) -> None:
        right(self, name)
        self.launches += name.startswith("round")

    monkeypatch.setattr(CpuDevice, "launch", launch)
    ended = call("memra-run", tiny_artifact, *WEIGHTS, "-p", PROMPT, "-n", "9", "--strict")
    assert ended.code == 2
    assert "error[strict]: rounds did not run as one launch each" in ended.err
    assert "2.00 launches and 0.00 host reads a round, counted" in ended.err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--eager",), "error[eager]: an artifact for `cpu` has no graphs to do without"),
        (("--eager", "--strict"), "error[usage]: `--eager` launches kernel by kernel, which"),
    ],
)
def test_eager_is_refused(tiny_artifact: Path, typed: Sequence[str], said: str) -> None:
    ended = call("memra-run", tiny_artifact, *WEIGHTS, "-p", PROMPT, *typed)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_a_run_without_drafts_has_no_acceptance(tiny_artifact: Path) -> None:
    typed = ("-p", PROMPT, "-n", "9", "--plain")
    ended = call("memra-run", tiny_artifact, *WEIGHTS, *typed, "--stats")
    assert "the drafter is loaded but not used (--plain)" in ended.err
    assert "drafts   none: the text was decoded plainly" in ended.err
    stats = answer(tiny_artifact, *typed)["stats"]
    assert (stats["acceptance"], stats["break_even_acceptance"]) == (None, None)


def test_measured_memory_is_within_a_tenth_of_what_was_stated(tiny_artifact: Path) -> None:
    ended = launch("memra-run", tiny_artifact, *WEIGHTS, "-p", PROMPT, "-n", "60", "--json")
    stats = json.loads(ended.out)["stats"]
    assert stats["peak_memory_bytes"] == pytest.approx(stats["stated_peak_memory_bytes"], rel=0.1)


def test_spec_is_compiled_once_and_named_weights_are_used(
    kernel_cache: Path, tiny_artifact: Path
) -> None:
    typed = (SPEC, "-p", PROMPT, "-n", "20", "--cache", kernel_cache)
    first, second = launch("memra-run", *typed), launch("memra-run", *typed)
    assert first.code == second.code == 0, first.err + second.err
    assert first.out == second.out == answer(tiny_artifact, "-p", PROMPT, "-n", "20")["text"] + "\n"
    assert "lower " in first.err
    assert "up to date" in second.err
    assert [p.suffix for p in (kernel_cache / "artifacts").iterdir()] == [".memra"]


def test_run_needs_neither_compiler_nor_its_packages(tiny_artifact: Path) -> None:
    # pydantic is not on the list: typer itself needs it to convert option values
    forbidden = {"tvm", "torch", "yaml", "gguf", "ml_dtypes", "memra_compiler"}
    script = f"""
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ImportError("forbidden: " + name)
sys.meta_path.insert(0, Forbid())
from memra_runtime.cli.run import main
main(sys.argv[1:])
"""
    typed = [str(tiny_artifact), *WEIGHTS, "-p", PROMPT, "-n", "20", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *typed], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout)["ids"] == (answer(tiny_artifact, "-p", PROMPT, "-n", "20")["ids"])
    )


def test_interrupt_ends_quietly(tiny_artifact: Path) -> None:
    """The pipe is smaller than half the text: the command waits for its reader, so is running.

    A job in the background of a shell ignores SIGINT, and so do its children: not this one.
    """
    typed = process(tiny_artifact, "-p", PROMPT, "-n", "2000", "-q")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(typed, text=True, preexec_fn=heard, **pipes) as running:
        assert running.stdout is not None
        running.stdout.read(3)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    assert (running.returncode, said) == (130, "interrupted\n")


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_closed_pipe_ends_quietly(tiny_artifact: Path, command: str) -> None:
    typed = process(tiny_artifact, "-p", PROMPT, "-n", "1000", "-q")
    if command == "inspect":
        typed = [sys.executable, "-m", "memra_compiler.cli.inspect", str(SPEC), "--after", "fuse"]
    with subprocess.Popen(
        typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(3)
        running.stdout.close()
        said = running.stderr.read()
        code = running.wait(timeout=30)
    assert (code, said) == (141, "")

"""What memra-run asks of a session: a prompt, or a turn behind a saved text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memra_runtime.cli.app import size
from memra_runtime.cli.prompts import DEFAULT_NEW, Prompt
from memra_runtime.errors import fail
from memra_runtime.model import Opened
from memra_runtime.session import Session, Snapshot, check_request, read_session, save_session
from memra_runtime.session.snapshot import rows_wanted


@dataclass(frozen=True)
class Ask:
    """What a session is asked for: tokens to run, behind a saved text if there is one."""

    tokens: list[int]
    max_new: int
    saved: Snapshot | None


def ask_for(opened: Opened, prompt: Prompt, max_new: int | None, session: Path | None) -> Ask:
    """Check a request against what is saved and what the context holds. Raises: MemraError."""
    manifest, saved = opened.manifest, None
    capacity = int(manifest.spec["runtime"]["max_context"])
    if session is not None:
        saved = read_session(session, manifest)
    shown = saved.shown if saved is not None else []
    tokens = prompt.encode(opened.tokenizer, shown)
    if shown and not tokens and shown[-1] in opened.tokenizer.eos_ids:
        fail("session", "the saved text has come to its end, so there is nothing to go on with",
             str(session), hints=("give a prompt to put behind it",))  # fmt: skip
    length = len(shown) + len(tokens)
    wanted = max_new or max(1, min(DEFAULT_NEW, capacity - length + 1))
    if saved is None:
        check_request(manifest, tokens, wanted)
    else:
        rows_wanted(manifest, saved, tokens, None, wanted)
    return Ask(tokens, wanted, saved)


def save(session: Session, path: Path) -> str:
    """Save a session and say what can be done with the file. Raises: MemraError."""
    snapshot, manifest = session.snapshot(), session.device.manifest
    return f"{path}: {size(save_session(path, snapshot, manifest))}, {snapshot.describe(manifest)}"

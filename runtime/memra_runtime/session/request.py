"""What may be asked of a session."""

from __future__ import annotations

from collections.abc import Sequence

from memra_runtime.artifact import Manifest
from memra_runtime.errors import fail


def check_request(manifest: Manifest, ids: Sequence[int], max_new: int) -> None:
    """Refuse a request that a session could not serve; needs no loaded model.

    Raises: MemraError for an empty prompt, ids outside the vocabulary, or a prompt that with
    `max_new` tokens does not fit the context.
    """
    if not len(ids):
        fail("prompt", "the prompt is empty", hints=("give at least one token",))
    vocab = int(manifest.spec["target"]["vocab"])
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        fail("prompt", f"token id {wrong[0]} is outside the vocabulary of {vocab}")
    if max_new < 1:
        fail("max-new", f"cannot produce {max_new} tokens", "--max-new")
    capacity = int(manifest.spec["runtime"]["max_context"])
    rows = len(ids) + max_new - 1  # the last token needs no row
    if rows > capacity:
        room = capacity - len(ids) + 1
        shorter = f"ask for at most {room} new tokens" if room > 0 else (
            f"shorten the prompt by at least {1 - room} tokens")  # fmt: skip
        fail(
            "context-full",
            f"a prompt of {len(ids)} tokens and {max_new} new ones need {rows} rows, the context "
            f"holds {capacity}",
            hints=(shorter, "or raise `runtime.max_context` in the spec and compile again"),
        )

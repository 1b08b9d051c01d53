"""Check that a drafter and its target mean the same by every token id."""

from __future__ import annotations

from itertools import islice

from memra_runtime.errors import fail
from memra_runtime.tokenizer.model import Tokenizer
from memra_runtime.tokenizer.vocabulary import Kind


def check_pairing(target: Tokenizer, draft: Tokenizer) -> None:
    """Compare two tokenizers id by id.

    Equal widths prove nothing: another tokenizer fits the same matrices, and only acceptance
    falls. A vocabulary padded with unused ids is accepted.
    Raises: MemraError naming the first id that differs, with both texts.
    """
    ours, theirs = target.vocabulary.tokens, draft.vocabulary.tokens
    sizes = f"target: {len(ours):,} tokens, {target.place}; drafter: {len(theirs):,}, {draft.place}"
    hints = ("use the drafter that was trained for this target",)
    if target.fingerprint == draft.fingerprint:
        return
    for token_id, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right and not (_padding(target, token_id) and _padding(draft, token_id)):
            count = sum(a != b for a, b in zip(ours, theirs, strict=False))
            fail(
                "pairing-tokenizer",
                f"target and drafter have different tokenizers: token {token_id} is {left!r} in "
                f"the target and {right!r} in the drafter ({count:,} ids differ)",
                draft.place,
                notes=(sizes,),
                hints=hints,
            )
    longer, name = (target, "target") if len(ours) > len(theirs) else (draft, "drafter")
    shared = min(len(ours), len(theirs))
    extra = [i for i in range(shared, longer.vocab_size) if not _padding(longer, i)]
    if extra:
        shown = ", ".join(repr(longer.token(i)) for i in islice(extra, 3))
        fail(
            "pairing-tokenizer",
            f"the {name} has {len(extra):,} tokens that the other model lacks, from id {extra[0]} "
            f"on: {shown}",
            draft.place,
            notes=(sizes,),
            hints=hints,
        )


def _padding(tokenizer: Tokenizer, token_id: int) -> bool:
    """Tell a row that only rounds the vocabulary up, as converters write them."""
    token = tokenizer.token(token_id)
    if tokenizer.vocabulary.kinds[token_id] == Kind.UNUSED:
        return True
    return token.startswith(("[PAD", "[EMPTY_", "<pad", "<unused", "<fill")) and token[-2].isdigit()

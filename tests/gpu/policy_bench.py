"""Never slower than plain: 200 tokens of a large spec, plainly and with a drafter that is always
wrong, under the policy that the spec declares and under the same without its floor.

usage: python tests/gpu/policy_bench.py ARTIFACT TARGET.gguf DRAFT.gguf [TOKENS]

The weights may be synthetic. Prints both times, their ratio and a histogram of depths.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from memra_runtime.session import Policy, Session

#: What a run with the worst drafter may take, over a plain run.
ALLOWED = 1.10


@dataclass
class Run:
    """Rounds over a text: what they committed, how deep each was, seconds of all."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    accepted: int = 0
    seconds: float = 0.0


def plain_text(session: Session, ids: Sequence[int], tokens: int) -> tuple[list[int], float]:
    """Tokens that plain decoding commits after a prompt, and the seconds of its steps."""
    session.prime(ids, tokens)
    text: list[int] = []
    start = time.perf_counter()
    while len(text) < tokens:
        text += session.step("plain")
    return text, time.perf_counter() - start


def force_wrong(session: Session, start: int, text: Sequence[int]) -> None:
    """Force a draft at every position of the context; those along `text` differ from it."""
    plane = session.device.plane("forced")
    forced = np.zeros(plane.shape, np.int32)
    forced[start : start + len(text)] = (np.array(text) + 1) % session.vocab
    plane[:] = forced


def run_rounds(session: Session, tokens: int) -> Run:
    """Rounds until a primed session has committed so many tokens."""
    run = Run()
    start = time.perf_counter()
    while len(run.tokens) < tokens:
        run.depths.append(session.device.get("depth"))
        run.tokens += session.step("round")
        run.accepted += session.device.get("accepted")
    run.seconds = time.perf_counter() - start
    return run


def report(session: Session, name: str, ids: Sequence[int], text: list[int], plain: float) -> None:
    """Run the text in rounds with wrong drafts, twice (the first captures graphs), and print."""
    for _ in range(2):
        session.prime(ids, len(text))
        force_wrong(session, len(ids), text)
        run = run_rounds(session, len(text))
    same = "equal" if run.tokens == text else "DIFFERS"
    ratio = run.seconds / plain
    depths = ", ".join(f"{depth}: {count}" for depth, count in sorted(Counter(run.depths).items()))
    print(f"{name}: {run.seconds * 1e3:.1f} ms, {ratio:.3f} of plain "
          f"({'within' if ratio <= ALLOWED else 'ABOVE'} {ALLOWED:.2f}), {run.accepted} accepted, "
          f"text {same}; rounds by depth: {depths}")  # fmt: skip


def main(artifact: Path, target: Path, draft: Path, tokens: int) -> None:
    """Load, run and print."""
    from memra_runtime.artifact import load_manifest
    from memra_runtime.checkpoint import open_checkpoint
    from memra_runtime.device.cuda import CudaDevice
    from memra_runtime.model import bind_source, weight_data

    manifest = load_manifest(artifact)
    # not `load_model`: it refuses weights whose metadata or tokenizers were made up
    files = {"target": open_checkpoint(target), "draft": open_checkpoint(draft)}
    bindings = {source: bind_source(manifest, source, file) for source, file in files.items()}
    weights = [weight_data(entry, files, bindings) for entry in manifest.weights]
    device = CudaDevice(manifest, artifact, weights)
    policy, ids = Policy.of(manifest), [2, *range(100, 163)]
    for _ in range(2):
        text, plain = plain_text(Session(device, policy.fixed(0)), ids, tokens)
    print(f"plain: {plain * 1e3:.1f} ms for {tokens} tokens, {plain / tokens * 1e3:.3f} ms each")
    bare = dataclasses.replace(policy, floor_short=0, floor_deep=0)
    for name, each in (("as declared", policy), ("without its floor", bare)):
        report(Session(device, each), name, ids, text, plain)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]) if len(sys.argv) > 4 else 200)

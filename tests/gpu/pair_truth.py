"""What a device says along the golden prompts, and how far another one may be from it.

The tokens are those of the first device; a second one is held to them, so that every step can be
compared, also after a near tie that it decides otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memra_runtime.session import Session

#: Tokens after each prompt.
STEPS = 96
#: Every n-th logit is stored; coprime to the sizes of tiles, so that each column of one is seen.
STRIDE = 11


@dataclass(frozen=True)
class Step:
    """One step: the logits of all tokens and the token that was chosen."""

    logits: np.ndarray
    token: int


def follow(session: Session, ids: Sequence[int], tokens: Sequence[int] | None) -> Iterator[Step]:
    """Plain steps along `tokens`, or along the session's own choices."""
    session.prime(ids, STEPS)
    for step in range(STEPS):
        device = session.device
        yield Step(device.value("plain_step", "target.logits")[0].copy(), session.pending)
        if tokens is not None:
            device.put({"pending": int(tokens[step])})
        session.step("plain")


def measure(
    session: Session, exact: Session | None, prompts: Sequence[Sequence[int]]
) -> dict[str, np.ndarray]:
    """The truth of a device, and `exact`'s distance from it: what rounding alone may do.

    By prompt: ids, tokens, margins (between the two best logits), logits [STEPS, vocab / STRIDE];
    and of every other prompt (they take long), by step: spread and rms, the largest and root mean
    square distance of the logits of `exact`.
    """
    stored: dict[str, np.ndarray] = {}
    for i, ids in enumerate(prompts):
        steps = list(follow(session, ids, None))
        tokens, logits = [s.token for s in steps], np.array([s.logits for s in steps])
        top = np.sort(logits, axis=1)[:, -2:]
        stored |= {
            f"ids{i}": np.array(ids),
            f"tokens{i}": np.array(tokens),
            f"margins{i}": top[:, 1] - top[:, 0],
            f"logits{i}": logits[:, ::STRIDE].astype(np.float32),
        }
        if exact is not None and i % 2 == 0:
            off = logits - np.array([s.logits for s in follow(exact, ids, tokens)])
            stored[f"spread{i}"] = np.abs(off).max(axis=1)
            stored[f"rms{i}"] = np.sqrt((off**2).mean(axis=1))
    return stored


@dataclass
class Distance:
    """How far a device is from the truth; `turned` are the choices that differ."""

    largest: float = 0.0
    rms: float = 0.0
    tokens: int = 0
    #: (prompt, step, margin of the two best logits)
    turned: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def margin(self) -> float:
        """The largest margin at which a choice differs."""
        return max((margin for _, _, margin in self.turned), default=0.0)

    def __str__(self) -> str:
        turned = [f"prompt {i} step {s} (margin {m:.4f})" for i, s, m in self.turned]
        choices = f"; {self.tokens:,} choices, others at {', '.join(turned) or 'none'}"
        return f"{self.largest:.2e} at most, {self.rms:.2e} rms{choices if self.tokens else ''}"


def distance(session: Session, truth: dict[str, np.ndarray]) -> Distance:
    """Hold a device to the tokens of the truth and compare every step."""
    found, squares = Distance(), []
    for i in range(sum(name.startswith("ids") for name in truth)):
        tokens, margins = truth[f"tokens{i}"], truth[f"margins{i}"]
        ids = [int(t) for t in truth[f"ids{i}"]]
        for step, got in enumerate(follow(session, ids, tokens)):
            off = got.logits[::STRIDE] - truth[f"logits{i}"][step]
            found.largest = max(found.largest, float(np.abs(off).max()))
            squares.append(float((off**2).mean()))
            found.tokens += 1
            if got.token != tokens[step]:
                found.turned.append((i, step, float(margins[step])))
    found.rms = float(np.sqrt(np.mean(squares)))
    return found


def spread(truth: dict[str, np.ndarray]) -> Distance:
    """How far float64 is from the truth: the least that another order of sums may do."""
    largest = [float(v.max()) for name, v in truth.items() if name.startswith("spread")]
    squares = [v**2 for name, v in truth.items() if name.startswith("rms")]
    return Distance(max(largest), float(np.sqrt(np.mean(squares))))

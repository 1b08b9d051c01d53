"""The bundled pair with a short context and deep rounds, and what plain decoding says of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memra_runtime.check.rows import CacheReader
from memra_runtime.errors import MemraError
from memra_runtime.model import Model, another_model
from memra_runtime.session import Policy, Session

#: A short context, so that its end is reached, and deeper rounds than the bundled spec has.
CONTEXT, DEPTH, WINDOW, CHUNK = 304, 7, 128, 8
RING = WINDOW + CHUNK
VOCAB = 4096


class Plain:
    """What plain decoding says after any text; asked once for each, on a device of its own."""

    def __init__(self, model: Model) -> None:
        self.session = Session(another_model(model).device, Policy.of(model.manifest).fixed(0))
        self.reader = CacheReader(self.session.device)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def after(self, text: Sequence[int], count: int) -> list[int]:
        """The next tokens, fewer where the context ends; the last one needs no row."""
        count = min(count, CONTEXT - len(text) + 1)
        known = self._known.setdefault(tuple(text), [])
        if len(known) < count:
            self.session.prime(text)
            known[:] = [self.session.pending]
            while len(known) < min(count + 8, CONTEXT - len(text) + 1):
                self.session.step("plain")
                known.append(self.session.pending)
        return known[:count]

    def left_by(self, text: Sequence[int]) -> dict[Any, bytes]:
        """Visible rows, hidden row and pending token of a cold session on this very text."""
        self.session.prime(text)
        return left(self.session)


def left(session: Session) -> dict[Any, bytes]:
    """Every visible cache row, the carried hidden row and the pending token, as bytes."""
    found: dict[Any, bytes] = dict(CacheReader(session.device).all(session.position))
    found["hidden"] = np.asarray(session.device.plane("hidden")).tobytes()
    found["pending"] = session.pending.to_bytes(4, "little")
    return found


def refusal(act: Callable[[], None]) -> str:
    """The error that an act ends in, empty if it does not."""
    try:
        act()
    except MemraError as error:
        return str(error)
    return ""

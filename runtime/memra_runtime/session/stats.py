"""What a session counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Stats:
    """What happened since a text was given: by `prime`, `extend` or `restore`.

    `prompt_tokens` were run then, `kept_tokens` before them had their rows already. Acceptance =
    accepted / drafted.
    """

    prompt_tokens: int = 0
    kept_tokens: int = 0
    prompt_s: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    cut_rounds: int = 0
    attempted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    finish: str = ""

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def rounds_at_depth(self) -> list[int]:
        """Rounds that verified 0, 1, ... drafts."""
        at_least = [self.rounds, *self.attempted_at, 0]
        return [more - fewer for more, fewer in pairwise(at_least)]

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

"""How deep a session drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memra_runtime.artifact import Manifest
from memra_runtime.errors import fail


@dataclass(frozen=True)
class Policy:
    """How deep a session drafts. `cap` 0 is plain decoding through the same rounds.

    What each field does is told where a spec declares it (`round`, docs/spec.md). A threshold of 0
    is off; any other needs an artifact whose spec arms that gate.
    """

    cap: int
    initial: int
    adaptive: bool
    floor_short: int
    floor_deep: int
    floor_boundary: int
    floor_patience: int = 1
    floor_least: int = 1
    floor_probe: int = 1
    late_below: float = 0.0
    cut_below: float = 0.0
    cut_always: bool = False
    cut_drops: bool = False
    cut_first: bool = False

    @staticmethod
    def of(manifest: Manifest) -> Policy:
        """The policy that the artifact's spec declares."""
        depth: Mapping[str, Any] = manifest.spec["round"]["depth"]
        floor = depth["floor"]
        confidence: Mapping[str, Any] = manifest.spec["round"]["confidence"]
        cut = confidence["in_round"]
        return Policy(
            depth["max"], depth["initial"], depth["policy"] == "accepted_plus_one",
            floor["short"], floor["deep"], floor["boundary"], floor["patience"],
            floor["least"], floor["probe"], confidence["next_round"],
            cut["threshold"] if cut["when"] != "never" else 0.0, cut["when"] == "always",
            cut["doubtful"] == "drop", confidence["first"] == "may_skip",
        )  # fmt: skip

    def fixed(self, depth: int) -> Policy:
        """Always `depth` drafts; more than the artifact was compiled for is refused."""
        if not 0 <= depth <= self.cap:
            fail(
                "depth",
                f"depth {depth} is not between 0 and {self.cap}, the depth the artifact was "
                "compiled for",
                "--depth",
                hints=("set `round.depth.max` in the spec and compile again",),
            )
        return Policy(depth, depth, False, 0, 0, 0)

    def counters(self) -> dict[str, int]:
        """The counters of the device block that hold the policy."""
        found = {name: int(value) for name, value in asdict(self).items()}
        found |= {f"depth_{name}": found.pop(name) for name in ("cap", "initial")}
        thresholds = np.array([self.late_below, self.cut_below], np.float32).view(np.int32)
        return found | dict(zip(("late_below", "cut_below"), thresholds.tolist(), strict=True))

    def check(self, manifest: Manifest) -> None:
        """Refuse what the artifact was not compiled for. Raises: MemraError."""
        Policy.of(manifest).fixed(self.cap)
        for gate, threshold in (("next_round", self.late_below), ("in_round", self.cut_below)):
            if threshold and gate not in manifest.gates:
                fail(
                    "confidence",
                    f"a threshold of {threshold:g} would do nothing: the artifact asks for no "
                    f"confidence {gate.replace('_', ' ')}",
                    hints=(f"arm `round.confidence.{gate}` in the spec and compile again",),
                )

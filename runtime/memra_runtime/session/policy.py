"""How deep a session drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memra_runtime.artifact import Manifest
from memra_runtime.errors import fail


@dataclass(frozen=True)
class Policy:
    """How deep a session drafts. `cap` 0 is plain decoding through the same rounds."""

    cap: int
    initial: int
    adaptive: bool
    floor_short: int
    floor_deep: int
    floor_boundary: int
    floor_patience: int = 1

    @staticmethod
    def of(manifest: Manifest) -> Policy:
        """The policy that the artifact's spec declares."""
        depth: Mapping[str, Any] = manifest.spec["round"]["depth"]
        floor = depth["floor"]
        return Policy(
            depth["max"], depth["initial"], depth["policy"] == "accepted_plus_one",
            floor["short"], floor["deep"], floor["boundary"], floor["patience"],
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
        return {
            "depth_cap": self.cap,
            "depth_initial": self.initial,
            "adaptive": int(self.adaptive),
            "floor_short": self.floor_short,
            "floor_deep": self.floor_deep,
            "floor_boundary": self.floor_boundary,
            "floor_patience": self.floor_patience,
        }

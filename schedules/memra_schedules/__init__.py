"""Tuned choices, by target: records that a tuner measured and that compiling replays.

`tuned/TARGET.jsonl` holds one JSON object a line: the `work` it is for, the `geometry` that was
best, the microseconds it took, and how that was measured. A geometry that is best alone can be a
third slower in a chain of layers, where the next kernels' blocks wait beside it.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def records(target: str) -> list[dict[str, Any]]:
    """The records of a target (`sm_90a`); none where nothing was tuned."""
    path = files(__name__) / "tuned" / f"{target}.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]

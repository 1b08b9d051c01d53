"""How work is spread over a device: rules that schedule functions, and tuned choices.

`rules.py` is the list of rules; it is imported only to schedule: TVM takes a second to load.

`tuned/TARGET.jsonl` holds one JSON object a line: the `work` it is for, the `geometry` that was
best, the microseconds it took, and how that was measured. A geometry that is best alone can be a
third slower in a chain of layers, where the next kernels' blocks wait beside it.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any


def records(target: str) -> list[dict[str, Any]]:
    """The records of a target (`sm_90a`); none where nothing was tuned."""
    path = files(__name__) / "tuned" / f"{target}.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


@cache
def rules_digest() -> str:
    """Digest of all rules: functions are scheduled anew only when one has changed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()

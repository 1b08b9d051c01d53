"""Bytes and operations of a program at the rows and the context it is timed with.

The manifest states both at the largest row count and a full context. `verify` is the plain step on
more rows, so its cost between one row and the largest is a straight line between the two, but for
experts: no more can be read than there are. Of a cache, only the rows that are visible at the
measured context are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np

from memra_runtime.artifact import Manifest, PlaneEntry, ProgramEntry
from memra_runtime.device import DTYPES

#: Programs whose layers attend, and the section of the spec that has these layers.
_SECTIONS = {"draft": "drafter", "plain_step": "target", "verify": "target", "prefill": "target"}


@dataclass(frozen=True)
class Cost:
    """What one run of a program must move and compute."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Reader:
    """One layer that attends: the key cache it reads, its query heads, the rows it may see."""

    plane: PlaneEntry
    heads: int
    head_dim: int
    span: int

    def unseen(self, seen: int, rows: int) -> Cost:
        """The part of the manifest's cost that a shorter context saves."""
        kv_heads, _, stored = self.plane.shape
        missing = max(0, self.span - seen)
        read = 2 * kv_heads * missing * stored * np.dtype(DTYPES[self.plane.dtype]).itemsize
        return Cost(read, 4 * rows * self.heads * missing * self.head_dim)


def program(manifest: Manifest, name: str) -> ProgramEntry:
    """The cost entry of a program."""
    return next(p for p in manifest.programs if p.name == name)


def readers(manifest: Manifest, section: str) -> Iterator[Reader]:
    """The layers of `target` or `drafter` that attend."""
    stack = manifest.spec[section]
    planes = {p.id: p for p in manifest.planes if p.rollback == "truncate"}
    layers = manifest.spec["target"]["layers"]
    for index, kind in enumerate(stack["layers"]):
        (mixer,) = stack["layer_kinds"][kind]["mixer"].values()
        found = planes.get(f"{section}.layers.{index}.k")
        if "kv_target" in mixer:
            wanted = mixer["kv_target"].partition("(")[2].rstrip(")")
            owners = [f"target.layers.{i}.k" for i, k in enumerate(layers) if k == wanted]
            found = next((planes[name] for name in reversed(owners) if name in planes), None)
        if found is not None:
            span = mixer.get("window") or found.shape[1]
            yield Reader(found, mixer["heads"], mixer["head_dim"], span)


def experts_read(manifest: Manifest, rows: int) -> int:
    """Bytes of the target's experts that `rows` rows can touch, as the manifest counts them."""
    total, target = 0, manifest.spec["target"]
    for weight in manifest.weights:
        if weight.stacked and weight.source == "target":
            kind = target["layers"][int(weight.id.split(".")[2])]
            (ffn,) = target["layer_kinds"][kind]["ffn"].values()
            total += weight.bytes // weight.stacked * min(rows * ffn["active"], weight.stacked)
    return total


def cost(manifest: Manifest, name: str, rows: int, context: int) -> Cost:
    """Cost of program `name` at `rows` rows with `context` committed tokens."""
    entry = program(manifest, name)
    total = Cost(entry.bytes, entry.flops)
    if name == "verify" and rows < entry.rows:
        one = program(manifest, "plain_step")
        share = (rows - 1) / (entry.rows - 1)
        least, most, ours = (experts_read(manifest, n) for n in (1, entry.rows, rows))
        total = Cost(
            ours + round(one.bytes - least + share * (entry.bytes - most - one.bytes + least)),
            round(one.flops + share * (entry.flops - one.flops)),
        )
    if name not in _SECTIONS:
        return total
    seen = context + (rows if _SECTIONS[name] == "target" else 0)
    found = list(readers(manifest, _SECTIONS[name]))
    if name == "prefill":  # for caches alone: the last layer to fill one attends to nothing
        owners = [p.id for p in manifest.planes if fnmatch(p.id, "target.layers.*.k")]
        del found[max(int(owner.split(".")[2]) for owner in owners) :]
    saved = [r.unseen(seen, rows) for r in found]
    return Cost(
        total.bytes - sum(c.bytes for c in saved), total.flops - sum(c.flops for c in saved)
    )


def launch_bytes(manifest: Manifest, name: str, context: int) -> list[int]:
    """Bytes of each launch of program `name` at its largest row count, `context` tokens committed.

    They add up to those of `cost` at as many rows.
    """
    rows = program(manifest, name).rows
    seen = context + (rows if _SECTIONS[name] == "target" else 0)
    at_offset = {r.plane.offset: r for r in readers(manifest, _SECTIONS[name])}
    found = []
    for entry in manifest.launches[name]:
        # the launches of an append take the same planes, and read none of their rows
        attends = entry.bytes > 0 and entry.symbol.startswith("attention")
        read = [at_offset[at] for space, at in entry.operands
                if attends and space == "arena" and at in at_offset]  # fmt: skip
        found.append(entry.bytes - sum(r.unseen(seen, rows).bytes for r in read))
    return found

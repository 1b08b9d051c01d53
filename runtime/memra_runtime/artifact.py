"""The artifact: what the compiler writes and the runtime reads. Standard library only.

A folder `NAME.TARGET.memra/` holds `manifest.json`, the compiled code and the generated sources.
This module owns the names that both sides must agree on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memra_runtime.errors import fail

#: Raised whenever the meaning of the manifest or of the device block changes.
FORMAT_VERSION = 5

#: The compiled programs of a CPU artifact.
LIBRARY = "programs.so"

#: The most draft tokens a round can be compiled for.
MAX_DEPTH = 15
#: Rows of the batch planes: the widest verify.
BATCH_ROWS = MAX_DEPTH + 1
#: Entries of the token ring; a power of two.
RING_TOKENS = 4096
#: End-of-sequence ids a session may have.
MAX_EOS = 8

#: A trimmed head has so many rows, or a multiple: whole groups of the tiles that kernels want, so
#: that rows can be written into it later, a group at a time.
HEAD_GROUP = 64
#: Token ids of a trimmed head's rows, most frequent first: a file of the artifact.
RANKS_FILE = "ranks.txt"
#: The sidecar beside it: ids that were learned while running.
LEARNED_FILE = f"{RANKS_FILE}.learned"
#: Planes of a trimmed head: the token id of each row, and how many rows are in use.
HEAD_IDS, HEAD_ROWS = "head_ids", "head_rows"

#: Counters of the device block, one int32 each, in order. The device owns all of them during a
#: round; the host writes those of a session's start and reads the rest after a round.
STATE = (
    "position",  # committed rows N; the next free position
    "pending",  # the token predicted by row N-1; it has no row yet
    "depth",  # drafts the next round makes
    "rows",  # rows of the program that runs now
    "step",  # draft step j of the chain
    "drafted",  # drafts of the current round
    "accepted",  # accepted drafts of the current round
    "ring_count",  # tokens ever written to the ring
    "ended",  # 1 once a committed or pending token is an end of sequence
    "capacity",  # rows the context may hold
    "depth_cap",  # most drafts a round may make in this session
    "depth_initial",  # drafts of the first round
    "adaptive",  # 1: depth follows acceptance; 0: always depth_cap
    "floor_short",  # least depth while position < floor_boundary
    "floor_deep",  # least depth from there on
    "floor_boundary",
    "floor_patience",  # rounds without an accepted draft after which the depth is floor_least
    "floor_least",  # 1, or 0: such rounds are plain until a draft is tried again
    "floor_probe",  # rounds without a draft after which one is tried
    "misses",  # rounds without an accepted draft, in a row
    "idle",  # rounds without a draft since the last miss
    # Confidences and thresholds are the bits of a float32; none is negative, so bits compare.
    "late_below",  # the first draft below it bounds the next round's depth; 0: off
    "cut_below",  # a draft below it ends its chain; 0: off
    "cut_always",  # 1: in every round; 0: after a miss, from floor_boundary on
    "cut_drops",  # 1: the draft below goes, too; 0: it is verified
    "cut_first",  # 1: even the first draft may go
    "doubt",  # what cut_below is in this round
    "doubtful",  # first draft below late_below; MAX_DEPTH: none
    "cuts",  # rounds whose chain was ended
    "rounds",
    "total_drafted",
    "total_accepted",
    "burst_end",  # `ring_count` at which a burst has enough
    "more",  # 1: another round of the burst follows
)
#: Two tables follow the counters: drafts attempted and accepted by position in the chain.
STATE_ATTEMPTED = len(STATE)
STATE_ACCEPTED = STATE_ATTEMPTED + MAX_DEPTH
STATE_SIZE = STATE_ACCEPTED + MAX_DEPTH


def slot(name: str) -> int:
    """Index of a counter in the device block."""
    return STATE.index(name)


@dataclass(frozen=True)
class WeightEntry:
    """One weight the code needs, and where to find it.

    `names` are accepted spellings in the file of `source` (`target` or `draft`); `format` is the
    storage format the code was compiled for; `made` is a recipe for sources that lack the tensor.
    The file keeps `stacked` matrices apart by a dimension of their own, if not 0; `shape` does not.
    With `of_rows`, the tensor has so many rows and the weight holds chosen ones (`HeadEntry`).
    """

    id: str
    source: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    format: str
    bytes: int
    made: tuple[str | int, ...] = ()
    #: Bytes on the device, in the layout the kernels want.
    device_bytes: int = 0
    stacked: int = 0
    of_rows: int = 0


@dataclass(frozen=True)
class HeadEntry:
    """A drafter's head that knows some tokens only.

    Rows `[0, ranked)` of `weight` are those of the ids in the artifact's `RANKS_FILE`, or stand as
    the drafter's file has them, whose tensor `map_names` says which tokens they are: in the way of
    `map_kind`, `absolute` (the id) or `offset` (the id less the row). The `spare` rows behind them
    may be filled while the model runs.
    """

    weight: str
    ranked: int
    spare: int = 0
    map_names: tuple[str, ...] = ()
    map_kind: str = ""


@dataclass(frozen=True)
class LaunchEntry:
    """One CUDA launch: kernel, shape, and where each argument lies.

    `operands` are ("arena", byte offset) or ("weight", index). A grid may hold "sms", the number of
    multiprocessors. `weight` names the weight that a repacking launch is for. `bytes` is what the
    launch must move at the program's largest row count and a full context: the cost of its op,
    which is stated for the first of the op's launches; the others handle what that one left.
    """

    symbol: str
    grid: tuple[int | str, ...]
    block: int
    shared_bytes: int
    early: bool
    operands: tuple[tuple[str, int], ...] = ()
    weight: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class PlaneEntry:
    """One plane of the arena: byte offset, shape, element type and how it is rolled back.

    A row of a plane that is stored in blocks (`q8_0_rows`) counts in bytes.
    """

    id: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    rollback: str
    ring: bool


@dataclass(frozen=True)
class ValueEntry:
    """Where a program leaves a named result in the arena (for checks; overwritten by the next)."""

    program: str
    id: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ExpectEntry:
    """A fact of the weight file's metadata the artifact was compiled for."""

    source: str
    keys: tuple[str, ...]
    value: Any
    spec_path: str


@dataclass(frozen=True)
class IgnoreEntry:
    """Tensors of a weight file that the model does not read, and why: what a user is told.

    `pattern` is a name, in which `*` and `?` stand for what they do in a shell.
    """

    source: str
    pattern: str
    reason: str


@dataclass(frozen=True)
class ProgramEntry:
    """Cost of one program at its largest row count: what a roofline is made of."""

    name: str
    launches: int
    rows: int
    bytes: int
    flops: int
    fault: str = ""


@dataclass(frozen=True)
class Manifest:
    """Everything about an artifact but its code."""

    name: str
    target: str
    cpu: str
    cpu_features: tuple[str, ...]
    spec: Mapping[str, Any]
    spec_digest: str
    build_key: str
    versions: Mapping[str, str]
    arena_bytes: int
    weight_bytes: int
    files: Mapping[str, str]
    weights: tuple[WeightEntry, ...]
    planes: tuple[PlaneEntry, ...]
    values: tuple[ValueEntry, ...]
    expect: tuple[ExpectEntry, ...]
    ignore: tuple[IgnoreEntry, ...]
    programs: tuple[ProgramEntry, ...]
    sequences: Mapping[str, tuple[tuple[str, str], ...]]
    #: Sequences that repeat while a counter is not zero, checked after each pass.
    loops: Mapping[str, str]
    kernels: tuple[str, ...]
    #: CUDA only: launches of each program, launches that repack weights, and for each program the
    #: counter that holds its rows ("" for one row).
    launches: Mapping[str, tuple[LaunchEntry, ...]] = field(default_factory=dict)
    repacks: tuple[LaunchEntry, ...] = ()
    rows_from: Mapping[str, str] = field(default_factory=dict)
    #: Only where the drafter's head is trimmed.
    head: HeadEntry | None = None
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @property
    def staging_bytes(self) -> int:
        """CUDA only: what a weight takes, while loading, that is repacked into another layout."""
        repacked = {entry.weight for entry in self.repacks}
        return max((w.bytes for w in self.weights if w.id in repacked), default=0)

    def plane(self, id: str) -> PlaneEntry:
        return next(p for p in self.planes if p.id == id)

    @property
    def gates(self) -> tuple[str, ...]:
        """Confidence gates that the spec arms, for which alone its programs are made."""
        confidence = self.spec["round"]["confidence"]
        armed = {
            "next_round": confidence["next_round"] > 0,
            "in_round": confidence["in_round"]["when"] != "never",
        }
        return tuple(name for name, is_armed in armed.items() if is_armed)


_ENTRIES: dict[str, Any] = {
    "weights": WeightEntry,
    "planes": PlaneEntry,
    "values": ValueEntry,
    "expect": ExpectEntry,
    "ignore": IgnoreEntry,
    "programs": ProgramEntry,
    "repacks": LaunchEntry,
}


def _read_entries(entry: Any, items: list[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(entry(**{k: _tuples(v) for k, v in item.items()}) for item in items)


def _tuples(value: Any) -> Any:
    """Lists of a JSON document as tuples."""
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return value


def parse_manifest(text: str, place: str) -> Manifest:
    """Read a manifest; a broken one ends in a `MemraError`."""
    try:
        data = json.loads(text)
        version = data["format_version"]
        if version != FORMAT_VERSION:
            fail(
                "artifact-version",
                f"the artifact has format {version}, this memra reads format {FORMAT_VERSION}",
                place,
                hints=("compile the spec again with this version of memra-compile",),
            )
        for key in ("spec", "versions", "files", "loops"):
            data[key].items()  # a mapping, or it is no manifest of ours
        for key, entry in _ENTRIES.items():
            data[key] = _read_entries(entry, data[key])
        data["launches"] = {
            name: _read_entries(LaunchEntry, entries) for name, entries in data["launches"].items()
        }
        data["sequences"] = {k: _tuples(v) for k, v in data["sequences"].items()}
        if data["head"] is not None:
            (data["head"],) = _read_entries(HeadEntry, [data["head"]])
        for key in ("cpu_features", "kernels"):
            data[key] = tuple(data[key])
        return Manifest(**data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fail(
            "artifact-corrupt",
            f"the manifest cannot be read: {type(error).__name__}: {error}",
            place,
            hints=("compile the spec again",),
        )


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read and check an artifact folder: version, then every file's digest."""
    path = folder / "manifest.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(
            "artifact",
            f"`{folder}` is not a readable artifact: {error}",
            str(path),
            hints=("give the folder that memra-compile wrote, NAME.TARGET.memra",),
        )
    manifest = parse_manifest(text, str(path))
    for name, digest in manifest.files.items():
        file = folder / name
        if not file.is_file():
            fail("artifact-corrupt", f"`{name}` is missing", str(file),
                 hints=("compile the spec again",))  # fmt: skip
        found = file_digest(file)
        if found != digest:
            fail(
                "artifact-corrupt",
                f"`{name}` has digest {found[:12]}, the manifest says {digest[:12]}",
                str(file),
                hints=("compile the spec again",),
            )
    return manifest

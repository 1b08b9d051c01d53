"""Bind the tensors of a weight file to what a model wants; nothing is left unexplained."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.checkpoint.formats import SUPPORTED, TensorInfo
from memra_runtime.errors import Diagnostic, MemraError

_SHOWN = 6  # problems of one kind that are worth a line each; the rest is a count


@dataclass(frozen=True)
class WantedTensor:
    """A tensor that the compiled model reads.

    `names` are spellings of this same tensor in the files we know, the best first; they are not
    fallbacks: a file that has two of them is refused (for a head that may be tied to the
    embedding, want `output.weight` as optional). `format` None accepts any supported one.
    Two ids may want the same tensor. If `stacked` is not 0, the file keeps so many matrices apart
    by a first dimension of its own, which `shape` has along the rows.
    """

    id: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    format: str | None = None
    optional: bool = False
    stacked: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        if not self.stacked:
            return self.shape
        return (self.stacked, self.shape[0] // self.stacked, *self.shape[1:])


@dataclass(frozen=True)
class Binding:
    """id -> tensor of the file, and why every other tensor of the file is not read."""

    checkpoint: Checkpoint
    tensors: Mapping[str, TensorInfo]
    absent: tuple[str, ...] = ()  # optional ids that the file does not have
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor of the file -> reason

    def __getitem__(self, wanted_id: str) -> TensorInfo:
        return self.tensors[wanted_id]

    def __contains__(self, wanted_id: object) -> bool:
        return wanted_id in self.tensors

    def report(self) -> str:
        """Return a text: counts by group and format, absent ids, ignored tensors with reasons."""
        used = {info.name: info for info in self.tensors.values()}
        total = len(self.checkpoint.tensors)
        size = sum(info.nbytes for info in used.values())
        name = self.checkpoint.path.name
        lines = [f"{name}: {len(used)} of {total} tensors bound, {size:,} bytes"]
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for info in used.values():
            groups[_pattern(info.name), info.format].append(info.name)
        width = max((len(_summary(names)) for names in groups.values()), default=0)
        for (_, form), names in groups.items():
            lines.append(f"  {len(names):4}  {_summary(names):{width}}  {form}")
        if self.absent:
            lines.append(f"  absent (optional): {_summary(self.absent, list_all=True)}")
        lines += [f"  ignored: {tensor}: {reason}" for tensor, reason in self.ignored.items()]
        return "\n".join(lines)


def bind(
    checkpoint: Checkpoint,
    wanted: Sequence[WantedTensor],
    *,
    ignored: Mapping[str, str] | None = None,
) -> Binding:
    """Find every wanted tensor and account for every tensor of the file.

    `ignored` maps a pattern (`*` and `?` as in a shell) to the reason why such tensors are not
    read. Raises: one MemraError with all of it: missing tensors, wrong shapes or formats, one
    tensor under two spellings, and tensors that nothing reads.
    """
    found: dict[str, TensorInfo] = {}
    absent: list[str] = []
    missing: list[WantedTensor] = []
    problems: list[tuple[str, str, str]] = []  # code, tensor, what
    spellings: set[str] = set()
    for want in wanted:
        present = [name for name in want.names if name in checkpoint.tensors]
        spellings.update(present)
        if len(present) > 1:
            both = " and as ".join(f"`{name}`" for name in present)
            problems.append(("tensor-twice", present[0], f"`{want.id}` is in the file as {both}"))
        elif not present and want.optional:
            absent.append(want.id)
        elif not present:
            missing.append(want)
        else:
            found[want.id] = info = checkpoint.tensors[present[0]]
            problems += _mismatch(want, info)
    reasons: dict[str, str] = {}
    unused: list[str] = []
    for name in checkpoint.tensors:
        if name in spellings:
            continue
        patterns = [p for p in ignored or {} if fnmatch.fnmatchcase(name, p)]
        if patterns:
            reasons[name] = (ignored or {})[patterns[0]]
        else:
            unused.append(name)
    diagnostics = [
        *_missing(checkpoint, missing, unused, len(wanted)),
        *_wrong(checkpoint, problems),
        *_unused(checkpoint, unused),
    ]
    if diagnostics:
        raise MemraError(tuple(diagnostics))
    return Binding(checkpoint, found, tuple(absent), reasons)


def _mismatch(want: WantedTensor, info: TensorInfo) -> Iterable[tuple[str, str, str]]:
    shape = want.stored_shape
    if info.shape != shape:
        what = f"`{info.name}` has shape {list(info.shape)}, wanted {list(shape)}"
        if tuple(reversed(info.shape)) == shape:
            what += " (transposed)"
        yield "tensor-shape", info.name, what
    if want.format is not None and info.format != want.format:
        what = f"`{info.name}` is stored as {info.format}, wanted {want.format}"
        yield "tensor-format", info.name, what
    elif info.format not in SUPPORTED:
        what = f"`{info.name}` is stored as {info.format}; readable: {', '.join(sorted(SUPPORTED))}"
        yield "tensor-format", info.name, what


def _missing(
    checkpoint: Checkpoint, missing: list[WantedTensor], unused: list[str], total: int
) -> Iterable[Diagnostic]:
    groups: dict[tuple[str, tuple[int, ...]], list[WantedTensor]] = defaultdict(list)
    for want in missing:
        groups[_pattern(want.names[0]), want.stored_shape].append(want)
    for index, ((_, shape), wants) in enumerate(groups.items()):
        if index == _SHOWN:
            rest = sum(len(group) for group in list(groups.values())[_SHOWN:])
            yield _diagnostic(checkpoint, "tensor-missing", f"{rest} more tensors are missing")
            return
        first = wants[0]
        count = "" if len(wants) == 1 else f"{len(wants)} tensors are missing: "
        message = f"{count}`{_summary([w.names[0] for w in wants])}`"
        message += " is missing" if len(wants) == 1 else ""
        notes = [f"wanted shape {list(shape)}"]
        if len(first.names) > 1:
            notes.append(f"also looked for {', '.join(f'`{n}`' for n in first.names[1:])}")
        if index == 0:
            has = len(checkpoint.tensors)
            notes.append(f"the file has {has} tensors; {total} are wanted, {len(missing)} missing")
            notes.append(f"written by: {checkpoint.written_by}")
        near = difflib.get_close_matches(first.names[0], unused or checkpoint.tensors, 3, 0.75)
        hints = [f"did you mean {', '.join(f'`{n}`' for n in near)}?"] if near else []
        yield _diagnostic(checkpoint, "tensor-missing", message, notes, hints)


def _wrong(checkpoint: Checkpoint, problems: list[tuple[str, str, str]]) -> Iterable[Diagnostic]:
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for code, name, what in problems:
        groups[code, _pattern(name)].append((name, what))
    for (code, _), group in groups.items():
        notes = []
        if len(group) > 1:
            notes.append(f"{len(group)} tensors alike: {_summary([name for name, _ in group])}")
        yield _diagnostic(checkpoint, code, group[0][1], notes)


def _unused(checkpoint: Checkpoint, unused: list[str]) -> Iterable[Diagnostic]:
    if not unused:
        return
    groups: dict[str, list[str]] = defaultdict(list)
    for name in unused:
        groups[_pattern(name)].append(name)
    lines = [_summary(names) for names in groups.values()]
    notes = lines[: 2 * _SHOWN]
    if len(lines) > len(notes):
        notes.append(f"and {len(lines) - len(notes)} more groups")
    message = f"{len(unused)} tensors of the file are read by nothing"
    hints = ("the spec may describe another model, or miss a part of this one",)
    yield _diagnostic(checkpoint, "tensor-unused", message, notes, hints)


def _diagnostic(
    checkpoint: Checkpoint,
    code: str,
    message: str,
    notes: Iterable[str] = (),
    hints: Iterable[str] = (),
) -> Diagnostic:
    place = str(checkpoint.path)
    return Diagnostic(code, message, place, notes=tuple(notes), hints=tuple(hints))


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name, count=1)


def _summary(names: Sequence[str], *, list_all: bool = False) -> str:
    """`blk.0.attn_q.weight`, `blk.2.attn_q.weight` -> `blk.{0,2}.attn_q.weight`."""
    if list_all and len({_pattern(name) for name in names}) > 1:
        return ", ".join(names)
    if len(names) == 1:
        return names[0]
    numbers = sorted(int(match.group()) for name in names if (match := re.search(r"\d+", name)))
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return re.sub(r"\d+", lambda _: "{" + text + "}", names[0], count=1)

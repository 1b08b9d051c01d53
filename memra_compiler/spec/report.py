"""Turn what validation found into diagnostics in the user's own terms."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from memra_compiler.layers.params import PROBLEMS, KeyedChoice, Path, Problem
from memra_compiler.spec.fields import (
    Slot,
    allowed_values,
    and_list,
    children,
    describe,
    dotted,
    locate,
    or_list,
)
from memra_compiler.spec.marks import Document, lookup
from memra_runtime.errors import Diagnostic, Position

PLANNED_FIELDS = {
    "capture": "choosing how rounds are captured (`capture`)",
    "cap": "a cap apart from `depth.max` (`cap`)",
}
PLANNED_VALUES = {
    "sampled": "sampled acceptance",
    "nextn": "the `nextn` drafter (a multi-token-prediction block with its own cache)",
    "block": "the `block` drafter (block diffusion on tapped features)",
}
PLANNED_KINDS = {
    "mla": "latent attention (`mla`)",
    "kda": "Kimi delta attention (`kda`)",
    "gated_delta": "gated delta layers (`gated_delta`)",
}
_RANGE = {
    "greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of",
    "too_short", "too_long", "string_pattern_mismatch", "string_too_short", "finite_number",
}  # fmt: skip


def show(value: Any) -> str:
    """Name a value as a user wrote it."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        text = value if len(value) <= 40 else f"{value[:37]}..."
        return f"the text `{text}`" if text else "an empty text"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return "a mapping"
    return f"{value}"


def near(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` was most likely meant to be."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


class Report:
    """Collects the diagnostics of one spec."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.found: list[Diagnostic] = list(document.problems)
        self.settled: set[Path] = set()
        """Paths that have their error already; validation must not add a second one."""
        self.filled: dict[Path, str] = {}
        """Where the value of each `auto` was read."""

    def add(
        self,
        code: str,
        path: Path,
        message: str,
        *,
        label: str = "",
        notes: Iterable[str] = (),
        hints: Iterable[str] = (),
        key: bool = False,
    ) -> None:
        mark = self.document.mark(path, key=key)
        if mark.source is None and label.startswith("must"):  # no line to put the label under
            message = f"{message}: {label}"
        found = mark.diagnostic(code, message, label=label, notes=tuple(notes), hints=tuple(hints))
        if found not in self.found:
            self.found.append(found)

    def validation(self, error: ValidationError, prefix: Path = ()) -> None:
        """Add everything one validation found."""
        missing: dict[Path, list[str]] = {}
        renamed: set[Path] = set()
        for item in error.errors(include_url=False):
            path = (*prefix, *(part for part in item["loc"] if part != "[key]"))
            if any(path[: len(done)] == done for done in self.settled):
                continue
            if item["type"] == PROBLEMS:
                for problem in item["ctx"]["problems"]:
                    if problem.code == "value":
                        text = isinstance(lookup(self.document.data, path), str)
                        self.value(path, "unknown-value" if text else "out-of-range")
                    else:
                        self.problem(problem, path)
            elif item["type"] == "missing":
                missing.setdefault(path[:-1], []).append(str(path[-1]))
            elif item["type"] == "no_kind":
                missing.setdefault(path, []).append("kind")
            elif item["type"] == "extra_forbidden":
                suggestion = self.unknown_field(path)
                renamed |= {(*path[:-1], suggestion)} if suggestion else set()
            elif item["type"] == "bad_kind":
                self.bad_kind(path)
            elif item["type"] != "default_factory_not_called":  # a default that needs a bad field
                code = "unknown-value" if item["type"] == "literal_error" else "wrong-type"
                self.value(path, "out-of-range" if item["type"] in _RANGE else code)
        for parent, names in missing.items():
            self.missing(parent, [n for n in names if (*parent, n) not in renamed])

    def problem(self, problem: Problem, prefix: Path = ()) -> None:
        notes = []
        for path, what in problem.because:
            where = self.document.mark((*prefix, *path)).place
            notes.append(f"{what} is set at {where}")
        self.add(
            problem.code,
            (*prefix, *problem.path),
            problem.message,
            label=problem.label,
            notes=notes,
            hints=(problem.hint,) if problem.hint else (),
            key=problem.at_key,
        )

    def value(self, path: Path, code: str) -> None:
        """Report a value that its field does not accept."""
        data = self.document.data
        found, slot = lookup(data, path, None), locate(data, path)
        if isinstance(found, str) and found in PLANNED_VALUES:
            return self.planned(path, PLANNED_VALUES[found], slot, key=False)
        wanted = describe(slot) if slot else "left out"
        hints = []
        if isinstance(found, str):
            guess = near(found, allowed_values(slot)) if slot else None
            plain = found.replace("_", "").replace(",", "")
            if guess:
                hints.append(f"did you mean `{guess}`?")
            elif found == "auto":
                hints.append("no checkpoint knows this value, so it cannot be `auto`")
            elif plain.isdecimal() and slot and slot.annotation in (int, float):
                hints.append(f"write it as a plain number: {plain}")
            elif found.lower() in ("yes", "no", "on", "off") and slot and slot.annotation is bool:
                hints.append(f"`{found}` is text in YAML 1.2")
        elif isinstance(found, float) and slot and slot.annotation is int and found == found // 1:
            hints.append(f"write it without a point or exponent: {int(found)}")
        message = f"`{dotted(path)}` cannot be {show(found)}"
        notes = [f"`auto` was read from {self.filled[path]}"] if path in self.filled else []
        self.add(code, path, message, label=f"must be {wanted}", notes=notes, hints=hints)
        return None

    def unknown_field(self, path: Path) -> str | None:
        """Report a key that its mapping does not have; return the field it was meant to be."""
        data, parent, name = self.document.data, path[:-1], str(path[-1])
        slot = locate(data, parent)
        known = list((children(slot, lookup(data, parent, None)) or {}) if slot else ())
        keyed = slot.choice(KeyedChoice) if slot else None
        where = f"`{dotted(parent)}`" if parent else "a spec"
        if name in (PLANNED_KINDS if keyed else PLANNED_FIELDS):
            planned = (PLANNED_KINDS if keyed else PLANNED_FIELDS)[name]
            self.planned(path, planned, slot, key=True)
            return None
        suggestion = near(name, known)
        ask = f"did you mean `{suggestion}`? " if suggestion else ""
        if keyed:
            message = f"`{name}` is not a kind of {keyed.family.noun}"
            hint, code, label = f"{ask}kinds: {', '.join(known)}", "unknown-kind", "no such kind"
        else:
            message = f"`{name}` is not a field of {where}"
            hint, code, label = f"{ask}fields: {', '.join(known)}", "unknown-field", "unknown"
        self.add(code, path, message, label=label, hints=(hint,), key=True)
        return suggestion

    def planned(self, path: Path, what: str, slot: Slot | None, *, key: bool) -> None:
        allowed = allowed_values(slot) if slot else []
        if slot and not allowed:
            allowed = list(children(slot, lookup(self.document.data, path[:-1], None)) or ())
        hints = (f"supported now: {', '.join(allowed)}",) if allowed else ()
        message = f"not supported yet: {what}"
        self.add("not-supported", path, message, label="not supported", hints=hints, key=key)

    def bad_kind(self, path: Path) -> None:
        """Report a section whose `kind` does not exist, or that is no mapping at all."""
        value = lookup(self.document.data, path, None)
        if not isinstance(value, dict):
            return self.value(path, "wrong-type")
        here, kind = (*path, "kind"), value["kind"]
        slot = locate(self.document.data, path)
        assert slot is not None
        known = list(slot.metadata[0].family.kinds())
        if isinstance(kind, str) and kind in PLANNED_VALUES:
            message = f"not supported yet: {PLANNED_VALUES[kind]}"
            hint = f"supported now: {', '.join(known)}"
            return self.add("not-supported", here, message, label="not supported", hints=(hint,))
        guess = near(str(kind), known)
        hints = (f"did you mean `{guess}`?",) if guess else ()
        message = f"`{dotted(here)}` cannot be {show(kind)}"
        label = f"must be {' or '.join(f'`{name}`' for name in known)}"
        self.add("unknown-kind", here, message, label=label, hints=hints)
        return None

    def missing(self, parent: Path, names: list[str]) -> None:
        if not names:
            return
        listed = and_list([f"`{name}`" for name in names])
        where = f"`{dotted(parent)}`" if parent else "the spec"
        word = "field" if len(names) == 1 else "fields"
        notes = []
        for name in names:
            slot = locate(self.document.data, (*parent, name))
            if slot and slot.field:
                notes.append(f"`{name}`: {describe(slot)}. {slot.field.description}")
            elif name == "kind" and (whole := locate(self.document.data, parent)):
                kinds = [f"`{kind}`" for kind in whole.metadata[0].family.kinds()]
                notes.append(f"`kind`: {or_list(kinds)}. It decides the other fields.")
            removed = self.document.deleted.get((*parent, name))
            if removed:
                notes.append(f"`{name}` is deleted by `null` at {removed.place}")
        message = f"{where} lacks the {word} {listed}"
        self.add("missing-field", parent, message, label="in here", notes=notes, key=True)

    def sorted(self) -> tuple[Diagnostic, ...]:
        """Return all diagnostics in the order of the file, those without a line last."""

        def order(item: Diagnostic) -> tuple[Any, ...]:
            place = item.place
            if isinstance(place, Position):
                return (0, place.file, place.line, place.column, item.message)
            return (1, str(place), 0, 0, item.message)

        return tuple(sorted(self.found, key=order))

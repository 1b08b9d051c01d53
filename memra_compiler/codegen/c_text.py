"""Generated C as a person would write it: parentheses only where they matter, lines that fit.

Each function keeps the meaning: what is parsed is the same tree (`tests/codegen/test_c_text.py`
compares machine code with and without).
"""

from __future__ import annotations

import re

#: How strongly binary operators bind; anything else (a call, a name, a number) binds most.
_BINDS = {
    "?": 1, ":": 1, "||": 2, "&&": 3, "|": 4, "^": 5, "&": 6, "==": 7, "!=": 7, "<": 8, ">": 8,
    "<=": 8, ">=": 8, "<<": 9, ">>": 9, "+": 10, "-": 10, "*": 11, "/": 11, "%": 11,
}  # fmt: skip
_ATOM = 20
_BITS = ("<<", ">>", "&", "|", "^")
_ANY = "|".join(re.escape(op) for op in sorted(_BINDS, key=len, reverse=True))
_TYPE = re.compile(r"\(((volatile )?\w+ ?\*|unsigned|int|float|double|half|nv_bfloat16)\)")
_PAIRS = {"(": ")", "[": "]"}


def tidy(line: str) -> str:
    """The line without parentheses that change nothing."""
    at = 0
    while (at := line.find("(", at)) >= 0:
        end = closing(line, at)
        if end is not None and _redundant(line, at, end):
            line = f"{line[:at]}{line[at + 1 : end]}{line[end + 1 :]}"
        else:
            at += 1
    return line


def closing(line: str, at: int) -> int | None:
    """Where the bracket at `at` closes; None if that is on another line."""
    open_, close = line[at], _PAIRS[line[at]]
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == open_) - (line[i] == close)
        if depth == 0:
            return i
    return None


def operators(text: str) -> list[tuple[str, int]]:
    """Binary operators and commas outside all brackets, and where they stand."""
    found, depth = [], 0
    starts = {match.start(): match[1] for match in re.finditer(rf"(?= ({_ANY}) )", text)}
    for i, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if depth == 0 and i in starts:
            found.append((starts[i], i))
        elif depth == 0 and c in ",;":
            found.append((c, i))
    return found


def _redundant(line: str, at: int, end: int) -> bool:
    inner, before, after = line[at + 1 : end], line[:at], line[end + 1 :]
    outside = before.rstrip()
    if not inner or _TYPE.match(line, at) or re.search(r"(\w|[\])*&!~-])$", before):
        return False  # a cast, a call, or what a cast or a unary operator applies to
    if re.search(r"\b(if|for|while|return)$", outside) or after.startswith(("[", ".")):
        return False
    inside = operators(inner)
    left, right = re.search(rf" ({_ANY}) $", before), re.match(rf" ({_ANY}) ", after)
    if inner.startswith(("-", "*")) or any(op in ",;" for op, _ in inside):
        return False
    if inside and any(side and side[1] in _BITS for side in (left, right)):
        return False  # few know how these bind
    own = min((_BINDS[op] for op, _ in inside), default=_ATOM)
    return own > (_BINDS[left[1]] if left else 0) and own >= (_BINDS[right[1]] if right else 0)


def fuse(line: str) -> str:
    """`s = s + a * b;` as `s = fmaf(a, b, s);`: a running sum adds its products unrounded."""
    match = re.match(r"(\s*)(\S.*?) = (.*);$", line)
    if match is None:
        return line
    indent, total, value = match.groups()
    prefix = f"{total} + "
    if not value.startswith(prefix):
        return line
    product = value.removeprefix(prefix)
    found = operators(product)
    if [op for op, _ in found] != ["*"]:
        return line
    (_, at) = found[0]
    return f"{indent}{total} = fmaf({product[:at]}, {product[at + 3 :]}, {total});"


def wrap(line: str, width: int) -> list[str]:
    """A long line broken at spaces, where the fewest brackets are open."""
    if len(line) <= width or line.lstrip().startswith(("#", "//")):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    depth, best = 0, (1 << 30, 0)
    for i, c in enumerate(line[: width + 1]):
        depth += (c in "([") - (c in ")]")
        if c == " " and i >= max(len(indent), width // 2):
            best = min(best, (depth, -i))
    if best[1] == 0:
        return [line]
    return [line[: -best[1]], *wrap(indent + line[1 - best[1] :], width)]

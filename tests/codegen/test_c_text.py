"""Generated C made readable: what may go, what must stay, and where lines break."""

from __future__ import annotations

import pytest

from memra_compiler.codegen.c_text import fuse, tidy, wrap


@pytest.mark.parametrize(
    ("line", "tidied"),
    [
        ("y = ((a + b) + c);", "y = a + b + c;"),
        ("y = (a + (b + c));", "y = a + (b + c);"),  # floats: the order counts
        ("y = (a - (b - c));", "y = a - (b - c);"),
        ("y = ((a * b) / c);", "y = a * b / c;"),
        ("y = (a / (b * c));", "y = a / (b * c);"),
        ("y = ((a + b) * c);", "y = (a + b) * c;"),
        ("y = ((a * b) + (c * d));", "y = a * b + c * d;"),
        ("y[((i * 4) + j)] = x[(i)];", "y[i * 4 + j] = x[i];"),
        ("y = ((a + b) << 23);", "y = (a + b) << 23;"),
        ("y = ((x & 63) * 4);", "y = (x & 63) * 4;"),
        ("if ((i < 4) && (j < (k + 1))) {", "if (i < 4 && j < k + 1) {"),
        ("y = ((a < b) ? (c + 1) : d);", "y = a < b ? c + 1 : d;"),
        ("y = ((a < b) ? c : d) + e;", "y = (a < b ? c : d) + e;"),
        ("y = ((float)x[(i + 1)]);", "y = (float)x[i + 1];"),
        ("y = ((float)(a + b));", "y = (float)(a + b);"),
        ("y = (a - (-b));", "y = a - (-b);"),
        ("*(float4*)(y + (i * 4)) = *(float4*)x;", "*(float4*)(y + i * 4) = *(float4*)x;"),
        ("y = fmaf((a * b), (c + d), e);", "y = fmaf(a * b, c + d, e);"),
        ("y = (*(float *)(&(v)));", "y = (*(float *)(&(v)));"),
        ("y = (f(a, b) * (g(c, d) + 1.0f));", "y = f(a, b) * (g(c, d) + 1.0f);"),
        ("for (int i = 0; i < 4; ++i) {", "for (int i = 0; i < 4; ++i) {"),
        ("y = (a +", "y = (a +"),  # what goes on in the next line is left alone
    ],
)  # fmt: skip
def test_parentheses_go_where_they_change_nothing(line: str, tidied: str) -> None:
    assert tidy(line) == tidied
    assert tidy(tidied) == tidied


@pytest.mark.parametrize(
    ("line", "fused"),
    [
        ("  s[0] = s[0] + a[i + 1] * b;", "  s[0] = fmaf(a[i + 1], b, s[0]);"),
        ("s = s + f(a, b * c) * (d + e);", "s = fmaf(f(a, b * c), (d + e), s);"),
        ("s = s + a * b * c;", "s = s + a * b * c;"),
        ("s = s + a + b * c;", "s = s + a + b * c;"),
        ("s = t + a * b;", "s = t + a * b;"),
        ("s = s * a + b;", "s = s * a + b;"),
        ("if (s == s + a * b) {", "if (s == s + a * b) {"),
    ],
)
def test_only_a_running_sum_of_products_is_fused(line: str, fused: str) -> None:
    assert fuse(line) == fused


def test_long_lines_break_at_spaces_and_lose_nothing() -> None:
    line = "  y[i] = " + " + ".join(f"(a{i} * b{i})" for i in range(20)) + ";"
    parts = wrap(line, 60)
    assert all(len(part) <= 60 for part in parts)
    assert " ".join(part.strip() for part in parts) == line.strip()
    assert wrap("  short;", 60) == ["  short;"]
    assert wrap("x" * 80, 60) == ["x" * 80]
    assert len(wrap("// " + "word " * 30, 60)) == 1  # a comment ends with its line

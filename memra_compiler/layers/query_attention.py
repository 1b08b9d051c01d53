"""Attention that projects only a query and reads keys and values that another layer appended.

A drafter's layers read those of the target; the last layers of a target may read an earlier one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from memra_compiler.layers.attention import RopeParams, rope_problems
from memra_compiler.layers.base import MixerParams
from memra_compiler.layers.build import LayerBuild
from memra_compiler.layers.params import Path, Problem, param
from memra_compiler.ops.attention import Attention
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.rope import Rope


class QueryAttentionParams(MixerParams):
    """Attention of `heads` queries over keys and values of a target layer; appends nothing."""

    kind: ClassVar[str] = "query_attention"
    owns_kv: ClassVar[bool] = False
    example: ClassVar[str] = (
        "mixer:\n"
        "  query_attention:\n"
        "    {heads: 32, head_dim: 256, window: 1024, scale: 1.0, q_norm: rms,\n"
        "     rope: {base: 1e4}, kv_target: last_own(swa), visible_rows: window_minus_1}\n"
    )

    heads: int = param(
        auto=True, ge=1, doc="Query heads; the key/value heads of `kv_target` must divide them."
    )
    head_dim: int = param(
        auto=True,
        ge=2,
        multiple_of=2,
        unit="elements",
        doc="Width of one head; equals that of `kv_target`.",
    )
    window: int | None = param(
        None,
        auto=True,
        ge=1,
        unit="tokens",
        default_words="absent: all positions",
        doc="The window `visible_rows` counts in; equals that of `kv_target`.",
    )
    scale: float = param(auto=True, gt=0, doc="Factor on the scores before the softmax.")
    q_norm: Literal["rms", "none"] = param(
        "none", auto=True, doc="Norm of each query head, with a weight, before rotary."
    )
    rope: RopeParams = param(
        doc="Rotary positions of the queries; equal to those of `kv_target`, whose keys they meet."
    )
    kv_target: str = param(
        pattern=r"^last_own\([A-Za-z][A-Za-z0-9_]*\)$",
        words="`last_own(KIND)`, KIND being a layer kind of the target",
        doc="Whose keys and values are read: those of the last target layer of that kind.",
    )
    visible_rows: Literal["window_minus_1", "window", "window_plus_1"] | None = param(
        None,
        default_words="absent: the target's own rule",
        doc="How many of the last committed rows a windowed layer of a drafter sees. The target's "
        "own rule is `window_minus_1`, for the query's position has no row yet. The choice "
        "changes acceptance, never a token. A layer of the target sees its window and has no "
        "choice.",
    )

    @property
    def kv_kind(self) -> str:
        """Name of the target's layer kind that `kv_target` points at."""
        return self.kv_target[len("last_own(") : -1]

    def visible(self, section: str) -> int | None:
        """Rows that a query of `target` or `drafter` sees at most; None means all of them."""
        if self.window is None:
            return None
        rows = self.visible_rows or ("window" if section == "target" else "window_minus_1")
        return self.window + {"window_minus_1": -1, "window": 0, "window_plus_1": 1}[rows]

    def check(self) -> Iterator[Problem]:
        yield from rope_problems(self.rope, self.head_dim)

    def row_lengths(self) -> Iterator[tuple[Path, int]]:
        yield ("head_dim",), self.heads * self.head_dim

    def build(self, b: LayerBuild, x: str) -> str:
        at, d = ("mixer", self.kind), self.head_dim
        q = b.linear(x, b.weight("q", self.heads * d, b.width), part="q", at=at)
        if self.q_norm == "rms":
            weight = b.weight("q_norm", d, use="norm")
            q = b.run(RMSNorm(b.eps, d), q, weight, part="q_norm", at=at)
        q = b.run(Rope(), q, self.rope.angles(b, d), part="q_rope", at=at)
        caches = (f"?{self.kv_target}.k", f"?{self.kv_target}.v")
        (y,) = b.program.emit(
            Attention(self.scale, b.span(self.visible(b.section))),
            q,
            b.ends,
            *caches,
            label=b.label("attention"),
            path=(*b.path, *at, "kv_target"),
            types=(b.program.type_of(q),),
        )
        return b.linear(y, b.weight("o", b.width, self.heads * d), part="o", at=at)

"""Attention with its own keys and values, over the whole past or a window of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from memra_compiler.layers.base import MixerParams
from memra_compiler.layers.build import LayerBuild
from memra_compiler.layers.params import Params, Path, Problem, param
from memra_compiler.ops.attention import Attention, KvAppend
from memra_compiler.ops.kv_move import KvMove
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.rope import Rope


class RopeParams(Params):
    """Rotary positions: element `i` of a head pairs with `i + head_dim / 2`.

    Pair `i` turns by `position * base^(-2i / head_dim)`. The exponent divides by the whole head,
    also where only a fraction of the pairs turns.
    """

    example: ClassVar[str] = "rope: {base: 1e6, fraction: 0.25, factors: rope_freqs}\n"

    base: float = param(auto=True, gt=1, doc="Base of the angles.")
    fraction: float = param(
        1.0,
        auto=True,
        gt=0,
        le=1,
        doc="Share of the pairs that turn, counted from the first. A GGUF file expresses it in "
        "its `rope_freqs` tensor only, so `auto` needs a Hugging Face configuration.",
    )
    factors: Literal["rope_freqs"] | None = param(
        None,
        auto=True,
        doc="Divide each angle by the file's tensor `rope_freqs`. Safetensors have no such "
        "tensor: it is then made from `fraction`.",
    )

    def angles(self, b: LayerBuild, head_dim: int) -> str:
        """Emit (once a step) the angles for heads of this width."""
        rotated = round(self.fraction * (head_dim // 2))
        return b.angles(head_dim, self.base, rotated, self.factors is not None)


class AttentionParams(MixerParams):
    """Attention of `heads` queries over `kv_heads` keys and values that this layer appends."""

    kind: ClassVar[str] = "attention"
    owns_kv: ClassVar[bool] = True
    example: ClassVar[str] = (
        "mixer:\n"
        "  attention:\n"
        "    {heads: 32, kv_heads: 16, head_dim: 256, window: 1024, scale: 1.0,\n"
        "     qk_norm: rms, v_norm: unit, rope: {base: 1e4}}\n"
    )

    heads: int = param(auto=True, ge=1, doc="Query heads.")
    kv_heads: int = param(auto=True, ge=1, doc="Key/value heads; must divide `heads`.")
    head_dim: int = param(auto=True, ge=2, multiple_of=2, unit="elements", doc="Width of one head.")
    window: int | None = param(
        None,
        auto=True,
        ge=1,
        unit="tokens",
        default_words="absent: all positions",
        doc="A query sees the last `window` positions, itself included.",
    )
    scale: float = param(auto=True, gt=0, doc="Factor on the scores before the softmax.")
    qk_norm: Literal["rms", "none"] = param(
        "none", auto=True, doc="Norm of each query and key head, with a weight, before rotary."
    )
    v_norm: Literal["unit", "none"] = param(
        "none", auto=True, doc="`unit`: RMS norm of each value head, without a weight."
    )
    value_from: Literal["own", "key"] = param(
        "own",
        auto=True,
        doc="`key`: there is no value matrix; values are the key projection before its norm "
        "and rotary.",
    )
    rope: RopeParams = param(doc="Rotary positions of queries and keys.")

    def check(self) -> Iterator[Problem]:
        if self.heads % self.kv_heads:
            yield Problem(
                ("kv_heads",),
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly",
                label=f"must divide heads = {self.heads}",
                because=((("heads",), "`heads`"),),
            )
        yield from rope_problems(self.rope, self.head_dim)

    def row_lengths(self) -> Iterator[tuple[Path, int]]:
        yield ("head_dim",), self.heads * self.head_dim

    def build(self, b: LayerBuild, x: str) -> str:
        at, d = ("mixer", self.kind), self.head_dim
        q = b.linear(x, b.weight("q", self.heads * d, b.width), part="q", at=at)
        k = b.linear(x, b.weight("k", self.kv_heads * d, b.width), part="k", at=at)
        v = k
        if self.value_from == "own":
            v = b.linear(x, b.weight("v", self.kv_heads * d, b.width), part="v", at=at)
        if self.qk_norm == "rms":
            norm = RMSNorm(b.eps, d)
            q = b.run(norm, q, b.weight("q_norm", d, use="norm"), part="q_norm", at=at)
            k = b.run(norm, k, b.weight("k_norm", d, use="norm"), part="k_norm", at=at)
        if self.v_norm == "unit":
            v = b.run(RMSNorm(b.eps, d), v, part="v_norm", at=at)
        angles = self.rope.angles(b, d)
        q = b.run(Rope(), q, angles, part="q_rope", at=at)
        k = b.run(Rope(), k, angles, part="k_rope", at=at)
        y, move = self.attend(b, q, k, v)
        y = self.output(b, x, y)  # first, so that attention rounds its rows itself
        move()
        return y

    def attend(self, b: LayerBuild, q: str, k: str, v: str) -> tuple[str, Callable[[], object]]:
        """Append keys and values and emit attention: the heads `[T, heads * head_dim]`.

        Also returned: what emits whatever is left to do with the caches, once they have been read.

        A ring has room for the rows of a round beside its window. A chunk of a prompt may be wider:
        its last rows would overwrite what its first ones see. It is attended beside the ring, in
        planes that all layers of the kind share, and moved into the ring after.
        """
        at = ("mixer", self.kind)
        path = (*b.path, *at)
        rows, ring = b.cache_rows(self.window)
        caches = self.planes(b, b.label("{}"), rows, rollback="truncate", ring=ring, kind=b.kind)
        chunk: tuple[str, ...] = ()
        if ring and self.window is not None and b.program.limit > rows - self.window:
            chunk = self.planes(b, f"chunk.{b.kind}.{{}}", b.program.limit)
        appended = (k, v, b.positions, *(chunk or caches))
        b.program.emit(KvAppend(), *appended, label=b.label("append"), path=path)
        seen = Attention(self.scale, b.span(self.window))
        y = b.run(seen, q, b.ends, *caches, *chunk, part="attention", at=at)

        def move() -> None:
            if chunk:
                moved = (b.positions, *chunk, *caches)
                b.program.emit(KvMove(), *moved, label=b.label("move"), path=path)

        return y, move

    def planes(self, b: LayerBuild, name: str, rows: int, **options: Any) -> tuple[str, ...]:
        """Declare a plane of keys and one of values: `name` with k and v filled in."""
        shape = (self.kv_heads, rows, self.head_dim)
        declare = b.program.module.plane
        return tuple(declare(name.format(x), shape, b.kv_dtype, **options) for x in "kv")

    def output(self, b: LayerBuild, x: str, y: str) -> str:
        """Emit what follows the heads `y [T, heads * head_dim]`; `x` is the layer's input."""
        at = ("mixer", self.kind)
        weight = b.weight("o", b.width, self.heads * self.head_dim)
        return b.linear(y, weight, part="o", at=at)


def rope_problems(rope: RopeParams, head_dim: int) -> Iterator[Problem]:
    """Yield a problem if `fraction` does not select a whole number of pairs."""
    pairs = rope.fraction * (head_dim // 2)
    if pairs != int(pairs) or pairs < 1:
        yield Problem(
            ("rope", "fraction"),
            f"a fraction of {rope.fraction:g} does not turn a whole number of pairs",
            label=f"{rope.fraction:g} * {head_dim} / 2 = {pairs:g}",
            because=((("head_dim",), "`head_dim`"),),
        )

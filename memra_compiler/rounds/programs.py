"""A spec as IR: the programs of a round, before any pass.

`prefill` appends the rows of a prompt chunk, `plain_step` decodes one token, `draft` is one step of
the chain, `verify` runs the pending token and its drafts; `accept`, `rollback`, `commit` and
`adapt` settle the round on the device block.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from memra_compiler.drafters.base import DraftPlace
from memra_compiler.ir.graph import Module
from memra_compiler.ir.types import CACHE_DTYPES
from memra_compiler.layers.build import (
    PER_LAYER_INPUTS,
    LayerBuild,
    ModuleBuilder,
    ProgramBuilder,
)
from memra_compiler.ops.activation import SoftCap
from memra_compiler.ops.again import Again
from memra_compiler.ops.argmax import ArgMax
from memra_compiler.ops.chain import Advance, Begin
from memra_compiler.ops.embed import Embed
from memra_compiler.ops.norm import RMSNorm
from memra_compiler.ops.per_layer import PerLayerMix
from memra_compiler.ops.settle import Accept, AdaptDepth, Commit, Rollback
from memra_compiler.ops.state import Positions, ReadTokens, StateOp, WriteRows
from memra_runtime.artifact import BATCH_ROWS, MAX_EOS, RING_TOKENS, STATE_SIZE
from memra_runtime.errors import fail

if TYPE_CHECKING:
    from memra_compiler.spec import Spec
    from memra_compiler.spec.archs import Checkpoints

#: How a file may store token ids.
ID_FORMATS = ("i32", "i64")
#: Rows by which a ring is larger than its window, at least: those of a verify if they are more.
ROUND_ROWS = 8
#: Rows of a prompt chunk by target, at least likewise. A GPU multiplies many rounded rows at once.
CHUNK_ROWS = {"cpu": 8, "cuda": 64}


def build_module(spec: Spec, checkpoints: Checkpoints, target: str = "cpu") -> Module:
    """Write the programs of `spec`; storage formats are those of the checkpoints at hand."""
    files = {"target": checkpoints.target, "drafter": checkpoints.drafter}

    def weight_format(section: str, names: tuple[str, ...], use: str) -> str:
        file = files[section]
        for name in names if file is not None else ():
            if name in file.tensors:  # type: ignore[union-attr]
                found = file.tensors[name].format  # type: ignore[union-attr]
                if use == "ids" and found not in ID_FORMATS:
                    fail(
                        "format",
                        f"`{name}` lists token ids and is stored as {found}",
                        str(file.path),  # type: ignore[union-attr]
                        hints=(f"store it as {' or '.join(ID_FORMATS)}",),
                    )
                return found
        return "i32" if use == "ids" else str(getattr(getattr(spec, section).formats, use))

    def weight_names(
        section: str, role: str, layer: int | None, own: tuple[str, ...]
    ) -> tuple[str, ...]:
        table = spec.arch(section)
        if own and layer is not None:
            return table.layer_names(own, layer)
        return table.weight_names(role, layer)

    activations = spec.runtime.activations_on(target)
    module = ModuleBuilder(spec.name, weight_names, weight_format, spec.position, activations)
    _Rounds(spec, module, target).build()
    return replace(module.finish(), target=target)


class _Rounds:
    """Writes the programs; holds the operands of the device block."""

    def __init__(self, spec: Spec, module: ModuleBuilder, target: str) -> None:
        self.spec, self.module, self.target = spec, module, target
        context, width = spec.runtime.max_context, spec.target.width
        # what the host reads after a round comes first, so that it is one small copy
        self.state = module.plane("state", (STATE_SIZE,), "i32")
        self.batch = module.plane("batch", (BATCH_ROWS,), "i32")
        self.choice = module.plane("choice", (BATCH_ROWS,), "i32")
        self.ring = module.plane("ring", (RING_TOKENS,), "i32")
        self.prompt = module.plane("prompt", (self.prefill_rows,), "i32")
        self.forced = module.plane("forced", (context + 1,), "i32")
        self.eos = module.plane("eos", (MAX_EOS,), "i32")
        self.verified = module.plane("verified", (BATCH_ROWS, width), "f32")
        self.hidden = module.plane("hidden", (width,), "f32")
        self.carry = module.plane("carry", (width,), "f32")

    @property
    def verify_rows(self) -> int:
        return self.spec.round.depth.max + 1

    @property
    def prefill_rows(self) -> int:
        return max(CHUNK_ROWS[self.target.partition(":")[0]], self.verify_rows)

    def build(self) -> None:
        self.prefill()
        self.decode("plain_step", 1, "")
        self.decode("verify", self.verify_rows, "rows")
        self.draft()
        at = ("round",)
        for name, plain in (("begin", False), ("begin_plain", True)):
            b = ProgramBuilder(self.module, name)
            source = "?target.hidden_post_norm"
            cuts = self.spec.round.confidence.cuts and not plain
            b.emit(Begin(plain, cuts), self.state, self.batch, source, self.carry,
                   label=f"round.{name}", path=at, types=())  # fmt: skip
            b.finish()
        self.step("accept", Accept(), self.state, self.batch, self.choice)
        self.step("rollback", Rollback(), self.state)
        self.step("commit", Commit(), self.state, self.batch, self.choice, self.verified,
                  self.hidden, self.ring, self.eos)  # fmt: skip
        self.step("adapt", AdaptDepth(), self.state)
        self.step("adapt_fresh", AdaptDepth(fresh=True), self.state)
        self.step("again", Again(), self.state)

    def step(self, name: str, op: StateOp, *planes: str) -> None:
        b = ProgramBuilder(self.module, name)
        b.emit(op, *planes, label=f"round.{name}", path=("round",))
        b.finish()

    def cache_rows(self, window: int | None) -> tuple[int, bool]:
        """Rows of a cache: the context, or for a window a ring of it and the rows of a round.

        A round that is rolled back has overwritten the oldest rows of a ring; they are never
        visible again only if the ring holds the window and a whole round. A longer chunk of a
        prompt does not go through the ring (`AttentionParams.attend`).
        """
        context = self.spec.runtime.max_context
        rows = context if window is None else window + max(ROUND_ROWS, self.verify_rows)
        return min(rows, context), rows < context

    def layer(
        self, b: ProgramBuilder, section: str, index: int, kind: str, positions: str, ends: str
    ) -> LayerBuild:
        stack = getattr(self.spec, section)
        kv, per_layer = self.spec.runtime.kv, self.spec.target.per_layer_embed
        return LayerBuild(
            b, section, index, kind, stack.width, stack.norm_eps, positions, ends,
            self.cache_rows, CACHE_DTYPES.get(kv, kv), per_layer.width if per_layer else 0,
        )  # fmt: skip

    def hidden_rows(self, b: ProgramBuilder, tokens: str) -> str:
        """Emit the target from token ids (a plane) to its last residual."""
        target, limit = self.spec.target, b.limit
        ids = b.one(ReadTokens(limit=limit), tokens, self.state, label="target.tokens")
        positions = b.one(Positions("rows", limit), self.state, label="target.positions")
        ends = b.one(Positions("ends", limit), self.state, label="target.ends")
        at = ("target", "embed")
        table = self.module.weight(
            "target", "embed", (target.vocab, target.width), "embed", path=at
        )
        scale = target.embed.factor(target.width)
        x = b.one(Embed(scale), ids, table, label="target.embed", path=at)
        if target.per_layer_embed is not None:
            b.shared[PER_LAYER_INPUTS] = self.per_layer_inputs(b, ids, x)
        for index, kind in target.layer_sequence():
            layer = self.layer(b, "target", index, kind, positions, ends)
            x = target.layer_kinds[kind].build(layer, x)
        return x

    def per_layer_inputs(self, b: ProgramBuilder, ids: str, x: str) -> str:
        """Emit the per-layer embeddings of a step: a slice for every layer, side by side."""
        target, at = self.spec.target, ("target", "per_layer_embed")
        assert target.per_layer_embed is not None
        part, module = target.per_layer_embed.width, self.module
        size = len(target.layers) * part
        shape = (target.vocab, size)
        table = module.weight("target", "per_layer_embed", shape, "embed", path=at)
        token = b.one(Embed(part**0.5), ids, table, label="target.per_layer_token", path=at)
        shape = (size, target.width)
        weight = module.weight("target", "per_layer_context", shape, "matrix", path=at)
        context = b.linear(x, weight, label="target.per_layer_context", path=at)
        norm = module.weight("target", "per_layer_norm", (part,), "norm", path=at)
        # the context is divided by sqrt(width) before its norm: the same as an eps times the width
        mix = PerLayerMix(target.norm_eps * target.width)
        return b.one(mix, context, token, norm, label="target.per_layer_inputs", path=at)

    def prefill(self) -> None:
        b = ProgramBuilder(self.module, "prefill", self.prefill_rows, "rows")
        self.hidden_rows(b, self.prompt)  # for the cache alone; `fuse` drops what nobody reads
        b.emit(Advance(), self.state, label="round.advance", path=("round",))
        b.finish()

    def decode(self, name: str, limit: int, rows_from: str) -> None:
        """The target with its head: one token (`plain_step`) or a batch (`verify`)."""
        target = self.spec.target
        b = ProgramBuilder(self.module, name, limit, rows_from)
        x = self.hidden_rows(b, self.batch)
        norm = self.module.weight("target", "output_norm", (target.width,), "norm")
        x = b.one(RMSNorm(target.norm_eps), x, norm, label="target.output_norm")
        b.emit(WriteRows(), x, self.verified, label="target.verified")
        at = ("target", "head")
        role = "embed" if target.head.tied else "head"
        head = self.module.weight("target", role, (target.vocab, target.width), "embed", path=at)
        logits = b.linear(x, head, label="target.head", path=at)
        if target.head.softcap is not None:
            cap = SoftCap(target.head.softcap)
            logits = b.one(cap, logits, label="target.logits", path=at)
        b.keep(logits)
        suppress = tuple(sorted(target.head.suppress_tokens))
        choice = b.one(ArgMax(suppress), logits, label="target.choice", path=at)
        b.emit(WriteRows(), choice, self.choice, label="target.choices")
        b.finish()

    def draft(self) -> None:
        b = ProgramBuilder(self.module, "draft")
        target = self.spec.target
        place = DraftPlace(
            target.width, target.vocab, target.embed.factor(target.width),
            self.state, self.batch, self.forced, self.carry, self.spec.round.confidence.armed,
            partial(self.layer), target.head.tied, len(self.spec.ranks),
        )  # fmt: skip
        self.spec.drafter.build(b, place)
        b.finish()

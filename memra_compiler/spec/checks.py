"""Rules between sections: the drafter must fit the target, the cache must fit the model.

Paths are from the root of the spec. Each rule decides by a declared property, never by a name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from memra_compiler.drafters.base import DrafterParams
from memra_compiler.layers.attention import AttentionParams
from memra_compiler.layers.base import Formats, Stack
from memra_compiler.layers.moe import MoeFfnParams
from memra_compiler.layers.params import Path, Problem
from memra_compiler.layers.query_attention import QueryAttentionParams
from memra_compiler.rounds.policy import RoundPolicy
from memra_compiler.spec.archs import arch_table, known_archs
from memra_compiler.spec.schema import Runtime, Target

#: Elements in a storage block; the rows of a matrix must be whole blocks.
BLOCK_ELEMENTS = {"q8_0": 32, "q4_0": 32, "q4_k": 256, "q5_k": 256, "q6_k": 256}


@dataclass(frozen=True)
class Sections:
    """The sections of one spec that are valid by themselves; the others are None."""

    target: Target | None = None
    drafter: DrafterParams | None = None
    round: RoundPolicy | None = None
    runtime: Runtime | None = None


def check_sections(sections: Sections) -> Iterator[Problem]:
    """Yield what is wrong between the sections that are there."""
    target, drafter = sections.target, sections.drafter
    if target:
        yield from check_arch("target", target.arch)
        yield from _formats(("target",), target, target.width, target.formats)
        yield from _readers(target, ("target",), target, inside=True)
    if drafter:
        yield from check_arch("drafter", drafter.arch)
        yield from _formats(("drafter",), drafter, drafter.width, drafter.formats)
        yield from _no_experts(drafter)
    if target:
        yield from _per_layer(target)
    if drafter:
        for name, kind in drafter.layer_kinds.items():
            if kind.per_layer_input is not None:
                yield Problem(
                    ("drafter", "layer_kinds", name, "per_layer_input"),
                    "a drafter has no per-layer embeddings",
                    label="leave it out",
                    at_key=True,
                )
    if target and drafter:
        yield from _head(target, drafter)
        yield from _readers(target, ("drafter",), drafter, inside=False)
        yield from _clusters(target, drafter)
    if sections.runtime:
        yield from _context(sections.runtime, target, sections.round)
    if sections.runtime and target:
        yield from _cache_rows(sections.runtime, target)


def check_arch(section: str, arch: str) -> Iterator[Problem]:
    """Yield a problem if there is no table for an architecture, or it is not this section's."""
    known = known_archs(section)
    try:
        wrong = arch_table(arch).section != section
    except KeyError:
        close = difflib.get_close_matches(arch, known, n=1)
        yield Problem(
            (section, "arch"),
            f"Memra has no table for the architecture `{arch}`",
            label=f"must be {' or '.join(f'`{name}`' for name in known)}",
            hint=f"did you mean `{close[0]}`?" if close else "",
            code="unknown-value",
        )
        return
    if wrong:
        yield Problem(
            (section, "arch"),
            f"`{arch}` is not the architecture of a {section}",
            label=f"must be {' or '.join(f'`{name}`' for name in known)}",
            code="unknown-value",
        )


def _formats(section: Path, stack: Stack, width: int, formats: Formats) -> Iterator[Problem]:
    """Check that rows are whole blocks of the assumed formats."""
    written = (*section, "formats")
    rows: list[tuple[str, Path, int]] = [
        ("embed", (*section, "width"), width),
        ("matrix", (*section, "width"), width),
    ]
    for name, kind in stack.layer_kinds.items():
        here = (*section, "layer_kinds", name)
        for part, params in (("mixer", kind.mixer), ("ffn", kind.ffn)):
            for path, length in params.row_lengths():
                rows.append(("matrix", (*here, part, params.kind, *path), length))
    for field, path, length in rows:
        storage = getattr(formats, field)
        block = BLOCK_ELEMENTS.get(storage, 1)
        if length % block:
            yield Problem(
                (*written, field),
                f"`{storage}` stores rows in blocks of {block}, but a row here has {length}",
                label=f"{length} is not a multiple of {block}",
                because=((path, f"`{path[-1]}`"),),
                hint="`f16`, `bf16` and `f32` have no blocks",
            )
            return


def _no_experts(drafter: DrafterParams) -> Iterator[Problem]:
    """Check that no layer of a drafter has experts: none was ever trained, and files name none."""
    for name, kind in drafter.layer_kinds.items():
        if isinstance(kind.ffn, MoeFfnParams):
            yield Problem(
                ("drafter", "layer_kinds", name, "ffn", kind.ffn.kind),
                f"layer kind `{name}` of the drafter has experts, which no drafter kind supports",
                label="must be `gated`",
                code="not-supported",
                at_key=True,
            )


def _head(target: Target, drafter: DrafterParams) -> Iterator[Problem]:
    """Check that a drafter that multiplies with the target's head is as wide as the target."""
    head = getattr(drafter, "head", None)
    if getattr(head, "table", "drafter") == "target" and drafter.width != target.width:
        yield Problem(
            ("drafter", "head", "table"),
            f"a drafter of width {drafter.width} cannot multiply with the head of a target of "
            f"width {target.width}",
            label="must be `drafter`",
            because=((("drafter", "width"), "`width`"), (("target", "width"), "`width`")),
        )


def _clusters(target: Target, drafter: DrafterParams) -> Iterator[Problem]:
    """Check that a centroid head shares the vocabulary out evenly."""
    head = getattr(drafter, "head", None)
    centroids = getattr(head, "centroids", None)
    if centroids is not None and target.vocab % centroids.count:
        yield Problem(
            ("drafter", "head", "centroids", "count"),
            f"{centroids.count} clusters cannot share {target.vocab} tokens evenly",
            label=f"must divide vocab = {target.vocab}",
            because=((("target", "vocab"), "`vocab`"),),
        )


def _per_layer(target: Target) -> Iterator[Problem]:
    """Check that per-layer embeddings are there if a layer reads them, and read if they are."""
    readers = [n for n, kind in target.layer_kinds.items() if kind.per_layer_input is not None]
    if readers and target.per_layer_embed is None:
        yield Problem(
            ("target", "layer_kinds", readers[0], "per_layer_input"),
            f"layer kind `{readers[0]}` reads per-layer embeddings, which `target` does not have",
            label="nothing to read",
            hint="declare `target.per_layer_embed`",
            at_key=True,
        )
    if target.per_layer_embed is not None and not readers:
        yield Problem(
            ("target", "per_layer_embed"),
            "no layer kind reads the per-layer embeddings",
            label="never read",
            hint="give the layer kinds that read them `per_layer_input`",
            at_key=True,
        )


def _readers(target: Target, section: Path, stack: Stack, *, inside: bool) -> Iterator[Problem]:
    """Check every layer kind that reads keys and values of a target layer."""
    for name, kind in stack.layer_kinds.items():
        mixer = kind.mixer
        here = (*section, "layer_kinds", name, "mixer", mixer.kind)
        if not isinstance(mixer, QueryAttentionParams):
            if not inside:
                yield Problem(
                    here,
                    f"layer kind `{name}` of the drafter has its own keys and values, which no "
                    "drafter kind supports yet",
                    label="must be `query_attention`",
                    code="not-supported",
                    at_key=True,
                )
            continue
        if inside and mixer.visible_rows is not None:
            yield Problem(
                (*here, "visible_rows"),
                f"`{name}` is a layer of the target, which sees exactly its window",
                label="leave it out",
                hint="another choice would change the text; in a drafter it changes acceptance",
            )
        source = target.layer_kinds.get(mixer.kv_kind)
        if source is None or not isinstance(source.mixer, AttentionParams):
            owners = [k for k, v in target.layer_kinds.items() if v.mixer.owns_kv]
            wrong = "is not a layer kind" if source is None else "has no keys and values of its own"
            yield Problem(
                (*here, "kv_target"),
                f"`{mixer.kv_target}`: `{mixer.kv_kind}` {wrong} in `target`",
                label="no such layers" if source is None else "reads others' itself",
                hint=f"kinds of the target with their own keys and values: {', '.join(owners)}",
            )
            continue
        problems = list(_fits(here, mixer, mixer.kv_kind, source.mixer))
        better = [
            other
            for other, candidate in target.layer_kinds.items()
            if isinstance(candidate.mixer, AttentionParams)
            and not list(_fits(here, mixer, other, candidate.mixer))
        ]
        if len(problems) > 1 and better:  # one wrong name, not that many wrong numbers
            yield Problem(
                (*here, "kv_target"),
                f"`{name}` does not fit the keys of `{mixer.kv_kind}`: "
                f"{', '.join(str(problem.path[-1]) for problem in problems)} differ",
                label="does not fit",
                hint=f"`last_own({better[0]})` fits",
            )
        else:
            yield from problems
        if inside and mixer.kv_kind in target.layers:
            first = target.layers.index(name)
            last = len(target.layers) - 1 - target.layers[::-1].index(mixer.kv_kind)
            if first < last:
                yield Problem(
                    (*here, "kv_target"),
                    f"layer {first} (`{name}`) reads the keys of layer {last} "
                    f"(`{mixer.kv_kind}`), which comes later",
                    label="a later layer",
                    because=((("target", "layers"), "`layers`"),),
                )


def _fits(
    here: Path, reader: QueryAttentionParams, name: str, owner: AttentionParams
) -> Iterator[Problem]:
    """Check one reading mixer against the mixer whose keys and values it reads."""
    at = ("target", "layer_kinds", name, "mixer", owner.kind)
    if reader.head_dim != owner.head_dim:
        yield Problem(
            (*here, "head_dim"),
            f"queries of width {reader.head_dim} cannot meet keys of width {owner.head_dim}",
            label=f"must be {owner.head_dim}, as in `{name}`",
            because=(((*at, "head_dim"), f"`head_dim` of `{name}`"),),
        )
    if reader.heads % owner.kv_heads:
        yield Problem(
            (*here, "heads"),
            f"{reader.heads} query heads cannot share the {owner.kv_heads} key/value heads of "
            f"`{name}` evenly",
            label=f"must be a multiple of {owner.kv_heads}",
            because=(((*at, "kv_heads"), f"`kv_heads` of `{name}`"),),
        )
    pairs: list[tuple[Path, object, object]] = [(("window",), reader.window, owner.window)]
    for field in ("base", "fraction", "factors"):
        pairs.append((("rope", field), getattr(reader.rope, field), getattr(owner.rope, field)))
    for path, ours, theirs in pairs:
        if ours != theirs:
            what = ".".join(map(str, path))
            yield Problem(
                (*here, *path),
                f"`{what}` is {_word(ours)} here, but {_word(theirs)} in `{name}`, whose keys are "
                "read",
                label="leave it out" if theirs is None else f"must be {_word(theirs)}",
                because=(((*at, *path), f"`{path[-1]}` of `{name}`"),),
            )


def _word(value: object) -> str:
    if value is None:
        return "absent"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _context(
    runtime: Runtime, target: Target | None, policy: RoundPolicy | None
) -> Iterator[Problem]:
    context, path = runtime.max_context, ("runtime", "max_context")
    if target and context > target.max_positions:
        yield Problem(
            path,
            f"a context of {context} is longer than the model's {target.max_positions} positions",
            label=f"must be at most {target.max_positions}",
            because=((("target", "max_positions"), "`max_positions`"),),
        )
    if policy and context < policy.depth.max + 2:
        yield Problem(
            path,
            f"a context of {context} cannot hold one round of depth {policy.depth.max}",
            label=f"must be at least {policy.depth.max + 2}",
            because=((("round", "depth", "max"), "`depth.max`"),),
        )


def _cache_rows(runtime: Runtime, target: Target) -> Iterator[Problem]:
    """Check that cached rows are whole blocks."""
    block = BLOCK_ELEMENTS.get(runtime.kv, 1)
    for name, kind in target.layer_kinds.items():
        mixer = kind.mixer
        if isinstance(mixer, AttentionParams) and mixer.head_dim % block:
            here = ("target", "layer_kinds", name, "mixer", mixer.kind, "head_dim")
            yield Problem(
                ("runtime", "kv"),
                f"a `{runtime.kv}` cache stores heads in blocks of {block}, but those of `{name}` "
                f"are {mixer.head_dim} wide",
                label=f"{mixer.head_dim} is not a multiple of {block}",
                because=((here, "`head_dim`"),),
                hint="`f16`, `bf16` and `f32` have no blocks",
            )
            return

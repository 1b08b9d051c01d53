"""Facts of a pipeline as text for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from memra_runtime.cli.app import amount, size

_WIDTH = 100
_SPANS = 4  # spans of layers that are worth listing


def summary_page(facts: Mapping[str, Any]) -> str:
    """One page on a pipeline: layers, wiring, round, memory, cost."""
    target, drafter, memory = facts["target"], facts["drafter"], facts["memory"]
    lines = [f"{facts['name']}  (spec {facts['spec_digest'][:12]})", ""]
    about = f"{_stack(target)}, vocabulary {target['vocab']:,}, {_count(target)}"
    lines += [*_item("target", about), *_kinds(target)]
    wiring = drafter["wiring"]
    lines += _item("drafter", f"{_stack(drafter)}, {wiring['kind']}, {_count(drafter)}")
    lines += _kinds(drafter)
    lines += [f"           {line}" for line in reads_lines(drafter["reads"], target["order"])]
    rest = {key: value for key, value in wiring.items() if key != "kind"}
    lines += ["", *_item("wiring", fields(rest)), *_item("round", _round(facts["round"]))]
    runtime = facts["runtime"]
    context = f"{runtime['max_context']:,} tokens, cached as {runtime['kv']}"
    lines += _item("context", context)
    lines += ["", *_item("arena", _arena(memory))]
    per_source = [f"{name} {size(facts[name]['weight_bytes'])} ({_formats(facts[name])})"
                  for name in ("target", "drafter")]  # fmt: skip
    lines += _item("weights", f"{size(memory['weight_bytes'])} = {' + '.join(per_source)}")
    return "\n".join([*lines, "", *_costs(facts)])


def _item(label: str, text: str, indent: int = 9) -> list[str]:
    first = f"{label:<{indent}}" if len(label) < indent else f"{label} "
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * indent,
                         break_long_words=False)  # fmt: skip


def _stack(section: Mapping[str, Any]) -> str:
    return f"{section['arch']}, {amount(section['layers'], 'layer')} of width {section['width']:,}"


def _count(section: Mapping[str, Any]) -> str:
    every, active = section["parameters"], section["active_parameters"]
    met = "" if active == every else f", of which a token meets {number(active)}"
    return f"{number(every)} parameters{met}"


def number(count: float) -> str:
    """A large number as a person reads it: `1.31 M`, `30.70 B`."""
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if count >= limit:
            return f"{count / limit:,.2f} {unit}"
    return f"{count:,.0f}"


def flops(count: int) -> str:
    """`113.60 Mflop`, `1,234 flop`."""
    for limit, unit in ((1e9, "Gflop"), (1e6, "Mflop")):
        if count >= limit:
            return f"{count / limit:,.2f} {unit}"
    return f"{count:,} flop"


def _kinds(section: Mapping[str, Any]) -> list[str]:
    lines = [f"  order    {order_text(section['order'])}"]
    for kind in section["kinds"]:
        ((mixer, of_mixer),) = kind["mixer"].items()
        ((ffn, of_ffn),) = kind["ffn"].items()
        rest = {key: v for key, v in kind.items() if key not in ("kind", "at", "mixer", "ffn")}
        many = "s" if len(kind["at"]) > 1 else ""
        text = f"layer{many} {spans(kind['at'])}: {mixer} ({fields(of_mixer)}), {ffn} ffn "
        lines += _item(f"  {kind['kind']}", f"{text}({fields(of_ffn)}), {fields(rest)}", 11)
    return lines


def order_text(order: Sequence[str]) -> str:
    """`10 x (5 swa, 1 full)`: the order of layers with its shortest period."""
    total = len(order)
    period = next(
        n for n in range(1, total + 1) if total % n == 0 and list(order[:n]) * (total // n) == order
    )
    runs = [f"{len(list(group))} {name}" for name, group in groupby(order[:period])]
    text = ", ".join(runs)
    return text if period in (total, 1) else f"{total // period} x ({text})"


def spans(numbers: Sequence[int]) -> str:
    """`0-4, 6-10` for the numbers 0 to 4 and 6 to 10; many spans are cut short."""
    groups: list[list[int]] = []
    for value in numbers:
        if groups and value == groups[-1][1] + 1:
            groups[-1][1] = value
        else:
            groups.append([value, value])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in groups]
    if len(texts) > _SPANS:
        texts = [*texts[: _SPANS - 1], "...", texts[-1]]
    return ", ".join(texts)


def fields(value: Any) -> str:
    """Nested fields on one line; what is not set is left out."""
    if isinstance(value, Mapping):
        parts = []
        for key, item in value.items():
            if item is None or item == [] or item is False:
                continue
            if item is True:
                parts.append(str(key))
            elif isinstance(item, Mapping):
                parts.append(f"{key} ({fields(item)})")
            else:
                parts.append(f"{key} {fields(item)}")
        return ", ".join(parts)
    if isinstance(value, list | tuple):
        return " + ".join(fields(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def reads_lines(reads: Sequence[Mapping[str, Any]], order: Sequence[str]) -> list[str]:
    """`drafter layers 0-2 (swa) read target layer 4 (swa)`, a line a target layer."""
    lines = []
    for target, group in groupby(reads, key=lambda read: read["target_layer"]):
        members = list(group)
        many = len(members) > 1
        kinds = ", ".join(dict.fromkeys(m["kind"] for m in members))
        lines.append(
            f"drafter layer{'s' if many else ''} {spans([m['layer'] for m in members])} ({kinds}) "
            f"read{'' if many else 's'} target layer {target} ({order[target]})"
        )
    return lines


def _round(policy: Mapping[str, Any]) -> str:
    depth = policy["depth"]
    text = f"drafts up to {amount(depth['max'], 'token')}, the first round {depth['initial']}"
    if depth["policy"] == "accepted_plus_one":
        floor = depth["floor"]
        text += f", then as many as were accepted plus one, but at least {floor['short']}"
        if floor["short"] != floor["deep"]:
            text += f" below {floor['boundary']:,} tokens and {floor['deep']} from there"
    else:
        text += f", then {depth['policy']}"
    return f"{text}; {_doubt(policy['confidence'])}accepts {policy['accept']}"


def _doubt(confidence: Mapping[str, Any]) -> str:
    """What confidence gates do, where any is armed."""
    parts, cut = [], confidence["in_round"]
    if cut["when"] != "never":
        rounds = "" if cut["when"] == "always" else " in deep contexts after a miss"
        fate = "keeps" if cut["doubtful"] == "keep" else "drops"
        first = ", even the first" if confidence["first"] == "may_skip" else ""
        parts.append(f"ends a chain below confidence {cut['threshold']:g}{rounds} and {fate} that "
                     f"draft{first}; ")  # fmt: skip
    if confidence["next_round"] > 0:
        parts.append(f"bounds the next depth by confidence {confidence['next_round']:g}; ")
    return "".join(parts)


def _arena(memory: Mapping[str, int]) -> str:
    return (
        f"{size(memory['arena_bytes'])} = keys and values {size(memory['cache_bytes'])} + state "
        f"{size(memory['state_bytes'])} + working memory {size(memory['working_bytes'])}, "
        "which the programs share"
    )


def _formats(section: Mapping[str, Any]) -> str:
    return ", ".join(section["formats"])


def _costs(facts: Mapping[str, Any]) -> list[str]:
    programs = {p["program"]: p for p in facts["programs"]}
    shown = {
        "plain step": programs["plain_step"],
        "draft step": programs["draft"],
        f"verify ({amount(programs['verify']['rows'], 'row')})": programs["verify"],
    }
    lines = ["in one call, with a full context:"]
    lines += [
        f"  {label:<18}moves {size(cost['bytes'])}, {flops(cost['flops'])}"
        for label, cost in shown.items()
    ]
    depth = facts["round"]["depth"]["max"]
    moved = programs["verify"]["bytes"] + depth * programs["draft"]["bytes"]
    ratio = moved / programs["plain_step"]["bytes"]
    need = max(0.0, (ratio - 1) / depth)
    pays = f"it pays from {need:.0%} acceptance on" if need <= 1 else "it cannot pay"
    lines.append(f"  {f'round of depth {depth}':<18}moves {size(moved)} = {ratio:.2f} plain steps;")
    return [*lines, f"  {'':<18}where bytes decide the time, {pays}"]

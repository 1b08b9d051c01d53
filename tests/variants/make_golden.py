"""Make `tests/golden/variants/*.npz`: what transformers computes from the tiny variants.

    python make_golden.py [NAME...]        needs torch and transformers, which Memra does not

Everything is float32 on the CPU. The assistant is called directly with exactly the N committed
rows (and for windowed layers the last `WINDOW - 1` of them): transformers' own generator hands it
a row too many after a rejection, and does not cut windows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from variant_models import DRAFTS, FULL, GOLDEN, GREEDY, SWA, VARIANTS, WINDOW, Variant

#: A smaller gap between the two best logits would let another correct order of sums choose
#: otherwise; change the variant's seed then.
LEAST_MARGIN = 2e-3


def load(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    cls = getattr(transformers, name)
    model, info = cls.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    lost = {key: value for key, value in info.items() if value}
    assert not lost, lost
    return model.eval()


def rows(model: Any, ids: list[int]) -> Any:
    """The model on all rows at once, without a cache."""
    return model(
        input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True,
        return_shared_kv_states=True,
    )  # fmt: skip


def masked(logits: torch.Tensor, suppress: tuple[int, ...]) -> torch.Tensor:
    logits = logits.clone()
    logits[..., list(suppress)] = -torch.inf
    return logits


def greedy(model: Any, variant: Variant) -> tuple[list[int], float, int]:
    """The continuation, its least margin, and how often a suppressed token would have won."""
    ids, margins, would_win = variant.prompt(), [], 0
    for _ in range(GREEDY):
        last = rows(model, ids).logits[0, -1]
        would_win += int(last.argmax()) in variant.suppress
        best = masked(last, variant.suppress).topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids, min(margins), would_win


def drafts(assistant: Any, model: Any, variant: Variant, full_head: bool) -> dict[str, np.ndarray]:
    """The first round's chain: tokens, logits, what is carried on, and the margins."""
    prompt = variant.prompt()
    out = rows(model, prompt)
    committed = len(prompt)
    states = out.shared_kv_states
    kv = {
        FULL: tuple(s[:, :, :committed] for s in states[FULL]),
        SWA: tuple(s[:, :, committed - (WINDOW - 1) : committed] for s in states[SWA]),
    }
    embed = model.get_input_embeddings()
    token = int(masked(out.logits[0, -1], variant.suppress).argmax())
    hidden = out.hidden_states[-1][:, -1:]
    position = torch.tensor([[committed]])  # every step asks from the pending token's position
    assistant.config.use_ordered_embeddings = variant.centroids is not None and not full_head
    tokens, logits, carries, margins = [], [], [], []
    for _ in range(DRAFTS):
        x = torch.cat([embed(torch.tensor([[token]])), hidden], dim=-1)
        step = assistant(inputs_embeds=x, position_ids=position, shared_kv_states=kv)
        hidden = step.last_hidden_state
        row = step.logits[0, -1]
        best = row.topk(2)
        token = int(best.indices[0])
        tokens.append(token)
        margins.append(float(best.values[0] - best.values[1]))
        logits.append(row.numpy())
        carries.append(hidden[0, 0].numpy())
    assert min(margins) > LEAST_MARGIN, f"{variant.name}: draft margin {min(margins)}"
    return {"drafts": np.array(tokens), "draft_logits": np.array(logits),
            "draft_carry": np.array(carries)}  # fmt: skip


def make(variant: Variant) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        model = load(variant.write_target(Path(temporary) / "target"))
        assistant = load(variant.write_draft(Path(temporary) / "draft"))
        ids, margin, would_win = greedy(model, variant)
        assert margin > LEAST_MARGIN, f"{variant.name}: margin {margin}"
        assert bool(would_win) == bool(variant.suppress), variant.name
        out = rows(model, ids)
        found = {
            "ids": np.array(ids),
            "logits": out.logits[0].numpy(),
            "hidden": out.hidden_states[-1][0].numpy(),
            "margin": np.array(margin),
            **drafts(assistant, model, variant, full_head=True),
        }
        for short, kind in (("swa", SWA), ("full", FULL)):
            keys, values = out.shared_kv_states[kind]
            found[f"k_{short}"], found[f"v_{short}"] = keys[0].numpy(), values[0].numpy()
        if variant.centroids:
            chain = drafts(assistant, model, variant, full_head=False)
            found |= {f"centroid_{name}": values for name, values in chain.items()}
            assert found["centroid_drafts"].tolist() != found["drafts"].tolist(), "heads agree"
    different = len(set(ids[-GREEDY:]))
    print(f"{variant.name}: margin {margin:.3g}, {different} different tokens of {GREEDY}")
    return found


def main(names: list[str]) -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in names or VARIANTS:
        variant = VARIANTS[name]
        origin = {
            "transformers": transformers.__version__, "torch": torch.__version__,
            "script": "tests/variants/make_golden.py", "seed": variant.seed,
        }  # fmt: skip
        found = make(variant)
        for key, values in found.items():
            if values.dtype == np.int64:
                found[key] = values.astype(np.int32)
        np.savez_compressed(GOLDEN / f"{name}.npz", origin=np.array(json.dumps(origin)), **found)


if __name__ == "__main__":
    main(sys.argv[1:])

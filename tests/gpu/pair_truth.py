"""What the CPU target says of the bundled pair, for the GPU to be compared with.

usage: python tests/gpu/pair_truth.py OUT.npz   (needs TVM; run where the tests are run)

Stores, in the int8 class with f16 caches, the greedy tokens of each golden prompt, and the logits
and hidden row of every step along the first of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.model import load_model
from memra_runtime.session import Session

ROOT = Path(__file__).parents[2]
TINY = ROOT / "model_specs" / "tiny"
GOLDEN = ROOT / "tests" / "golden" / "gemma4" / "gemma4_tiny_golden.json"
OVERRIDES = {"runtime.activations": "int8", "runtime.kv": "f16"}
NEW_TOKENS = 96


def main(out: Path) -> None:
    """Compute and store."""
    with tempfile.TemporaryDirectory() as folder:
        done = compile_spec(
            TINY / "gemma4_tiny.yaml", Path(folder) / "a.memra", CompileOptions(overrides=OVERRIDES)
        )
        model = load_model(
            done.folder, TINY / "gemma4-tiny-q8_0.gguf", TINY / "gemma4-tiny-assistant-q8_0.gguf"
        )
    session = Session(model.device)
    cases = json.loads(GOLDEN.read_text())["cases"]
    stored: dict[str, np.ndarray] = {}
    for i, case in enumerate(cases):
        session.prime(case["ids"], NEW_TOKENS)
        tokens, logits = [], []
        for _ in range(NEW_TOKENS):
            tokens.append(session.pending)
            logits.append(model.device.value("plain_step", "target.logits")[0].copy())
            session.step("plain")
        stored[f"ids{i}"], stored[f"tokens{i}"] = np.array(case["ids"]), np.array(tokens)
        top = np.sort(np.array(logits), axis=1)[:, -2:]
        stored[f"margins{i}"] = top[:, 1] - top[:, 0]
        if i == 0:
            stored["logits0"] = np.array(logits)
    np.savez_compressed(out, **stored)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The bundled pair on a GPU: against the CPU target's numbers, and through every check.

usage: python tests/gpu/pair_check.py ARTIFACT TRUTH.npz   (TRUTH from pair_truth.py)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from memra_runtime.check import Options, run_checks
from memra_runtime.model import load_model
from memra_runtime.session import Policy, Session

ROOT = Path(__file__).parents[2]
TINY = ROOT / "model_specs" / "tiny"


def compare(session: Session, truth: dict[str, np.ndarray]) -> None:
    """Print how far the GPU's logits and tokens are from the CPU's."""
    device = session.device
    worst, cases = 0.0, sum(name.startswith("ids") for name in truth)
    for i in range(cases):
        tokens, margins = truth[f"tokens{i}"], truth[f"margins{i}"]
        session.prime([int(t) for t in truth[f"ids{i}"]], len(tokens))
        for step, token in enumerate(tokens):
            if i == 0:
                ours = device.value("plain_step", "target.logits")[0]
                worst = max(worst, float(np.abs(ours - truth["logits0"][step]).max()))
            if session.pending != token:
                print(f"case {i}: token {step} differs, margin {margins[step]:.4f}")
                break
            session.step("plain")
        else:
            print(f"case {i}: {len(tokens)} tokens equal, least margin {margins.min():.4f}")
    print(f"logits: largest difference {worst:.2e} along case 0")


def speed(session: Session, ids: list[int]) -> None:
    """Print plain and speculative speed."""
    policy = Policy.of(session.device.manifest)
    for name, sequence, depth in (("plain", "plain", 0), ("depth 5", "round", policy.cap)):
        timed = Session(session.device, policy.fixed(depth))
        for _ in range(2):
            timed.prime(ids, 200)
            start = time.perf_counter()
            count = len(list(timed.generate(200, sequence=sequence)))
            took = time.perf_counter() - start
        s = timed.stats
        print(f"{name}: {count / took:.0f} tok/s, {1e3 * took / max(s.rounds, 1):.3f} ms a round, "
              f"{s.tokens_per_round:.2f} tokens a round")  # fmt: skip


def main(artifact: Path, truth: Path) -> int:
    """Run everything; 0 if all checks passed."""
    start = time.perf_counter()
    model = load_model(
        artifact, TINY / "gemma4-tiny-q8_0.gguf", TINY / "gemma4-tiny-assistant-q8_0.gguf"
    )
    print(f"loaded in {time.perf_counter() - start:.2f} s")
    session = Session(model.device)
    loaded = dict(np.load(truth))
    compare(session, loaded)
    speed(session, [int(t) for t in loaded["ids0"]])
    report = run_checks(model, Options(quick=True), lambda *_: None)
    print(report.render())
    device = model.device
    print(f"graph launches {getattr(device, 'launches', 0)}, reads {getattr(device, 'reads', 0)}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""Compile and run the tiny variants beside what transformers computed from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from golden_support import batch_logits, fixed_session, relative_error, step_logits
from variant_models import DRAFTS, FULL, GOLDEN, GREEDY, PROMPT, SWA, VARIANTS, Variant

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.device import Device
from memra_runtime.model import load_model
from memra_runtime.session import Session

SPECS = Path(__file__).parent / "specs"

#: Variants that have a spec here.
RUNNING = tuple(name for name in VARIANTS if (SPECS / f"{name}.yaml").is_file())

#: Whose drafts are compared: those of the centroid head where a variant's spec has one.
HEADS = {name: "centroid_" for name, variant in VARIANTS.items() if variant.centroids}

#: Allowed error of float32 arithmetic against transformers' float32, relative to the largest value.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Golden:
    """What transformers computed; see `make_golden.py`."""

    variant: Variant
    arrays: Mapping[str, np.ndarray]

    @property
    def ids(self) -> list[int]:
        return [int(i) for i in self.arrays["ids"]]

    @property
    def greedy(self) -> list[int]:
        return self.ids[PROMPT:]


@dataclass(frozen=True)
class Files:
    """The weight files of a variant."""

    target: Path
    draft: Path


def read_golden(name: str) -> Golden:
    """The golden of a variant, which must be of the weights that are made today."""
    with np.load(GOLDEN / f"{name}.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    assert json.loads(str(arrays["origin"]))["seed"] == VARIANTS[name].seed
    return Golden(VARIANTS[name], arrays)


def write_files(name: str, folder: Path) -> Files:
    """The two Hugging Face folders of a variant."""
    variant = VARIANTS[name]
    return Files(variant.write_target(folder / "target"), variant.write_draft(folder / "draft"))


def compile_variant(
    name: str,
    files: Files,
    folder: Path,
    cache: Path,
    overrides: Mapping[str, str] | None = None,
    target: str = "cpu",
) -> Path:
    """Compile `specs/NAME.yaml`; returns the artifact's folder."""
    options = CompileOptions(target, files.target, files.draft, overrides or {}, cache)
    return compile_spec(SPECS / f"{name}.yaml", folder, options).folder


def load_variant(folder: Path, files: Files) -> Device:
    """The device of an artifact with the files it was compiled for."""
    return load_model(folder, files.target, files.draft).device


def check_rows(device: Device, golden: Golden, width: int) -> None:
    """Logits, post-norm hidden, and a layer of each kind's keys and values, `width` rows a time."""
    session = fixed_session(device, DRAFTS)
    ids = golden.ids
    logits, hidden = step_logits(session, ids) if width == 1 else batch_logits(session, ids, width)
    assert relative_error(logits, golden.arrays["logits"]) < TOLERANCE
    assert relative_error(hidden, golden.arrays["hidden"]) < TOLERANCE
    for short, kind in (("swa", SWA), ("full", FULL)):
        layer = golden.variant.last_own(kind)
        for part in "kv":
            plane = np.asarray(device.plane(f"target.layers.{layer}.{part}"))  # [heads, rows, d]
            kept = np.arange(max(0, len(ids) - plane.shape[1]), len(ids))
            want = golden.arrays[f"{part}_{short}"][:, kept]
            got = plane[:, kept % plane.shape[1]]
            assert relative_error(got, want) < TOLERANCE, (part, kind)


def check_greedy(device: Device, golden: Golden) -> None:
    """The plain continuation, token for token."""
    session = fixed_session(device, 0)
    session.prime(golden.ids[:PROMPT], GREEDY)
    assert list(session.generate(GREEDY)) == golden.greedy


def check_first_round(device: Device, golden: Golden, prefix: str = "") -> None:
    """The drafts of the first round, and what the last step would carry on."""
    session = fixed_session(device, DRAFTS)
    session.prime(golden.ids[:PROMPT], GREEDY)
    device.launch("run_begin")
    for step in range(DRAFTS):
        device.launch("run_draft")
        assert int(device.plane("batch")[1 + step]) == golden.arrays[f"{prefix}drafts"][step]
        want = golden.arrays[f"{prefix}draft_carry"][step]
        assert relative_error(np.asarray(device.plane("carry")), want) < TOLERANCE


def forced_plans(greedy: Sequence[int], vocab: int) -> Iterator[tuple[str, list[int]]]:
    """What drafts are made to be: the drafter's own, all right, or wrong here and there."""
    yield "free", [-1] * len(greedy)
    yield "right", list(greedy)
    for every in (2, 3, 5):
        wrong = [(t + 1) % vocab if i % every == 0 else t for i, t in enumerate(greedy)]
        yield f"one in {every} wrong", wrong


def check_speculative_text(device: Device, prompt: Sequence[int], depths: Sequence[int]) -> None:
    """Speculative text is the plain text at every depth, whatever is drafted.

    The plain run is the device's own, so this holds for every numeric class.
    """
    plain = _text(fixed_session(device, 0), prompt)
    for depth in depths:
        accepted = set()
        for name, plan in forced_plans(plain, VARIANTS["31b"].target_config()["vocab_size"]):
            session = fixed_session(device, depth)
            assert _text(session, prompt, plan) == plain, (depth, name)
            accepted.add(session.stats.accepted)
        assert len(accepted) > 1, "no plan accepted more than another"


def _text(session: Session, prompt: Sequence[int], plan: Sequence[int] = ()) -> list[int]:
    session.prime(prompt, GREEDY)
    forced = session.device.plane("forced")
    forced[len(prompt) : len(prompt) + len(plan)] = plan
    return list(session.generate(GREEDY))

"""The bundled pair, compiled for a GPU, with what the CPU target says of it: `build/gpu`.

`tests/gpu/build.py` makes it where TVM is installed; a GPU machine needs no TVM to use it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_support import BF16, QUANTISED, SPEC, Pair
from pair_truth import STEPS, STRIDE

from memra_runtime.model import Model, load_opened, open_model
from memra_runtime.session import Policy, Session

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu"
INDEX = FOLDER / "bundle.json"
#: Values of `runtime.activations`, each tested with every file; the default comes first.
CLASSES = ("f32", "int8", "bf16")
#: Values of `runtime.kv`; those after the first are not tested in every class.
KV = ("f16", "bf16", "f32", "q8_0")
PAIRS = {**QUANTISED, "bf16": BF16}
#: Depth of the deepest round.
DEPTH = 7


@dataclass(frozen=True)
class Variant:
    """One way to compile the pair."""

    activations: str
    kv: str = KV[0]
    files: str = "q8_0"
    #: Whether the gates on the drafter's confidence are armed.
    gates: bool = False
    #: The drafter's head holds few tokens, at random, and rows to spare.
    trimmed: bool = False

    @property
    def name(self) -> str:
        kind = "-gates" * self.gates + "-trimmed" * self.trimmed
        return f"{self.activations}-{self.kv}-{self.files}{kind}"

    @property
    def pair(self) -> Pair:
        return PAIRS[self.files]

    @property
    def overrides(self) -> dict[str, str]:
        """Fields of the spec that differ from the bundled one."""
        trim = {"drafter.head.trim": f"{{ranks: {POOR_RANKS}, spare: 200}}"}
        armed = {"next_round": "0.2", "in_round.threshold": "0.5", "in_round.when": "always"}
        gates = {f"round.confidence.{name}": value for name, value in armed.items()}
        return {
            "runtime.activations": self.activations,
            "runtime.kv": self.kv,
            "round.depth.max": str(DEPTH),
            **(gates if self.gates else {}),
            **(trim if self.trimmed else {}),
        }

    @property
    def artifact(self) -> Path:
        return FOLDER / f"{self.name}.memra"

    @property
    def truth(self) -> Path:
        """A head changes drafts, and nothing else: the truth is that of the whole one."""
        return FOLDER / f"{replace(self, trimmed=False).name}.npz"


#: What the head of `trimmed` knows: too few tokens for a text.
POOR_RANKS, POOR_TOKENS = FOLDER / "poor_ranks.txt", 256


def write_poor_ranks() -> None:
    """Write the ranks file of `trimmed`."""
    ids = np.random.default_rng(1).permutation(4096)[:POOR_TOKENS]
    POOR_RANKS.write_text("".join(f"{i}\n" for i in ids), encoding="ascii")


#: A variant a class, for the tests that take long.
MAIN = [Variant(activations) for activations in CLASSES]
#: With the gates armed.
GATED = Variant("int8", gates=True)
VARIANTS = [
    *MAIN,
    GATED,
    *(Variant(a, files=files) for files in QUANTISED if files != "q8_0" for a in CLASSES),
    *(Variant(a, files="bf16") for a in CLASSES if a != "int8"),  # int8 gives them bf16 rows
    *(Variant("int8", kv) for kv in KV[1:]),
    Variant("f32", "f32"),
]
TRIMMED = [replace(variant, trimmed=True) for variant in MAIN]


def facts(arch: str) -> dict[str, Any]:
    """What a bundle for `arch` is made of; one that was made of other things is stale."""
    digest = hashlib.sha256(SPEC.read_bytes())
    for folder in ("memra_compiler", "templates", "schedules", "tests/variants"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".j2", ".cuh", ".jsonl", ".yaml"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    variants = [variant.name for variant in (*VARIANTS, *TRIMMED)]
    return {"arch": arch, "variants": variants, "truth": [STEPS, STRIDE],
            "sources": digest.hexdigest()}  # fmt: skip


def problem(arch: str) -> str:
    """Why the bundle cannot be used on a GPU of `arch`, and what to do; empty if it can."""
    make = (
        f"make it where TVM is installed, and carry the folder here:\n  make gpu-bundle ARCH={arch}"
    )
    if not INDEX.is_file():
        return f"{FOLDER.relative_to(ROOT)} holds no bundle; {make}"
    found, wanted = json.loads(INDEX.read_text(encoding="utf-8")), facts(arch)
    other = [name for name, value in wanted.items() if found.get(name) != value]
    if other:
        return f"{FOLDER.relative_to(ROOT)} was made of other {', '.join(other)}; {make}"
    return ""


@dataclass(frozen=True)
class Loaded:
    """A model and what the CPU target said of it."""

    variant: Variant
    model: Model
    truth: dict[str, np.ndarray]

    @property
    def target(self) -> str:
        """`cpu` or `cuda`."""
        return self.model.manifest.target.partition(":")[0]

    @property
    def name(self) -> str:
        return f"{self.target} {self.variant.name}"

    @property
    def device(self) -> Any:
        return self.model.device

    def session(self, depth: int | None = None) -> Session:
        """A session of fixed depth, or of the spec's policy."""
        policy = Policy.of(self.model.manifest)
        return Session(self.device, policy if depth is None else policy.fixed(depth))

    def prompts(self) -> list[list[int]]:
        """The golden prompts."""
        count = sum(name.startswith("ids") for name in self.truth)
        return [[int(t) for t in self.truth[f"ids{i}"]] for i in range(count)]


def on_devices(variants: Sequence[Variant]) -> list[Any]:
    """Parameters of the fixture `pair`: the CPU target, and variants on a GPU."""
    return ["cpu", *on_gpu(variants)]


def on_gpu(variants: Sequence[Variant]) -> list[Any]:
    """Parameters of the fixture `pair`: variants on a GPU."""
    return [pytest.param(v, marks=pytest.mark.gpu, id=v.name) for v in variants]


@functools.cache
def load(variant: Variant) -> Loaded:
    """A variant of the bundle on the GPU, loaded once a run."""
    opened = open_model(variant.artifact, variant.pair.target, variant.pair.draft)
    with np.load(variant.truth) as stored:
        truth = dict(stored)
    return Loaded(variant, load_opened(opened), truth)

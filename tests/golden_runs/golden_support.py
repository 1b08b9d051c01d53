"""What the golden runs share: the goldens, compiled pairs, and a device that is the interpreter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memra_compiler.compile import Compiled, CompileOptions, compile_spec, load, lower
from memra_compiler.interpret import Interpreter, load_weights
from memra_runtime.artifact import Manifest, slot
from memra_runtime.model import Model, load_model
from memra_runtime.session import Policy, Session

TESTS = Path(__file__).parent.parent
DATA = TESTS / "data"
GOLDEN = TESTS / "golden" / "gemma4"
TINY = TESTS.parent / "model_specs" / "tiny"
SPEC = TINY / "gemma4_tiny.yaml"

#: Below this gap between the two best logits, another correct float32 order may choose otherwise.
NEAR_TIE = 0.01


@dataclass(frozen=True)
class Pair:
    """The two weight files of a run."""

    target: Path
    draft: Path


BF16 = Pair(DATA / "gemma4-tiny", DATA / "gemma4-tiny-assistant")
_DRAFT = TINY / "gemma4-tiny-assistant-q8_0.gguf"
QUANTISED = {
    "q8_0": Pair(TINY / "gemma4-tiny-q8_0.gguf", _DRAFT),
    "q4_0": Pair(DATA / "gemma4-tiny-q4_0.gguf", _DRAFT),
    "q4_k_m": Pair(DATA / "gemma4-tiny-q4_k_m.gguf", _DRAFT),
    "q6_k": Pair(DATA / "gemma4-tiny-q6_k.gguf", _DRAFT),
}


@dataclass(frozen=True)
class Round:
    """One round of the golden: the drafts and how many the target agreed with."""

    drafts: list[int]
    accepted: int


@dataclass(frozen=True)
class Case:
    """One prompt of the golden with everything that follows it."""

    prompt: str
    ids: list[int]
    greedy: list[int]
    margin_min: float
    rounds_k5: list[Round]
    first_round_advancing: list[int]


def read_cases() -> list[Case]:
    """The cases of `gemma4_tiny_golden.json`."""
    text = (GOLDEN / "gemma4_tiny_golden.json").read_text(encoding="utf-8")
    return [
        Case(**case | {"rounds_k5": [Round(**r) for r in case["rounds_k5"]]})
        for case in json.loads(text)["cases"]
    ]


def compile_pair(
    pair: Pair, folder: Path, cache: Path, overrides: Mapping[str, str] | None = None
) -> Compiled:
    """Compile the tiny spec for a pair of weight files."""
    return compile_spec(SPEC, folder, options_of(pair, cache, overrides))


def options_of(
    pair: Pair, cache: Path, overrides: Mapping[str, str] | None = None, target: str = "cpu"
) -> CompileOptions:
    return CompileOptions(target, pair.target, pair.draft, overrides or {}, cache)


def load_pair(pair: Pair, compiled: Compiled) -> Model:
    """Load what `compile_pair` wrote."""
    return load_model(compiled.folder, pair.target, pair.draft)


def interpret_pair(pair: Pair, overrides: Mapping[str, str] | None = None) -> Interpreter:
    """The reference interpreter of the planned module, on dequantised weights."""
    spec, files = load(SPEC, options_of(pair, Path("unused"), overrides))
    module = lower(spec, files)
    assert files.target is not None
    assert files.drafter is not None
    return Interpreter(module, load_weights(module, files.target, files.drafter))


class InterpreterDevice:
    """The interpreter behind a device's interface, so that a `Session` can drive it."""

    def __init__(self, interpreter: Interpreter, manifest: Manifest) -> None:
        self.interpreter, self.manifest = interpreter, manifest
        self.texts = 0
        self.state: npt.NDArray[np.int32] = interpreter.planes["state"]

    def plane(self, name: str) -> np.ndarray:
        return self.interpreter.planes[name]

    def value(self, program: str, name: str) -> np.ndarray:
        return self.interpreter.values[program][name]

    def launch(self, name: str) -> None:
        self.interpreter.run(name.removeprefix("run_"))

    def get(self, counter: str) -> int:
        return int(self.state[slot(counter)])

    def put(self, counters: Mapping[str, int]) -> None:
        self.interpreter.put(**counters)


def fixed_session(device: object, depth: int) -> Session:
    """A session of fixed depth on a device (or on the interpreter as one)."""
    policy = Policy.of(device.manifest).fixed(depth)  # type: ignore[attr-defined]
    return Session(device, policy)  # type: ignore[arg-type]


def margin(logits: np.ndarray) -> float:
    """The gap between the two best logits of a row."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


@dataclass(frozen=True)
class Difference:
    """The first place where a run leaves its golden."""

    step: int
    got: object
    want: object
    margin: float

    def __str__(self) -> str:
        return f"step {self.step}: got {self.got}, golden {self.want}, margin {self.margin:.2g}"


def follow_greedy(session: Session, case: Case, tokens: int) -> tuple[Difference | None, float]:
    """Decode plainly along the golden; returns the first difference and the least margin seen."""
    session.prime(case.ids, tokens)
    least = np.inf
    for step, want in enumerate(case.greedy[:tokens]):
        gap = margin(session.device.value("plain_step", "target.logits")[0])
        least = min(least, gap)
        if session.pending != want:
            return Difference(step, session.pending, want, gap), least
        session.step("plain")
    return None, least


def follow_rounds(
    session: Session, case: Case, rounds: int | None = None, sequence: str = "round"
) -> Difference | None:
    """Run rounds of depth 5 along the golden; returns the first that drafts or accepts otherwise.

    The margin of the difference is the least of the verified rows: what could have turned a round.
    """
    session.prime(case.ids, len(case.greedy))
    for step, want in enumerate(case.rounds_k5[:rounds]):
        session.step(sequence)
        device = session.device
        got = Round(device.plane("batch")[1:6].tolist(), device.get("accepted"))
        if got != want:
            rows = device.value("verify", "target.logits")[:6]
            return Difference(step, got, want, min(margin(row) for row in rows))
    return None


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


def step_logits(session: Session, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and post-norm hidden of every row of `ids`, each computed by a plain step."""
    session.prime(ids[:1], len(ids) + 1)
    logits, hidden = [], []
    for following in [*ids[1:], None]:
        logits.append(session.device.value("plain_step", "target.logits")[0].copy())
        hidden.append(session.device.plane("verified")[0].copy())
        if following is not None:
            session.device.put({"pending": following})
            session.step("plain")
    return np.array(logits), np.array(hidden)


def batch_logits(session: Session, ids: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The same, computed by `verify` in batches of `width` rows."""
    session.prime(ids[:1], len(ids))
    device = session.device
    logits, hidden = [], []
    for at in range(0, len(ids), width):
        part = ids[at : at + width]
        device.plane("batch")[: len(part)] = part
        device.put({"position": at, "rows": len(part)})
        device.launch("run_verify")
        logits.append(device.value("verify", "target.logits")[: len(part)].copy())
        hidden.append(device.plane("verified")[: len(part)].copy())
    return np.concatenate(logits), np.concatenate(hidden)

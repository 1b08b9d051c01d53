"""Time rounds and their programs, again and again from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import RING_TOKENS, Manifest, slot
from memra_runtime.bench.costs import cost, program
from memra_runtime.bench.measure import Floor, Times, seconds
from memra_runtime.bench.results import (
    ContextResult,
    Counted,
    Fit,
    ForcedResult,
    ProgramResult,
    RoundResult,
)
from memra_runtime.bench.timers import COLUMNS, Timer
from memra_runtime.errors import fail
from memra_runtime.session import Session

#: Runs of each thing before the first that counts.
WARM = 3


class RoundClock:
    """Rounds at one position of one text. Every run starts from the state of a primed session.

    A round writes only rows past the committed ones, so putting back the device block and the
    carried hidden row repeats exactly the same work.
    """

    def __init__(self, session: Session, timer: Timer) -> None:
        self.session, self.device, self.timer = session, session.device, timer
        self.cap = session.policy.cap
        self.context = session.position
        self._saved = {n: self.device.plane(n).copy() for n in ("state", "hidden")}
        self.whole: dict[str, list[float]] = {}
        self.parts: dict[str, dict[str, list[float]]] = {}

    def restore(self, depth: int) -> None:
        for name, values in self._saved.items():
            self.device.plane(name)[...] = values
        self.device.put({"depth": depth, "doubt": 0})  # that many drafts, however doubtful

    def verifying(self) -> None:
        """Restore the state in which the deepest round has drafted and is about to verify."""
        self.restore(self.cap)
        self.device.put({"rows": self.cap + 1, "drafted": self.cap, "step": 0})

    def move(self, position: int) -> None:
        """Go on as if `position` tokens were committed; see `fill_caches`."""
        self.context = position
        self._saved["state"][slot("position")] = position

    def sweep(self, repeat: int) -> None:
        """Time every depth and the plain step, whole and program by program, interleaved."""
        settings = [("plain", 0)] + [("round", k) for k in range(self.cap + 1)]
        for i in range(WARM + repeat):
            for sequence, depth in settings:
                self._time(sequence, depth, keep=i >= WARM)

    def _time(self, sequence: str, depth: int, *, keep: bool) -> None:
        key = f"{sequence} {depth}"
        whole = self._launch(sequence, depth)
        self.restore(depth)
        spent = self.timer.parts(sequence, depth)
        if keep:
            self.whole.setdefault(key, []).append(whole)
            for name, times in spent.items():
                self.parts.setdefault(key, {}).setdefault(name, []).extend(times)

    def _launch(self, sequence: str, depth: int) -> float:
        """Seconds of a sequence launched whole, as the host waits for it."""
        self.restore(depth)
        return seconds(lambda: self.device.launch(sequence))

    def times(self, sequence: str, depth: int, repeat: int) -> Times:
        """Time a sequence launched whole."""
        return Times.of([self._launch(sequence, depth) for _ in range(WARM + repeat)][WARM:])

    def counted(self, rounds: int = 8) -> Counted:
        """Count the launches and host reads of rounds launched whole."""
        launches = reads = 0
        for _ in range(rounds):
            self.restore(self.cap)
            launches, reads = launches - self.device.launches, reads - self.device.reads
            self.device.launch("round")
            launches, reads = launches + self.device.launches, reads + self.device.reads
        return Counted(launches / rounds, reads / rounds)

    def prefill(self, ids: Sequence[int], repeat: int) -> list[float]:
        """Time a chunk of the prompt, appended behind the committed rows."""
        rows = min(program(self.device.manifest, "prefill").rows, len(ids))
        found = []
        for _ in range(WARM + repeat):
            self.restore(0)
            self.device.plane("prompt")[:rows] = ids[:rows]
            self.device.put({"rows": rows})
            found.append(seconds(lambda: self.device.launch("prefill")))
        self.restore(0)
        return found[WARM:]

    def plain(self) -> Times:
        return Times.of(self.whole["plain 0"])

    def forced(self, tokens: Sequence[int], repeat: int) -> dict[int, list[float]]:
        """Time rounds of the largest depth by accepted drafts; `tokens` is the plain stream.

        tokens[0] is the pending token, so draft j should be tokens[j].
        """
        plane, vocab = self.device.plane("forced"), self.session.vocab
        found: dict[int, list[float]] = {m: [] for m in range(self.cap + 1)}
        for i in range(WARM + repeat):
            for accepted in found:
                self.restore(self.cap)
                first = self.context + 1
                plane[first : first + self.cap] = tokens[1 : self.cap + 1]
                if accepted < self.cap:
                    plane[first + accepted] = (tokens[accepted + 1] + 1) % vocab
                spent = seconds(lambda: self.device.launch("round"))
                self._check_forced(tokens, accepted)
                if i >= WARM:
                    found[accepted].append(spent)
        plane[:] = -1
        return found

    def _check_forced(self, tokens: Sequence[int], accepted: int) -> None:
        """The drafts that were right are kept, and the text goes on as in plain decoding."""
        count = self.device.get("ring_count")
        at = np.arange(count - self.device.get("accepted") - 1, count) % RING_TOKENS
        text = [*self.device.plane("ring")[at].tolist(), self.device.get("pending")]
        if text != list(tokens[: accepted + 2]):
            fail(
                "diverged",
                f"a round with {accepted} of {self.cap} drafts forced right gives another text "
                "than plain decoding",
                hints=("run memra-check, which says where and why",),
            )


def program_results(
    clock: RoundClock, prefill: list[float], manifest: Manifest, floor: Floor
) -> tuple[ProgramResult, ...]:
    """The programs that cost something, then the rest of a round as one line."""
    deepest = clock.parts[f"round {clock.cap}"]
    timed = [("draft", 1, deepest["draft"])] if clock.cap else []
    timed += [("verify", k + 1, clock.parts[f"round {k}"]["verify"]) for k in range(clock.cap + 1)]
    timed += [("plain_step", 1, clock.parts["plain 0"]["plain_step"])]
    timed += [("prefill", program(manifest, "prefill").rows, prefill)]
    timed += [(name, 1, times) for name, times in deepest.items() if name not in COLUMNS]
    found = []
    for name, rows, spent in timed:
        times, needs = Times.of(spent), cost(manifest, name, rows, clock.context)
        least = floor.ms(needs.bytes)
        found.append(
            ProgramResult(
                name, rows, _launches(manifest, name), times, needs.bytes, needs.flops,
                needs.bytes / times.median_ms / 1e6, needs.flops / times.median_ms / 1e6,
                least, times.median_ms / least,
            )
        )  # fmt: skip
    return tuple(found)


def _launches(manifest: Manifest, name: str) -> int:
    """Kernels of a program: on a GPU an op may take several."""
    launches = manifest.launches.get(name)
    return program(manifest, name).launches if launches is None else len(launches)


def sequence_bytes(clock: RoundClock, sequence: str, depth: int) -> int:
    """Bytes that a plain step or a round must move at the clock's context."""
    manifest = clock.device.manifest
    if sequence == "plain":
        return cost(manifest, "plain_step", 1, clock.context).bytes
    drafts = depth * cost(manifest, "draft", 1, clock.context).bytes
    return drafts + cost(manifest, "verify", depth + 1, clock.context).bytes


def round_result(clock: RoundClock, depth: int, floor: Floor) -> RoundResult:
    """Split a round into its columns; what no program accounts for is `gaps`."""
    whole = Times.of(clock.whole[f"round {depth}"]).median_ms
    columns = {"draft": 0.0, "verify": 0.0, "rest": 0.0}
    for name, spent in clock.parts[f"round {depth}"].items():
        runs = depth if name == "draft" else 1
        columns[COLUMNS.get(name, "rest")] += runs * Times.of(spent).median_ms
    needs = sequence_bytes(clock, "round", depth)
    ratio = whole / clock.plain().median_ms
    return RoundResult(
        depth, columns["draft"], columns["verify"], columns["rest"],
        whole - sum(columns.values()), whole, ratio, floor.ms(needs), whole / floor.ms(needs),
        max(0.0, ratio - 1), max(0.0, ratio - 1) / depth if depth else None,
    )  # fmt: skip


def fit_rounds(clock: RoundClock) -> Fit:
    """A straight line through the rounds that draft."""
    depths = list(range(1 if clock.cap > 1 else 0, clock.cap + 1))
    rounds = [Times.of(clock.whole[f"round {k}"]).median_ms for k in depths]
    slope, start = (float(v) for v in np.polyfit(depths, rounds, 1)) if len(depths) > 1 else (
        0.0, rounds[0])  # fmt: skip
    residual = max(abs(start + slope * k - t) for k, t in zip(depths, rounds, strict=True))
    drafts = clock.parts[f"round {clock.cap}"].get("draft", [0.0])
    draft, plain = Times.of(drafts).median_ms, clock.plain().median_ms
    return Fit(plain, start - plain, slope, draft, slope - draft, residual)


def forced_results(clock: RoundClock, found: dict[int, list[float]]) -> tuple[ForcedResult, ...]:
    """Time of a round at each forced acceptance."""
    plain = clock.plain().median_ms
    results = []
    for accepted, spent in found.items():
        times = Times.of(spent)
        speed = 1e3 * (accepted + 1) / times.median_ms
        results.append(ForcedResult(accepted, times, speed, speed * plain / 1e3))
    return tuple(results)


def context_results(
    clock: RoundClock, contexts: Sequence[int], depths: Sequence[int], repeat: int, floor: Floor
) -> tuple[ContextResult, ...]:
    """Time the plain step and rounds as if other numbers of tokens were committed.

    The clock's text is lost: its caches are filled with noise.
    """
    if contexts:
        fill_caches(clock)
    found = []
    base = {key: Times.of(spent).median_ms for key, spent in clock.whole.items()}
    for context in contexts:
        clock.move(context)
        plain = clock.times("plain", 0, repeat)
        for sequence, depth in [("plain", 0), *(("round", k) for k in depths)]:
            times = plain if sequence == "plain" else clock.times(sequence, depth, repeat)
            least, median = floor.ms(sequence_bytes(clock, sequence, depth)), times.median_ms
            found.append(
                ContextResult(
                    context, sequence, depth, times, least, median / least,
                    median / plain.median_ms, median / base[f"{sequence} {depth}"],
                )
            )  # fmt: skip
    return tuple(found)


def fill_caches(clock: RoundClock) -> None:
    """Put small finite numbers into every cache row: zeros would flatter."""
    noise = np.random.default_rng(0).normal(0, 0.1, 1 << 16).astype(np.float32)
    stored: dict[str, npt.NDArray[Any]] = {"f32": noise, "f16": noise.astype(np.float16),
              "bf16": (noise.view(np.uint32) >> 16).astype(np.uint16),
              "q8_0_rows": noise.view(np.uint8) % 16}  # fmt: skip  # scales below 0.001
    for place in clock.device.manifest.planes:
        if place.rollback == "truncate":
            clock.device.plane(place.id)[...] = np.resize(stored[place.dtype], place.shape)

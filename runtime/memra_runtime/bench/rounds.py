"""Time rounds and their programs, again and again from the same state."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from memra_runtime.artifact import Manifest
from memra_runtime.bench.costs import cost, program
from memra_runtime.bench.measure import Floor, Times, seconds
from memra_runtime.bench.results import Fit, ForcedResult, ProgramResult, RoundResult
from memra_runtime.session import Session

#: Programs of a round by the column they are reported under; the others are `rest`.
_COLUMNS = {"draft": "draft", "verify": "verify", "plain_step": "verify"}


class RoundClock:
    """Rounds at one position of one text. Every run starts from the state of a primed session.

    A round writes only rows past the committed ones, so putting back the device block and the
    carried hidden row repeats exactly the same work.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.device = session, session.device
        self.cap = session.policy.cap
        self.context = session.position
        self._saved = {n: self.device.plane(n).copy() for n in ("state", "hidden")}
        self.whole: dict[str, list[float]] = {}
        self.parts: dict[str, dict[str, list[float]]] = {}

    def restore(self, depth: int) -> None:
        for name, values in self._saved.items():
            self.device.plane(name)[...] = values
        self.device.put({"depth": depth})

    def sweep(self, repeat: int) -> None:
        """Time every depth and the plain step, whole and program by program, interleaved."""
        settings = [("plain", 0)] + [("round", k) for k in range(self.cap + 1)]
        for warm in (True, False):
            for _ in range(3 if warm else repeat):
                for sequence, depth in settings:
                    self._time(sequence, depth, keep=not warm)

    def _time(self, sequence: str, depth: int, *, keep: bool) -> None:
        key = f"{sequence} {depth}"
        self.restore(depth)
        whole = seconds(lambda: self.device.launch(sequence))
        self.restore(depth)
        spent: dict[str, list[float]] = {}
        for name, counter in self.device.manifest.sequences[sequence]:
            for _ in range(self.device.get(counter) if counter else 1):
                start = time.perf_counter()
                self.device.launch(f"run_{name}")
                spent.setdefault(name, []).append(time.perf_counter() - start)
        if keep:
            self.whole.setdefault(key, []).append(whole)
            for name, times in spent.items():
                self.parts.setdefault(key, {}).setdefault(name, []).extend(times)

    def prefill(self, ids: Sequence[int], repeat: int) -> list[float]:
        """Time a chunk of the prompt, appended behind the committed rows."""
        rows = min(program(self.device.manifest, "prefill").rows, len(ids))
        found = []
        for _ in range(repeat + 3):
            self.restore(0)
            self.device.plane("prompt")[:rows] = ids[:rows]
            self.device.put({"rows": rows})
            found.append(seconds(lambda: self.device.launch("prefill")))
        self.restore(0)
        return found[3:]

    def plain(self) -> Times:
        return Times.of(self.whole["plain 0"])

    def forced(self, tokens: Sequence[int], repeat: int) -> dict[int, list[float]]:
        """Time rounds of the largest depth by accepted drafts; `tokens` is the plain stream.

        tokens[0] is the pending token, so draft j should be tokens[j].
        """
        plane, vocab = self.device.plane("forced"), self.session.vocab
        found: dict[int, list[float]] = {m: [] for m in range(self.cap + 1)}
        for i in range(repeat + 3):
            for accepted in found:
                self.restore(self.cap)
                first = self.context + 1
                plane[first : first + self.cap] = tokens[1 : self.cap + 1]
                if accepted < self.cap:
                    plane[first + accepted] = (tokens[accepted + 1] + 1) % vocab
                spent = seconds(lambda: self.device.launch("round"))
                if self.device.get("accepted") != accepted:
                    raise RuntimeError("forced drafts were not accepted as forced")
                if i >= 3:
                    found[accepted].append(spent)
        plane[:] = -1
        return found


def program_results(
    clock: RoundClock, prefill: list[float], manifest: Manifest, floor: Floor
) -> tuple[ProgramResult, ...]:
    """The programs that cost something, then the rest of a round as one line."""
    deepest = clock.parts[f"round {clock.cap}"]
    timed = [("draft", 1, deepest["draft"])] if clock.cap else []
    timed += [("verify", k + 1, clock.parts[f"round {k}"]["verify"]) for k in range(clock.cap + 1)]
    timed += [("plain_step", 1, clock.parts["plain 0"]["plain_step"])]
    timed += [("prefill", program(manifest, "prefill").rows, prefill)]
    timed += [(name, 1, times) for name, times in deepest.items() if name not in _COLUMNS]
    found = []
    for name, rows, spent in timed:
        times, needs = Times.of(spent), cost(manifest, name, rows, clock.context)
        least = floor.ms(needs.bytes)
        found.append(
            ProgramResult(
                name, rows, program(manifest, name).launches, times, needs.bytes, needs.flops,
                needs.bytes / times.median_ms / 1e6, needs.flops / times.median_ms / 1e6,
                least, times.median_ms / least,
            )
        )  # fmt: skip
    return tuple(found)


def round_result(clock: RoundClock, depth: int, floor: Floor) -> RoundResult:
    """Split a round into its columns; what no program accounts for is `gaps`."""
    whole = Times.of(clock.whole[f"round {depth}"]).median_ms
    columns = {"draft": 0.0, "verify": 0.0, "rest": 0.0}
    for name, spent in clock.parts[f"round {depth}"].items():
        runs = depth if name == "draft" else 1
        columns[_COLUMNS.get(name, "rest")] += runs * Times.of(spent).median_ms
    manifest = clock.device.manifest
    needs = cost(manifest, "verify", depth + 1, clock.context).bytes
    needs += depth * cost(manifest, "draft", 1, clock.context).bytes
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

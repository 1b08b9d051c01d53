"""A session: begin a text, go on with it, keep it aside, take it up again."""

from __future__ import annotations

import time
from collections.abc import Sequence

from memra_runtime.artifact import STATE_ATTEMPTED, slot
from memra_runtime.session.request import check_request
from memra_runtime.session.rounds import Rounds
from memra_runtime.session.snapshot import (
    Snapshot,
    check_fits,
    row_spans,
    rows_wanted,
    take,
)
from memra_runtime.session.stats import Stats
from memra_runtime.session.text import Text, continuation


class Session(Rounds):
    """One text on a device. `prime` and `restore` begin another.

    A device holds one text at a time; `memra_runtime.model.another_model` gives a second device on
    the same weights. Sessions take turns at round boundaries, in any order.
    """

    # -- beginning and going on --------------------------------------------------------------------

    def prime(self, ids: Sequence[int], max_new: int = 1) -> None:
        """Start a new text from a prompt.

        Raises: MemraError for an empty prompt, ids outside the vocabulary, or a prompt that with
        `max_new` tokens does not fit the context.
        """
        check_request(self.device.manifest, ids, max_new)
        self._claim()
        self.text = Text()
        self._run(list(ids), 0)

    def extend(self, suffix: Sequence[int], max_new: int = 1, *, keep: int | None = None) -> None:
        """Go on with given tokens behind the first `keep` of the text (default: all shown ones).

        Rows below stay as they are; the suffix runs through the programs of a prompt, so a given
        text leaves the same rows however it was split. What was committed behind is forgotten.

        Raises: MemraError, and leaves the session as it was, where the suffix is empty, the text
        does not fit, or a windowed cache no longer holds what the first row would read.
        """
        self._own()
        self.policy.check(self.device.manifest)
        tokens, start = continuation(self.device.manifest, self.text, self.pending, suffix, keep)
        check_request(self.device.manifest, tokens, max_new)
        self._run(tokens, start)

    def snapshot(self) -> Snapshot:
        """Copy the text aside, on the device. Raises: MemraError where there is no room."""
        self._own()
        return take(self.device, self.text)

    def restore(
        self,
        snapshot: Snapshot,
        suffix: Sequence[int] = (),
        max_new: int = 1,
        *,
        keep: int | None = None,
    ) -> None:
        """Begin with a snapshot's text: whole, or its first `keep` tokens, and `suffix` behind.

        Without a suffix the text must be kept whole: it goes on exactly where it was. With one,
        this is `extend` on the session that the snapshot was taken of.

        Raises: MemraError as `extend`, and for a snapshot of another artifact or other weights;
        the session is as it was.
        """
        self._closed()
        check_fits(snapshot, self.device)
        manifest, text = self.device.manifest, snapshot.text.copy()
        tokens, start = rows_wanted(manifest, snapshot, suffix, keep, max_new)
        self._claim()
        device = self.device
        device.put_back(row_spans(manifest, len(text.tokens)), snapshot.rows)
        self.text = text
        if start < len(tokens):
            self._run(tokens, start)
            return
        if self.trim is not None:
            self.trim.learn_prompt(tokens)  # as a cold start would
        device.plane("hidden")[...] = snapshot.hidden
        device.plane("forced")[:] = -1
        device.state[:] = snapshot.state
        self._settle()
        if any(snapshot.state[slot(n)] != v for n, v in self.policy.counters().items()):
            device.launch("run_adapt_fresh")  # the depth was another policy's
        self.stats = Stats(kept_tokens=len(tokens))

    def demote(self) -> None:
        """Decode plainly from here on; the pending token and every row are carried over."""
        self._closed()
        self.sequence = "plain"

    def promote(self) -> None:
        """Decode in rounds again; plain steps leave what the drafter starts from, too."""
        self._closed()
        self.sequence = "round"

    def _run(self, tokens: list[int], start: int) -> None:
        """Run the rows of `tokens` from `start` on, the last one as a step that predicts."""
        begin = time.perf_counter()
        device, text = self.device, self.text
        if self.trim is not None:
            self.trim.learn_prompt(tokens)
        device.state[:] = 0
        device.plane("forced")[:] = -1
        device.put({"position": start, "capacity": self.capacity, **self.policy.counters()})
        chunk = next(p.rows for p in device.manifest.programs if p.name == "prefill")
        for at in range(start, len(tokens) - 1, chunk):
            part = tokens[at : min(at + chunk, len(tokens) - 1)]
            device.plane("prompt")[: len(part)] = part
            device.put({"rows": len(part)})
            device.launch("prefill")
        device.put({"pending": tokens[-1]})
        device.launch("prime")
        device.state[STATE_ATTEMPTED:] = 0
        device.put({"rounds": 0, "total_drafted": 0, "total_accepted": 0, "cuts": 0})
        text.seams = (*(seam for seam in text.seams if seam <= start), len(tokens))
        text.tokens, text.shown = tokens, len(tokens)
        text.written = max(text.written, len(tokens))
        self._settle()
        self.stats = Stats(
            prompt_tokens=len(tokens) - start,
            kept_tokens=start,
            prompt_s=time.perf_counter() - begin,
        )

    def _settle(self) -> None:
        """Give the device what is this session's: policy, capacity, ends of sequence."""
        device, text = self.device, self.text
        eos = device.plane("eos")
        eos[:] = -1
        eos[: len(self.eos)] = sorted(self.eos)
        # an end of sequence in a given text ends nothing
        ended = self.pending in self.eos or text.first_end(text.produced, self.eos) is not None
        counters = {"capacity": self.capacity, "ended": int(ended), **self.policy.counters()}
        device.put(counters)
        self._read = device.get("ring_count")
        self._check_sound()

"""Graphs that decide on the device: bursts, and rounds that may end their own draft chain.

    while more:              a conditional node; its condition is set by `again` after each round
        again                here it says which body of the next node runs
        switch (depth):      one body a depth, each the whole round at that depth
        again                does another round follow?
        mirror               the token ring, then the counters, to the host

A round whose chain may be cut is the same graph at any depth:

    begin
    while (chain):           the draft step, whose last kernel says whether another follows
        draft
    switch (drafts):         one body a number of drafts to verify, each with all that follows

The host may read the mirror while the loop runs: the ring is copied before the counter that says
how much of it is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memra_runtime.device.cuda_driver import Context, Graph, GraphDraft, Kernel, Stream

#: Driver that knows nodes with more than two bodies: CUDA 12.8.
SWITCH_VERSION = 12080


@dataclass(frozen=True)
class CutRound:
    """A round whose chain may be cut.

    `begin(chain, drafts)` and `step(chain, drafts)` queue the start of a round and a draft step;
    both set the conditions of the two handles. `rest[drafts]` queues what follows the chain.
    """

    begin: Callable[[int, int], None]
    step: Callable[[int, int], None]
    rest: Sequence[Callable[[], None]]

    def add(self, graph: GraphDraft, stream: Stream) -> Any:
        """Add the round to a graph without nodes; returns the last node."""
        chain, drafts = graph.condition(first=0), graph.condition(first=0)
        graph.capture(stream, lambda: self.begin(chain, drafts))
        loop, (body,) = graph.add_while(chain, after=graph.last())
        body.capture(stream, lambda: self.step(chain, drafts))
        switch, bodies = graph.add_switch(drafts, len(self.rest), after=loop)
        for part, enqueue in zip(bodies, self.rest, strict=True):
            part.capture(stream, enqueue)
        return switch


def can_loop(context: Context) -> bool:
    """Whether the driver can run rounds in a loop of its own."""
    return context.driver_version >= SWITCH_VERSION


def capture_round(
    context: Context, stream: Stream, parts: CutRound, mirror: Callable[[], None]
) -> Graph:
    """Build the graph of one round whose chain may be cut."""
    root = GraphDraft(context)
    root.capture(stream, mirror, after=parts.add(root, stream))
    return root.finish()


def capture_burst(
    context: Context,
    stream: Stream,
    rounds: Sequence[Callable[[], None]] | CutRound,
    again: Callable[[int, int], Kernel],
    mirror: Callable[[], None],
) -> Graph:
    """Build the graph of a burst.

    `rounds[depth]` queues a round at that depth; `again(loop, depths)` is the kernel that sets the
    conditions of two handles (0: none); `mirror` queues the copies to the host.
    """
    root = GraphDraft(context)
    loop = root.condition(first=1)
    _, (body,) = root.add_while(loop)

    def end() -> None:
        again(loop, 0).launch(stream, 1)
        mirror()

    if isinstance(rounds, CutRound):
        body.capture(stream, end, after=rounds.add(body, stream))
        return root.finish()
    if len(rounds) == 1:  # plain steps: whatever depth the policy would choose, there is one body

        def step() -> None:
            rounds[0]()
            end()

        body.capture(stream, step)
        return root.finish()
    depths = body.condition(first=0)
    body.capture(stream, lambda: again(0, depths).launch(stream, 1))
    switch, bodies = body.add_switch(depths, len(rounds), after=body.last())
    for part, enqueue in zip(bodies, rounds, strict=True):
        part.capture(stream, enqueue)
    body.capture(stream, end, after=switch)
    return root.finish()

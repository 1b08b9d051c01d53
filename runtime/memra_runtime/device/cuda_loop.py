"""A burst as one CUDA graph: rounds repeat on the device, each as deep as the last one decided.

    while more:              a conditional node; its condition is set by `again` after each round
        again                here it says which body of the next node runs
        switch (depth):      one body a depth, each the whole round at that depth
        again                does another round follow?
        mirror               the token ring, then the counters, to the host

The host may read the mirror while the loop runs: the ring is copied before the counter that says
how much of it is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memra_runtime.device.cuda_driver import Context, Graph, GraphDraft, Kernel, Stream

#: Driver that knows nodes with more than two bodies: CUDA 12.8.
SWITCH_VERSION = 12080


def can_loop(context: Context) -> bool:
    """Whether the driver can run rounds in a loop of its own."""
    return context.driver_version >= SWITCH_VERSION


def capture_burst(
    context: Context,
    stream: Stream,
    rounds: Sequence[Callable[[], None]],
    again: Callable[[int, int], Kernel],
    mirror: Callable[[], None],
) -> Graph:
    """Build the graph.

    `rounds[depth]` queues a round at that depth; `again(loop, depths)` is the kernel that sets the
    conditions of two handles (0: none); `mirror` queues the copies to the host.
    """
    root = GraphDraft(context)
    loop = root.condition(first=1)
    _, (body,) = root.add_while(loop)

    def end() -> None:
        again(loop, 0).launch(stream, 1)
        mirror()

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

"""The matrices of gemma4 31B and its drafter, for benches: the only place that lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Matrices:
    """The matrices of one launch, `[outputs, inputs]` each, which share their activations.

    `gated`: two whose product is one result. `splits`: the sum over inputs may be cut into partial
    ones, since the reader adds them.
    """

    format: str
    inputs: int
    outputs: tuple[int, ...]
    gated: bool = False
    splits: bool = True

    @property
    def act(self) -> str | None:
        return "gelu_tanh" if self.gated else None


WIDTH, INNER, VOCAB, DRAFT = 5376, 21504, 262144, 1024

MATRICES = {
    "qkv": Matrices("q4_0", WIDTH, (8192, 4096, 4096)),
    "qkv_full": Matrices("q4_0", WIDTH, (16384, 2048)),
    "o": Matrices("q4_0", 8192, (WIDTH,)),
    "o_full": Matrices("q4_0", 16384, (WIDTH,)),
    "gate_up": Matrices("q4_0", WIDTH, (INNER, INNER), gated=True, splits=False),
    "down": Matrices("q4_0", INNER, (WIDTH,)),
    "head": Matrices("q6_k", WIDTH, (VOCAB,), splits=False),
    "draft_in": Matrices("q8_0", 2 * WIDTH, (DRAFT,), splits=False),
    "draft_q": Matrices("q8_0", DRAFT, (8192,)),
    "draft_q_full": Matrices("q8_0", DRAFT, (16384,)),
    "draft_o": Matrices("q8_0", 8192, (DRAFT,)),
    "draft_o_full": Matrices("q8_0", 16384, (DRAFT,)),
    "draft_gate_up": Matrices("q8_0", DRAFT, (8192, 8192), gated=True, splits=False),
    "draft_head": Matrices("q8_0", DRAFT, (VOCAB, WIDTH), splits=False),
}
#: Those of a windowed layer (50 of 60 layers), in the order in which they run.
LAYER = ("qkv", "o", "gate_up", "down")
LAYERS = 60

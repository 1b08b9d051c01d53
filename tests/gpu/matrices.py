"""The matrices of the gemma4 models and their drafters, for benches: the only list of them."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB = 262144
BODY, HEAD, DRAFT = "q4_0", "q6_k", "q8_0"  # formats


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
    splits: bool = False

    @property
    def act(self) -> str | None:
        return "gelu_tanh" if self.gated else None


def model(
    width: int, inner: int, heads: tuple[int, ...], full: tuple[int, ...], draft: int = 1024,
    draft_inner: int = 8192, draft_heads: tuple[int, int] | None = None,
) -> dict[str, Matrices]:  # fmt: skip
    """Matrices by name; `heads` and `full`: outputs of q, k (and v) of windowed and global layers.

    A drafter of width `draft` has the query heads of its target, or `draft_heads`.
    """
    q, q_full = draft_heads or (heads[0], full[0])
    return {
        "qkv": Matrices(BODY, width, heads),
        "qkv_full": Matrices(BODY, width, full),
        "o": Matrices(BODY, heads[0], (width,), splits=True),
        "o_full": Matrices(BODY, full[0], (width,), splits=True),
        "gate_up": Matrices(BODY, width, (inner, inner), gated=True),
        "down": Matrices(BODY, inner, (width,), splits=True),
        "head": Matrices(HEAD, width, (VOCAB,)),
        "draft_in": Matrices(DRAFT, 2 * width, (draft,)),
        "draft_q": Matrices(DRAFT, draft, (q,)),
        "draft_q_full": Matrices(DRAFT, draft, (q_full,)),
        "draft_o": Matrices(DRAFT, q, (draft,), splits=True),
        "draft_o_full": Matrices(DRAFT, q_full, (draft,), splits=True),
        "draft_gate_up": Matrices(DRAFT, draft, (draft_inner, draft_inner), gated=True),
        "draft_down": Matrices(DRAFT, draft_inner, (draft,), splits=True),
        "draft_head": Matrices(DRAFT, draft, (VOCAB, width)),
    }


MODELS = {
    "31b": model(5376, 21504, (8192, 4096, 4096), (16384, 2048)),
    "12b": model(3840, 15360, (4096, 2048, 2048), (8192, 512)),
    "26b": model(2816, 2112, (4096, 2048, 2048), (8192, 1024)),
    "e4b": model(2560, 10240, (2048, 512, 512), (4096, 1024, 1024), 256, 2048, (1024, 2048)),
    "e2b": model(1536, 6144, (2048, 256, 256), (4096, 512, 512), 256, 2048, (1024, 2048)),
}
#: What runs in a row: the layers of the target and of its drafter, then what runs once.
CHAINS = (
    ("qkv", "o", "gate_up", "down"),
    ("qkv_full", "o_full", "gate_up", "down"),
    ("draft_q", "draft_o", "draft_gate_up", "draft_down"),
    ("draft_q_full", "draft_o_full", "draft_gate_up", "draft_down"),
    ("head",),
    ("draft_in",),
    ("draft_head",),
)
#: The matrices of the 31B, and those of a windowed layer in the order in which they run.
MATRICES = MODELS["31b"]
LAYER = CHAINS[0]
LAYERS = 60

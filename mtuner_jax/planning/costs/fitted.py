"""Constants fitted to what implementations of operations do, one row for each.

A new kernel adds a row here, and its name to what a `Workload` may ask for. Read from
XLA's buffer assignments (jax 0.10.2, 8 x A100-40GB, compile-only) or measured on an
H200; docs/planning.md says how far off they are.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFit:
    """An implementation of attention.

    Attributes:
      flops: Operations of the forward pass for each score of the square and feature
        of a head, at the card's rate of attention; 0 where bytes say how long.
      backward_ratio: Seconds of the backward pass over those of the forward pass.
      within_documents: Whether only scores within documents are computed.
      moved: Forward and backward: elements that take as long to move, for each feature
        of the queries, as a token takes beside its scores.
      score_bytes: Forward and backward: bytes that take as long to move as a score
        takes to compute, where they say it.
      held_score_bytes: Bytes held for every score in the backward pass: blocks of
        queries come one after the other, but XLA holds those of all of them.
    """

    flops: float = 0.0
    backward_ratio: float = 0.0
    within_documents: bool = False
    moved: tuple[float, float] = (0.0, 0.0)
    score_bytes: tuple[int, int] = (0, 0)
    held_score_bytes: int = 0


ATTENTION = {
    # Fitted on an H200 to 4 x 4096 tokens, 32 heads of 128: documents of 4096 and of
    # 512 are met within 2 %; chat-like lengths are forecast 13 % too fast, those of
    # 80 tokens 35 to 40 %: much of a tile of scores is outside of short documents.
    "flash": AttentionFit(
        flops=1.36, backward_ratio=2.76, within_documents=True, moved=(3.5, 14.3)
    ),
    # Causal: half of the scores. Two products forward, five backward.
    "cudnn": AttentionFit(flops=2, backward_ratio=2.5),
    # Scores and their gradients are float32.
    "xla": AttentionFit(score_bytes=(20, 38), held_score_bytes=8),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """An implementation of adapters: elements moved for a token, kernels run.

    Attributes:
      forward: Elements for each input and for each output feature, forward.
      backward: The same of the backward pass.
      dropout: Forward and backward: elements that take as long to move as masks of an
        input feature take to draw.
      kernels: Kernels of an adapter, forward and backward.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    dropout: tuple[int, int]
    kernels: tuple[int, int]


LOW_RANK = {
    # Measured at rank 16 and four shapes: within 10 % at 4 TB/s.
    "xla": LowRank(forward=(1, 4), backward=(6, 2), dropout=(6, 4), kernels=(3, 6)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """How many tensors of each width are alive at once.

    Attributes:
      wide: Tensors of the feed-forward width (F).
      stream: Tensors of the stream's width (D).
      queries: Tensors of all query heads' features.
      keys: Tensors of all key heads' features.
    """

    wide: int
    stream: int
    queries: int = 0
    keys: int = 0


# Alive when attention's backward pass runs, which is the peak: the gradients of gate,
# up and hidden, kept for the adapters' gradients, which are computed late; the stream,
# its gradient, what both norms keep, inputs and gradients of the projections; queries,
# the output, and the gradients of both; keys, values and their gradients.
BACKWARD = Features(wide=3, stream=7, queries=4, keys=4)
# Alive when the forward pass of a layer multiplies gate and up.
FORWARD = Features(wide=4, stream=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Shares of a layer's whole weights that are alive at once, in hundredths.

    Attributes:
      peak: Weights beside all tensors: those still needed or already gathered, copies
        joined with their adapters for one product, gaps between buffers.
      early: Weights at the start of a layer's backward pass.
    """

    peak: int
    early: int


AHEAD = Weights(peak=135, early=200)
NOT_AHEAD = Weights(peak=110, early=150)
# A resident layer is cut out of its stack before it runs.
RESIDENT = Weights(peak=85, early=85)
# More of both: copies pass through a buffer of their own; merged gathers end together,
# and what is held of all of them was cut out of its stack before.
COPY, MERGED = 30, 22
# Of the tensors, at the start of a layer's backward pass.
EARLY_TENSORS = 40
# Of the weights, while a gathered output table waits for the main part's last layer.
LAST_LAYER = 50
# A further segment: a layer outside of its loop.
SEGMENT_WEIGHTS = 25
# Loops of one trip are unrolled; then neighbouring layers' tensors overlap.
UNROLLED_TENSORS = 20
# Share of a layer's computation that runs beside gathers that are not merged into
# one; fitted to one measured step (two H200, slow link: 662 instead of 565 ms).
BESIDE_MANY_GATHERS = 0.8

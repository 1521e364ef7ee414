"""Rows of samples to the arrays of a step; the one place where labels are shifted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mtuner_jax.data.samples import Samples
from mtuner_jax.protocols.states import Batch


def shift(
    input_ids: np.ndarray, trained: np.ndarray, segment_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Moves ids and mask one place to the left, within each document.

    A place predicts the next token of its document. The last token of a document
    predicts nothing, and padding (segment 0) neither.

    Args:
      input_ids: [..., T] int32.
      trained: [..., T] bool, whether a token carries loss when it is predicted.
      segment_ids: [..., T] int32.

    Returns:
      Targets [..., T] int32 and weights [..., T] float32.
    """
    here, following = segment_ids[..., :-1], segment_ids[..., 1:]
    predicts = (here == following) & (here > 0)
    targets = np.zeros_like(input_ids)
    targets[..., :-1] = np.where(predicts, input_ids[..., 1:], 0)
    weights = np.zeros(input_ids.shape, np.float32)
    weights[..., :-1] = predicts & trained[..., 1:]
    return targets, weights


class Placed(NamedTuple):
    """A document in a row.

    Attributes:
      samples: Where it is from.
      index: Which of them.
      adapter: Whom it trains, where there are several.
      start: Its first place in the row.
    """

    samples: Samples
    index: int
    adapter: int = 0
    start: int = 0


def assemble(
    samples: Samples,
    rows: Sequence[np.ndarray],
    *,
    num_rows: int,
    max_length: int,
) -> Batch:
    """Lays samples into rows, right padded, and shifts the labels.

    Args:
      rows: For each row, the samples in it; at most `num_rows`.

    Returns:
      Numpy arrays [num_rows, max_length]; rows that are not given are padding.
    """
    placed = []
    for members in rows:
        ends = np.cumsum(samples.lengths[members]).tolist()
        starts = [0, *ends[:-1]]
        placed.append(
            [
                Placed(samples, index, start=start)
                for index, start in zip(members.tolist(), starts, strict=True)
            ]
        )
    return lay(placed, num_rows=num_rows, max_length=max_length)


def lay(
    rows: Sequence[Sequence[Placed]],
    *,
    num_rows: int,
    max_length: int,
    several: bool = False,
) -> Batch:
    """As `assemble`, with documents where they are to lie, of whichever data.

    Args:
      rows: For each row, the documents in it, which don't overlap.
      several: Whether they are of several adapters, and `adapter_ids` says which.
    """
    shape = (num_rows, max_length)
    fields = np.zeros((5, *shape), np.int32)
    input_ids, segment_ids, positions, sample_ids, adapter_ids = fields
    trained = np.zeros(shape, bool)
    for row, members in enumerate(rows):
        for segment, one in enumerate(members, start=1):
            ids, mask = one.samples.tokens(one.index)
            place = (row, slice(one.start, one.start + len(ids)))
            input_ids[place] = ids
            trained[place] = mask
            segment_ids[place] = segment
            positions[place] = np.arange(len(ids))
            sample_ids[place] = one.samples.sample_ids[one.index]
            adapter_ids[place] = one.adapter
    targets, weights = shift(input_ids, trained, segment_ids)
    return Batch(
        input_ids=input_ids,
        targets=targets,
        weights=weights,
        segment_ids=segment_ids,
        positions=positions,
        sample_ids=sample_ids,
        adapter_ids=adapter_ids if several else None,
    )

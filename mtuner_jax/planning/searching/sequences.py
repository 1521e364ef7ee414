"""Sequences of options that may beat a limit, by bounds at prices of bytes.

First options are left out that no good sequence has, then sequences by a coarse bound
over all there are, then by a finer one of each. Letters as in `options`.
"""

import itertools

import numpy as np

from mtuner_jax.planning.searching.bounds import Bounds, Task
from mtuner_jax.planning.searching.prices import Price


def promising(
    bounds: Bounds, task: Task, segments: int, limit_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of different options that may beat the limit, and their bounds.

    Returns:
      [G, S] options, [S] seconds.
    """
    at = bounds.best_prices(task) if np.isfinite(limit_s) else []
    kept = _options(bounds, task, segments, limit_s, at)
    sequences_GS = kept[_below(bounds, kept, task, segments, limit_s, at)]
    options = bounds.options
    transient_S = options.transient_O[sequences_GS].max(axis=0)
    room_S = task.room_bytes - np.maximum(transient_S, task.floor_bytes)
    further_S = bounds.further_O[sequences_GS[1:]].sum(axis=0)
    left_S = room_S - bounds.first_O[sequences_GS[0]] - further_S
    border_s_S = options.ends_s(sequences_GS)
    bound_s_S = np.where(left_S < 0, np.inf, -np.inf)
    for price in at:
        paid_s_GS = bounds.paid_s_O(price)[sequences_GS]
        paid_s_S = (task.layers - segments) * paid_s_GS.min(axis=0)
        paid_s_S = paid_s_S + paid_s_GS.sum(axis=0) + border_s_S
        paid_s_S = paid_s_S - (price.peak + price.valley) * left_S
        bound_s_S = np.maximum(bound_s_S, paid_s_S)
    below_S = bound_s_S < limit_s
    return sequences_GS[:, below_S], bound_s_S[below_S]


def _options(
    bounds: Bounds, task: Task, segments: int, limit_s: float, at: list[Price]
) -> np.ndarray:
    """Options that some sequence below the limit may have, at some level."""
    room_V = bounds.room_V(task)
    full_V = room_V < task.layers * bounds.smallest_V
    fits_VO = ~full_V[:, None] & bounds.within_VO
    kept_O = fits_VO.any(axis=0)
    for price in at:
        offers = bounds.offers_at(price)[segments - 1]
        paid_s_V = task.layers * offers.least_s_V
        paid_s_V = paid_s_V - (price.peak + price.valley) * room_V
        least_s_VO = np.where(fits_VO, paid_s_V[:, None] + offers.with_s_VO, np.inf)
        kept_O &= least_s_VO.min(axis=0) < limit_s
    return np.flatnonzero(kept_O)


def _below(
    bounds: Bounds,
    kept: np.ndarray,
    task: Task,
    segments: int,
    limit_s: float,
    at: list[Price],
) -> np.ndarray:
    """[G, S] sequences of what is kept whose coarse bound is below the limit.

    It pays all layers but one of each segment at the cheapest option's price, so
    that it is a sum over neighbouring places: few steps for all sequences there
    are.
    """
    grid, options = _Grid(len(kept), segments), bounds.options
    transient = grid.largest(options.transient_O[kept])
    room = task.room_bytes - np.maximum(transient, task.floor_bytes)
    below = grid.different() & (room >= 0)
    border_s_OP = options.border_s_OP[np.ix_(kept, kept)]
    for price in at:
        total, paid_s_O = price.peak + price.valley, bounds.paid_s_O(price)
        least_s = paid_s_O.min()
        more_s_O = paid_s_O[kept] - least_s
        first_s_O = options.start_s_O[kept] + total * bounds.first_O[kept]
        behind_s_OP = border_s_OP + (total * bounds.further_O[kept] + more_s_O)
        most_s = limit_s - task.layers * least_s + total * room
        below &= (
            grid.chained(first_s_O + more_s_O, behind_s_OP, options.end_s_O[kept])
            < most_s
        )
    return np.stack(np.nonzero(below))


class _Grid:
    """All sequences of so many of `number` options, as arrays of `length` dims."""

    def __init__(self, number: int, length: int):
        self.number, self.length = number, length

    def largest(self, values_O: np.ndarray) -> np.ndarray:
        """The largest value of a sequence's options."""
        found = values_O
        for _ in range(1, self.length):
            found = np.maximum(found[..., None], values_O)
        return found

    def chained(
        self, first_O: np.ndarray, behind_OP: np.ndarray, last_O: np.ndarray
    ) -> np.ndarray:
        """Sums of a first option's value, one of each pair, and the last one's."""
        if self.length == 1:
            return first_O + last_O
        if self.length == 2:
            return first_O[:, None] + (behind_OP + last_O)
        return (first_O[:, None] + behind_OP)[:, :, None] + (behind_OP + last_O)

    def different(self) -> np.ndarray:
        """Which sequences have no option twice."""
        places = np.indices((self.number,) * self.length, sparse=True)
        allowed = np.ones((self.number,) * self.length, bool)
        for one, two in itertools.combinations(places, 2):
            allowed &= one != two
        return allowed

"""Lower bounds on the time of a filling: Lagrange multipliers on two kinds of bytes.

Weights, saved tensors and layer inputs must fit ("peak"), and so must weights, saved
tensors and copies ("valley"). A price for each byte turns both conditions into
seconds: for any prices, `layers * (seconds of the cheapest layer, bytes paid)` less
the price of all room bounds the time of every filling from below. The best bounds are
at prices where three options tie.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_ROUNDING = 1e-9


class Price(NamedTuple):
    """Seconds that a byte is worth: of weights and inputs, and of copies."""

    peak: float
    valley: float


class Offers(NamedTuple):
    """The cheapest sequences of so many options at a price, by level of transients.

    A filling whose options have transients up to a level takes at least
    `layers * least_s + every_s - (peak + valley) * (room - level)`.

    Attributes:
      least_s: [levels] the cheapest option's layer, its bytes paid.
      every_s: [levels] what one layer of each option of a sequence costs more,
        borders, and what further segments cost; the least of all sequences.
      with_s: [levels, options] likewise, of sequences with an option in them.
    """

    least_s: np.ndarray
    every_s: np.ndarray
    with_s: np.ndarray


class Sequence(NamedTuple):
    """What options cost by their place in a sequence.

    Attributes:
      start_s: [options] as the first.
      border_s: [options, options] the second behind the first.
      end_s: [options] as the last.
    """

    start_s: np.ndarray
    border_s: np.ndarray
    end_s: np.ndarray


def offers(paid_s: np.ndarray, costs: Sequence, longest: int) -> list[Offers]:
    """What sequences of 1, 2, ... options cost at a price.

    Args:
      paid_s: [levels, options] a layer, its bytes paid; inf above the level.
      costs: What does not depend on the number of layers.
      longest: Options in the longest sequence.
    """
    least_s = paid_s.min(axis=1)
    more_s = paid_s - least_s[:, None]
    # Cheapest beginnings of each length that end with an option, and the rest behind.
    ahead = [more_s + costs.start_s]
    behind = [np.broadcast_to(costs.end_s, more_s.shape)]
    for _ in range(longest - 1):
        reached_s = (ahead[-1][:, :, None] + costs.border_s).min(axis=1)
        ahead.append(reached_s + more_s)
        left_s = costs.border_s + (behind[-1] + more_s)[:, None, :]
        behind.append(left_s.min(axis=2))
    found = []
    for length in range(1, longest + 1):
        places = [ahead[k] + behind[length - 1 - k] for k in range(length)]
        with_s = np.min(places, axis=0)
        found.append(Offers(least_s, with_s.min(axis=1), with_s))
    return found


def candidates(
    layer_s: np.ndarray, peak: np.ndarray, valley: np.ndarray
) -> Iterator[Price]:
    """Prices at which three options tie and none is cheaper, or two and one is 0.

    Args:
      layer_s: [options] seconds of a layer.
      peak: [options] its bytes.
      valley: [options] likewise.
    """
    for price in _ties(peak, layer_s):
        yield Price(price, 0.0)
    for price in _ties(valley, layer_s):
        yield Price(0.0, price)
    yield from _corners(layer_s, peak, valley)


def _ties(sizes, seconds) -> list[float]:
    """Prices of a byte at which the cheapest option changes.

    They are the slopes of the lower convex hull of seconds over sizes.
    """
    hull: list[tuple[float, float]] = []
    for point in sorted(zip(sizes.tolist(), seconds.tolist(), strict=True)):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return [-_slope(*pair) for pair in itertools.pairwise(hull)]


def _slope(one, two):
    return (two[1] - one[1]) / (two[0] - one[0])


def _corners(layer_s, peak, valley) -> list[Price]:
    values = np.stack([layer_s, peak, valley])
    covered = (values[:, :, None] <= values[:, None, :]).all(axis=0)
    beaten = (covered & ~covered.T).any(axis=0)
    layer_s, peak, valley = np.unique(values[:, ~beaten], axis=1)
    a, b, c = np.indices((layer_s.size,) * 3).reshape(3, -1)
    a, b, c = (index[(a < b) & (b < c)] for index in (a, b, c))
    peaks = peak[b] - peak[a], peak[c] - peak[a]
    valleys = valley[b] - valley[a], valley[c] - valley[a]
    seconds = layer_s[a] - layer_s[b], layer_s[a] - layer_s[c]
    scale = peaks[0] * valleys[1] - peaks[1] * valleys[0]
    solved = scale != 0
    scale = np.where(solved, scale, 1.0)
    at_peak = (seconds[0] * valleys[1] - seconds[1] * valleys[0]) / scale
    at_valley = (seconds[1] * peaks[0] - seconds[0] * peaks[1]) / scale
    kept = solved & (at_peak > 0) & (at_valley > 0)
    a, at_peak, at_valley = a[kept, None], at_peak[kept, None], at_valley[kept, None]
    paid_s = layer_s + at_peak * peak + at_valley * valley
    own_s = np.take_along_axis(paid_s, a, axis=1)
    lowest = (paid_s >= own_s * (1 - _ROUNDING)).all(axis=1)
    pairs = np.hstack([at_peak, at_valley])[lowest]
    return [Price(float(one), float(other)) for one, other in pairs]

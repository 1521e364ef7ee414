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
      least_s_V: The cheapest option's layer, its bytes paid.
      every_s_V: What one layer of each option of a sequence costs more, borders, and
        what further segments cost; the least of all sequences.
      with_s_VO: The same, the least of all sequences with an option in them.
    """

    least_s_V: np.ndarray
    every_s_V: np.ndarray
    with_s_VO: np.ndarray


class Sequence(NamedTuple):
    """What options cost by their place in a sequence: first, behind another, last."""

    start_s_O: np.ndarray
    border_s_OP: np.ndarray
    end_s_O: np.ndarray


def offers(paid_s_VO: np.ndarray, costs: Sequence, longest: int) -> list[Offers]:
    """What sequences of 1, 2, ... options cost at a price.

    Args:
      paid_s_VO: Seconds of a layer, its bytes paid; inf above the level.
      costs: What does not depend on the number of layers.
      longest: Options in the longest sequence.
    """
    least_s_V = paid_s_VO.min(axis=1)
    more_s_VO = paid_s_VO - least_s_V[:, None]
    # Cheapest beginnings of each length that end with an option, and the rest behind.
    ahead = [more_s_VO + costs.start_s_O]
    behind = [np.broadcast_to(costs.end_s_O, more_s_VO.shape)]
    for _ in range(longest - 1):
        reached_s_VO = (ahead[-1][:, :, None] + costs.border_s_OP).min(axis=1)
        ahead.append(reached_s_VO + more_s_VO)
        left_s_VOP = costs.border_s_OP + (behind[-1] + more_s_VO)[:, None, :]
        behind.append(left_s_VOP.min(axis=2))
    found = []
    for length in range(1, longest + 1):
        places = [ahead[k] + behind[length - 1 - k] for k in range(length)]
        with_s_VO = np.min(places, axis=0)
        found.append(Offers(least_s_V, with_s_VO.min(axis=1), with_s_VO))
    return found


def candidates(
    layer_s_O: np.ndarray, peak_O: np.ndarray, valley_O: np.ndarray
) -> Iterator[Price]:
    """Prices at which three options tie and none is cheaper, or two and one is 0.

    Args:
      layer_s_O: Seconds of a layer.
      peak_O: Bytes of its weights, saved tensors and input.
      valley_O: Bytes of its weights, saved tensors and copy.
    """
    for price in _ties(peak_O, layer_s_O):
        yield Price(price, 0.0)
    for price in _ties(valley_O, layer_s_O):
        yield Price(0.0, price)
    yield from _corners(layer_s_O, peak_O, valley_O)


def _ties(sizes: np.ndarray, seconds: np.ndarray) -> list[float]:
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


def _slope(one: tuple[float, float], two: tuple[float, float]) -> float:
    return (two[1] - one[1]) / (two[0] - one[0])


def _corners(layer_s: np.ndarray, peak: np.ndarray, valley: np.ndarray) -> list[Price]:
    """Prices of both kinds at which three options tie and none is cheaper."""
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

"""The fastest way to fill a number of layers with at most three treatments, exactly.

Layers are equal, so a plan is a sequence of treatments and how many layers each gets.
Its time is linear in these numbers, and so is each condition on its memory: fixed
bytes and the arena's rows up to its inputs, or up to the copies of a segment's first
or last layer. With the first number given, what fits is therefore an interval of the
second number, and the best lies at one of its ends. Sequences that cannot beat a
limit are left out by a bound: Lagrange multipliers on the bytes of inputs ("peak") and
of copies ("valley") turn the conditions into prices.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from mtuner_jax.planning.options import Options

MAX_SEGMENTS = 3
_POINTER_BYTES = 8
_ROUNDING = 1e-9
_SMALL_ROW = 64  # elements of an arena without anything in it


class Filling(NamedTuple):
    """A choice for all layers.

    Attributes:
      seconds: Of one forward and backward pass.
      num_bytes: On a device, transients included.
      sequence: Options in the order of the layers.
      counts: Layers of each.
    """

    seconds: float
    num_bytes: int
    sequence: tuple[int, ...]
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Layers to fill, and what they may take.

    Attributes:
      layers: How many.
      room_bytes: For weights, saved tensors, copies, the arena and transients.
      floor_bytes: Transients that something else needs anyway.
    """

    layers: int
    room_bytes: int
    floor_bytes: int


class Price(NamedTuple):
    """Seconds that a byte is worth: of weights and inputs, and of copies."""

    peak: float
    valley: float


class Offers(NamedTuple):
    """Sequences of so many options at a price; a bound for each number of layers.

    A filling with `layers` takes at least
    `layers * least_s + more_s - (peak + valley) * (room - transient)`.

    Attributes:
      least_s: A layer of the cheapest of its options, its bytes paid.
      more_s: What one layer of each of the others costs more, and the borders.
      level_s: [levels] the least of `more_s` and of `layers` times what `least_s` is
        above that of all options, by transients.
    """

    least_s: np.ndarray
    more_s: np.ndarray
    level_s: np.ndarray


class Filler:
    """Fills layers from one list of options.

    Attributes:
      options: The options.
      scored: Plans looked at so far, those within an interval included.
    """

    def __init__(self, options: Options):
        self.options = options
        self.scored = 0
        self._peak = options.fixed_bytes + options.row_bytes * options.input_rows
        self._valley = options.fixed_bytes + options.row_bytes * options.copy_rows
        self._levels = np.unique(options.transient_bytes)
        lengths = range(1, MAX_SEGMENTS + 1)
        self._sequences = [_sequences(len(options), k) for k in lengths]
        self._borders = [self._border_s(sequences) for sequences in self._sequences]
        self._transients = [
            options.transient_bytes[sequences].max(axis=0)
            for sequences in self._sequences
        ]
        self._prices = self._candidates()
        paid_s = np.array([self._paid_s(price) for price in self._prices])
        self._total = np.array([price.peak + price.valley for price in self._prices])
        # The cheapest layer by level of transients and price, its bytes paid.
        self._least_s = np.array(
            [
                paid_s[:, options.transient_bytes <= level].min(axis=1)
                for level in self._levels
            ]
        )
        self._offers: dict[Price, list[Offers]] = {}

    def prices(self, task: Task) -> list[Price]:
        """What bytes are worth in a task, at each level of transients."""
        room = task.room_bytes - np.maximum(self._levels, task.floor_bytes)
        dual_s = task.layers * self._least_s - self._total * room[:, None]
        best = np.unique(dual_s[room >= 0].argmax(axis=1))
        return [self._prices[index] for index in best]

    def bounds_s(
        self,
        prices: list[Price],
        layers: np.ndarray,
        room_bytes: np.ndarray,
        floor_bytes: np.ndarray,
    ) -> np.ndarray:
        """Seconds that no filling undercuts; inf where none can fit.

        Args:
          prices: Any; each gives a bound.
          layers: [n] layers to fill.
          room_bytes: [n], as in `Task`.
          floor_bytes: [n], as in `Task`.

        Returns:
          [numbers of segments, n].
        """
        bounds = np.full((MAX_SEGMENTS, len(layers)), -np.inf)
        transients = np.maximum(floor_bytes[:, None], self._levels)
        room = room_bytes[:, None] - transients
        for price in prices:
            least = self._paid_s(price).min()
            paid_s = layers[:, None] * least - (price.peak + price.valley) * room
            for number, offers in enumerate(self._offers_at(price)):
                least_s = np.where(room < 0, np.inf, paid_s + offers.level_s)
                bounds[number] = np.maximum(bounds[number], least_s.min(axis=1))
        return bounds

    def best(self, task: Task, segments: int, *, limit_s: float) -> Filling | None:
        """The fastest filling with exactly so many segments, below the limit."""
        if task.layers < segments:
            return None
        kept = self._promising(task, segments, limit_s)
        if not kept.size:
            return None
        sequences = self._sequences[segments - 1][:, kept]
        border_s = self._borders[segments - 1][kept]
        transient = np.maximum(self._transients[segments - 1][kept], task.floor_bytes)
        room = (task.room_bytes - transient)[:, None]
        counts = self._counts(sequences, task.layers, room)
        self.scored += kept.size * _compositions(task.layers, segments)
        fits = (counts > 0).all(axis=0) & (self._bytes(sequences, counts) <= room)
        seconds = self._seconds(sequences, counts) + border_s[:, None]
        seconds = np.where(fits, seconds, np.inf)
        least = seconds.min(initial=np.inf)
        if not least < limit_s:
            return None
        equal = np.nonzero(seconds <= least * (1 + 1e-12))
        taken = self._bytes(sequences, counts) + transient[:, None]
        first = np.lexsort((equal[1], equal[0], taken[equal]))[0]
        row, column = equal[0][first], equal[1][first]
        return Filling(
            float(seconds[row, column]),
            int(taken[row, column]),
            tuple(int(option) for option in sequences[:, row]),
            tuple(int(count) for count in counts[:, row, column]),
        )

    def least_bytes(self, layers: int, floor_bytes: int) -> int:
        """Bytes of the smallest filling with one segment."""
        (options,) = self._sequences[0]
        counts = np.full((1, options.size, 1), layers)
        taken = self._bytes(options[None], counts)[:, 0]
        return int((taken + np.maximum(self._transients[0], floor_bytes)).min())

    def _promising(self, task, segments, limit_s):
        """Indices of sequences whose bound is below the limit."""
        transients = np.maximum(self._transients[segments - 1], task.floor_bytes)
        room = task.room_bytes - transients
        kept = np.flatnonzero(room >= 0)
        for price in self.prices(task) if np.isfinite(limit_s) else []:
            offers = self._offers_at(price)[segments - 1]
            bound_s = task.layers * offers.least_s[kept] + offers.more_s[kept]
            bound_s = bound_s - (price.peak + price.valley) * room[kept]
            kept = kept[bound_s < limit_s]
        return kept

    def _candidates(self) -> list[Price]:
        """Prices at which three options tie, or two and one price is 0."""
        found = {Price(0.0, 0.0)}
        for level in self._levels:
            allowed = self.options.transient_bytes <= level
            layer_s = self.options.layer_s[allowed]
            peak, valley = self._peak[allowed], self._valley[allowed]
            found.update(Price(price, 0.0) for price in _ties(peak, layer_s))
            found.update(Price(0.0, price) for price in _ties(valley, layer_s))
            found.update(_corners(layer_s, peak, valley))
        return sorted(found)

    def _paid_s(self, price):
        paid = price.peak * self._peak + price.valley * self._valley
        return self.options.layer_s + paid

    def _offers_at(self, price):
        if price not in self._offers:
            paid_s = self._paid_s(price)
            offers = []
            for sequences, borders, transients in zip(
                self._sequences, self._borders, self._transients, strict=True
            ):
                each_s = [paid_s[options] for options in sequences]
                least_s, all_s = each_s[0], each_s[0]
                for option_s in each_s[1:]:
                    least_s, all_s = np.minimum(least_s, option_s), all_s + option_s
                more_s = all_s + borders
                over_s = more_s - len(each_s) * paid_s.min()
                level_s = [
                    over_s[transients == level].min(initial=np.inf)
                    for level in self._levels
                ]
                more_s = more_s - len(each_s) * least_s
                offers.append(Offers(least_s, more_s, np.array(level_s)))
            self._offers[price] = offers
        return self._offers[price]

    def _counts(self, sequences, layers, room):
        """[segments, sequences, candidates]; some may not fit."""
        segments, number = sequences.shape
        if segments == 1:
            return np.full((1, number, 1), layers)
        first = np.arange(1, layers - segments + 2)
        first = np.broadcast_to(first, (number, first.size))
        if segments == 2:
            return np.stack([first, layers - first])
        low, high = self._interval(sequences, first, layers, room)
        faster = self.options.layer_s[sequences[1]] < self.options.layer_s[sequences[2]]
        second = np.where(faster[:, None], high, low)
        return np.stack([first, second, layers - first - second])

    def _interval(self, sequences, first, layers, room):
        """Least and largest number of layers of the second of three segments."""
        low, high = np.ones_like(first), layers - 1 - first
        one = self._conditions(sequences, np.stack([first, low, high]))
        two = self._conditions(sequences, np.stack([first, low + 1, high - 1]))
        for at_one, at_two in zip(one, two, strict=True):
            slope, spare = at_two - at_one, room - at_one
            steps = np.floor_divide(spare, np.where(slope == 0, 1, slope))
            high = np.where(slope > 0, np.minimum(high, 1 + steps), high)
            needed = -np.floor_divide(spare, np.where(slope < 0, -slope, 1))
            low = np.where(slope < 0, np.maximum(low, 1 + needed), low)
            high = np.where((slope == 0) & (spare < 0), 0, high)
        return low, np.where(low <= high, high, 0)

    def _bytes(self, sequences, counts):
        conditions = self._conditions(sequences, counts)
        largest = conditions[0]
        for condition in conditions[1:]:
            largest = np.maximum(largest, condition)
        return largest

    def _conditions(self, sequences, counts):
        """Bytes without transients, each linear in counts; the largest is needed."""
        options, width = self.options, self.options.row_bytes
        fixed, inputs, copies = (
            values[sequences][:, :, None]
            for values in (options.fixed_bytes, options.input_rows, options.copy_rows)
        )
        has_copies = (copies > 0).any(axis=0)
        base = (fixed * counts).sum(axis=0) + _POINTER_BYTES * has_copies
        conditions = [
            base + _SMALL_ROW * options.element_bytes,
            base + width * (inputs * counts).sum(axis=0),
        ]
        left = (copies * counts).sum(axis=0)
        before = np.zeros_like(left)
        for input_rows, copy_rows, count in zip(inputs, copies, counts, strict=True):
            at_first = before + input_rows + left
            before = before + input_rows * count
            left = left - copy_rows * count
            at_last = before + copy_rows + left
            for rows in (at_first, at_last):
                conditions.append(base + width * np.where(copy_rows > 0, rows, 0))
        return conditions

    def _seconds(self, sequences, counts):
        return (self.options.layer_s[sequences][:, :, None] * counts).sum(axis=0)

    def _border_s(self, sequences):
        options = self.options
        seconds = options.start_s[sequences[0]] + options.end_s[sequences[-1]]
        for one, two in itertools.pairwise(sequences):
            seconds = seconds + options.border_s[one, two]
        return seconds


def _sequences(number: int, length: int) -> np.ndarray:
    """[length, sequences] of different options."""
    grid = np.indices((number,) * length).reshape(length, -1)
    different = np.ones(grid.shape[1], bool)
    for one in range(length):
        for two in range(one):
            different &= grid[one] != grid[two]
    return grid[:, different]


def _ties(sizes, seconds) -> list[float]:
    """Prices of a byte at which the cheapest option changes, and 0.

    They are the slopes of the lower convex hull of seconds over sizes.
    """
    hull: list[tuple[float, float]] = []
    for point in sorted(zip(sizes.tolist(), seconds.tolist(), strict=True)):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return [0.0, *(-_slope(*pair) for pair in itertools.pairwise(hull))]


def _corners(layer_s, peak, valley) -> list[Price]:
    """Prices at which three options tie and no other is cheaper."""
    prices = np.stack([layer_s, peak, valley])
    covered = (prices[:, :, None] <= prices[:, None, :]).all(axis=0)
    beaten = (covered & ~covered.T).any(axis=0)
    layer_s, peak, valley = np.unique(prices[:, ~beaten], axis=1)
    a, b, c = (
        np.array(list(itertools.combinations(range(layer_s.size), 3))).reshape(-1, 3).T
    )
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


def _slope(one, two):
    return (two[1] - one[1]) / (two[0] - one[0])


def _compositions(layers: int, segments: int) -> int:
    """In how many ways so many layers split into so many segments."""
    return (1, layers - 1, (layers - 1) * (layers - 2) // 2)[segments - 1]

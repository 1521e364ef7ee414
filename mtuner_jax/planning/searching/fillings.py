"""The fastest way to fill a number of layers with at most three treatments, exactly.

Layers are equal, so a plan is a sequence of treatments and how many layers each gets.
Its time is linear in these numbers, and so is each condition on its memory: fixed
bytes and the arena's rows up to its inputs, or up to the copies of a segment's first
or last layer. With the first number given, what fits is therefore an interval of the
second number, and the best lies at one of its ends; loops so short that XLA unrolls
them cost other bytes and are looked at one by one. Sequences that cannot beat a limit
are left out by a bound (`prices`).
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from mtuner_jax.planning.searching import prices
from mtuner_jax.planning.searching.options import Options
from mtuner_jax.planning.searching.prices import Price

MAX_SEGMENTS = 3
_POINTER_BYTES = 8
_SMALL_ROW = 64  # elements of an arena without anything in it
_SHORT = (1, 2)  # layers in loops that may be unrolled
_SAME = 1e-12
_AT_ONCE = 256  # sequences


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


class Filler:
    """Fills layers from one list of options.

    Attributes:
      options: The options.
      scored: Plans looked at so far, those within an interval included.
    """

    def __init__(self, options: Options):
        self.options = options
        self.scored = 0
        self._sizes = (
            options.fixed_bytes + options.row_bytes * options.input_rows,
            options.fixed_bytes + options.row_bytes * options.copy_rows,
        )
        self._levels = np.unique(options.transient_bytes)
        self._allowed = options.transient_bytes <= self._levels[:, None]
        # Bytes of the smallest layer by level of transients.
        self._smallest = np.array(
            [
                max(size[allowed].min() for size in self._sizes)
                for allowed in self._allowed
            ]
        )
        # What the first segment, and a further one, cost at least.
        self._first = np.minimum(0, options.unrolled_bytes)
        self._further = self._first + options.further_bytes
        self._prices = self._candidates()
        self._total = np.array([price.peak + price.valley for price in self._prices])
        paid_s = np.array([self._paid_s(price) for price in self._prices])
        # The cheapest layer by level of transients and price, its bytes paid.
        self._least_s = np.array([paid_s[:, row].min(axis=1) for row in self._allowed])
        self._offers: dict[Price, list[prices.Offers]] = {}

    def prices(self, task: Task) -> list[Price]:
        """What bytes are worth in a task, at each level of transients."""
        taken = np.maximum(self._levels, task.floor_bytes)
        room = task.room_bytes - taken
        dual_s = task.layers * self._least_s - self._total * room[:, None]
        best = np.unique(dual_s[room >= task.layers * self._smallest].argmax(axis=1))
        return [self._prices[index] for index in best]

    def bounds_s(
        self,
        at: list[Price],
        layers: np.ndarray,
        room_bytes: np.ndarray,
        transient_bytes: np.ndarray,
    ) -> np.ndarray:
        """Seconds that no filling undercuts; inf where none can fit.

        Args:
          at: Any prices; each gives a bound.
          layers: [n] layers to fill.
          room_bytes: [n], as in `Task`.
          transient_bytes: [n] whatever the layers are.

        Returns:
          [numbers of segments, n].
        """
        transients = np.maximum(transient_bytes[:, None], self._levels)
        room = room_bytes[:, None] - transients
        full = room < layers[:, None] * self._smallest
        bounds = np.where(full.all(axis=1), np.inf, -np.inf)
        bounds = np.repeat(bounds[None], MAX_SEGMENTS, axis=0)
        for price in at:
            paid_s = (price.peak + price.valley) * room
            for number, offers in enumerate(self._offers_at(price)):
                least_s = layers[:, None] * offers.least_s + offers.every_s - paid_s
                least_s = np.where(full, np.inf, least_s).min(axis=1)
                bounds[number] = np.maximum(bounds[number], least_s)
        return bounds

    def best(self, task: Task, segments: int, *, limit_s: float) -> Filling | None:
        """The fastest filling with exactly so many segments, below the limit.

        Without a limit, one that fewer segments undercut may be left out.
        """
        if segments > 1 and np.isinf(limit_s):
            simpler = self.best(task, segments - 1, limit_s=limit_s)
            if simpler is None:  # and so nothing fits: the smallest has one segment
                return None
            limit_s = simpler.seconds
        if task.layers < segments:
            return None
        return self._search(task, segments, limit_s)

    def _search(self, task, segments, limit_s):
        """Looks at sequences in the order of their bounds, some at a time."""
        sequences, bound_s = self._promising(task, segments, limit_s)
        order = np.argsort(bound_s, kind="stable")
        best = None
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            if bound_s[some[0]] >= limit_s:
                break
            found = self._best_of(sequences[:, some], task, limit_s)
            if found and (best is None or found[:2] < best[:2]):
                best = found
                limit_s = found.seconds * (1 + _SAME)  # as fast, but smaller
        return best

    def _best_of(self, sequences, task, limit_s):
        transient = self._transients(sequences, task)
        room = (task.room_bytes - transient)[:, None]
        counts = self._counts(sequences, task.layers, room)
        segments, number = sequences.shape
        self.scored += number * _compositions(task.layers, segments)
        seconds = (self.options.layer_s[sequences][:, :, None] * counts).sum(axis=0)
        seconds = seconds + self._border_s(sequences)[:, None]
        taken = self._bytes(sequences, counts)
        fits = (counts > 0).all(axis=0) & (taken <= room)
        seconds = np.where(fits, seconds, np.inf)
        least = seconds.min(initial=np.inf)
        if not least < limit_s:
            return None
        equal = np.nonzero(seconds <= least * (1 + _SAME))
        taken = taken + transient[:, None]
        first = np.lexsort((equal[1], equal[0], taken[equal]))[0]
        row, column = equal[0][first], equal[1][first]
        return Filling(
            float(seconds[row, column]),
            int(taken[row, column]),
            tuple(int(option) for option in sequences[:, row]),
            tuple(int(count) for count in counts[:, row, column]),
        )

    def _promising(self, task, segments, limit_s):
        """Sequences whose bounds are below the limit, and the bounds."""
        at = self.prices(task) if np.isfinite(limit_s) else []
        room = task.room_bytes - np.maximum(self._levels, task.floor_bytes)
        full = room < task.layers * self._smallest
        fits = np.where(full, np.inf, 0.0)[:, None] + np.where(self._allowed, 0, np.inf)
        kept = np.isfinite(fits).any(axis=0)
        for price in at:
            offers = self._offers_at(price)[segments - 1]
            paid_s = task.layers * offers.least_s - (price.peak + price.valley) * room
            kept &= (paid_s[:, None] + offers.with_s + fits).min(axis=0) < limit_s
        sequences = self._sequences(np.flatnonzero(kept), at, task, (segments, limit_s))
        left = task.room_bytes - self._transients(sequences, task)
        further = self._further[sequences[1:]].sum(axis=0)
        left = left - self._first[sequences[0]] - further
        border_s = self._border_s(sequences)
        bounds_s = np.where(left < 0, np.inf, -np.inf)
        for price in at:
            paid_s = self._paid_s(price)[sequences]
            bound_s = (task.layers - segments) * paid_s.min(axis=0) + paid_s.sum(axis=0)
            bound_s = bound_s + border_s - (price.peak + price.valley) * left
            bounds_s = np.maximum(bounds_s, bound_s)
        below = bounds_s < limit_s
        return sequences[:, below], bounds_s[below]

    def _sequences(self, kept, at, task, segments_and_limit):
        """[segments, sequences] of different options whose cost is below the limit."""
        segments, limit_s = segments_and_limit
        grid = _Grid(len(kept), segments)
        options = self.options
        transient = np.zeros((1,) * segments)
        for place in range(segments):
            at_place = grid.spread(options.transient_bytes[kept], place)
            transient = np.maximum(transient, at_place)
        room = task.room_bytes - np.maximum(transient, task.floor_bytes)
        border_s = options.border_s[np.ix_(kept, kept)]
        below = grid.different() & (room >= 0)
        for price in at:
            paid_s, total = self._paid_s(price), price.peak + price.valley
            least = paid_s.min()
            cost_s = task.layers * least - total * room
            more_s = paid_s[kept] - least
            further_s = border_s + (total * self._further + paid_s - least)[kept]
            first_s = options.start_s[kept] + more_s + total * self._first[kept]
            cost_s = cost_s + grid.spread(first_s, 0)
            for place in range(1, segments):
                cost_s = cost_s + grid.spread(further_s, place - 1)
            cost_s = cost_s + grid.spread(options.end_s[kept], segments - 1)
            below &= cost_s < limit_s
        return kept[np.stack(np.nonzero(below))]

    def _counts(self, sequences, layers, room):
        """[segments, sequences, candidates]; some may not fit."""
        segments, number = sequences.shape
        if segments == 1:
            return np.full((1, number, 1), layers)
        first = np.arange(1, layers - segments + 2)
        first = np.broadcast_to(first, (number, first.size))
        if segments == 2:
            return np.stack([first, layers - first])
        seconds = [self._second(sequences, first, layers, room)]
        for short in _SHORT:
            seconds += [np.full_like(first, short), layers - first - short]
        return np.concatenate(
            [np.stack([first, second, layers - first - second]) for second in seconds],
            axis=2,
        )

    def _second(self, sequences, first, layers, room):
        """Best number of layers of the second of three segments, none unrolled."""
        loops = self.options.loop_layers[sequences][:, :, None]
        low, high = np.broadcast_to(loops[1], first.shape), layers - first - loops[2]
        looped = 2 * self.options.further_bytes
        extra = self._extra_bytes(sequences[:1], first[None]) + looped
        third = layers - first - low
        one = self._conditions(sequences, np.stack([first, low, third]), extra)
        moved = np.stack([first, low + 1, third - 1])
        two = self._conditions(sequences, moved, extra)
        start = low
        for at_one, at_two in zip(one, two, strict=True):
            slope, spare = at_two - at_one, room - at_one
            steps = spare // np.where(slope == 0, 1, np.abs(slope))
            high = np.where(slope > 0, np.minimum(high, start + steps), high)
            low = np.where(slope < 0, np.maximum(low, start - steps), low)
            high = np.where((slope == 0) & (spare < 0), 0, high)
        faster = self.options.layer_s[sequences[1]] < self.options.layer_s[sequences[2]]
        return np.where(low <= high, np.where(faster[:, None], high, low), 0)

    def _bytes(self, sequences, counts):
        extra = self._extra_bytes(sequences, counts)
        conditions = self._conditions(sequences, counts, extra)
        largest = conditions[0]
        for condition in conditions[1:]:
            largest = np.maximum(largest, condition)
        return largest

    def _extra_bytes(self, sequences, counts):
        """What segments cost beside their layers."""
        options = self.options
        unrolled = counts < options.loop_layers[sequences][:, :, None]
        each = options.unrolled_bytes[sequences][:, :, None]
        further = (len(sequences) - 1) * options.further_bytes
        return np.where(unrolled, each, 0).sum(axis=0) + further

    def _conditions(self, sequences, counts, extra_bytes):
        """Bytes without transients, each linear in counts; the largest is needed."""
        options, width = self.options, self.options.row_bytes
        fixed, inputs, copies = (
            values[sequences][:, :, None]
            for values in (options.fixed_bytes, options.input_rows, options.copy_rows)
        )
        has_copies = (copies > 0).any(axis=0)
        base = (fixed * counts).sum(axis=0) + _POINTER_BYTES * has_copies + extra_bytes
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

    def _border_s(self, sequences):
        options = self.options
        seconds = options.start_s[sequences[0]] + options.end_s[sequences[-1]]
        for one, two in itertools.pairwise(sequences):
            seconds = seconds + options.border_s[one, two]
        return seconds

    def _transients(self, sequences, task):
        """Bytes of transients with each sequence."""
        layers = self.options.transient_bytes[sequences].max(axis=0)
        return np.maximum(layers, task.floor_bytes)

    def _candidates(self):
        """Prices worth trying, at each level of transients."""
        found = {Price(0.0, 0.0)}
        for level in self._levels:
            allowed = self.options.transient_bytes <= level
            sizes = (size[allowed] for size in self._sizes)
            found.update(prices.candidates(self.options.layer_s[allowed], *sizes))
        return sorted(found)

    def _paid_s(self, price):
        paid = price.peak * self._sizes[0] + price.valley * self._sizes[1]
        return self.options.layer_s + paid

    def _offers_at(self, price):
        if price not in self._offers:
            paid_s = np.where(self._allowed, self._paid_s(price), np.inf)
            total = price.peak + price.valley
            costs = prices.Sequence(
                self.options.start_s + total * self._first,
                self.options.border_s + total * self._further,
                self.options.end_s,
            )
            self._offers[price] = prices.offers(paid_s, costs, MAX_SEGMENTS)
        return self._offers[price]


class _Grid:
    """All sequences of so many of `number` options as an array of many dims."""

    def __init__(self, number: int, length: int):
        self.number, self.length = number, length

    def spread(self, values: np.ndarray, place: int) -> np.ndarray:
        """What depends on the option at a place, or on a pair from it on."""
        after = self.length - place - values.ndim
        return values.reshape((1,) * place + values.shape + (1,) * after)

    def different(self) -> np.ndarray:
        """Which sequences have no option twice."""
        places = np.indices((self.number,) * self.length, sparse=True)
        allowed = np.ones((self.number,) * self.length, bool)
        for one, two in itertools.combinations(places, 2):
            allowed &= one != two
        return allowed


def _compositions(layers: int, segments: int) -> int:
    """In how many ways so many layers split into so many segments."""
    return (1, layers - 1, (layers - 1) * (layers - 2) // 2)[segments - 1]

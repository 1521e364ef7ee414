"""Lower bounds on the time of fillings, at prices of bytes (`prices`).

At a price a filling takes no less than `layers * (the cheapest layer, its bytes paid)`,
less the price of all room, plus what borders and further segments cost. There is one
such bound for each level of transients, since a filling that holds to a level leaves
its room free; and for each price, of which the best is used.

Letters as in `options`: O options, V levels of transients, P prices, G segments,
S sequences, N cases.
"""

import dataclasses

import numpy as np

from mtuner_jax.planning.searching import prices
from mtuner_jax.planning.searching.allowed import MAX_SEGMENTS
from mtuner_jax.planning.searching.options import Options
from mtuner_jax.planning.searching.prices import Price


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Layers to fill, and what they may take.

    Attributes:
      layers: How many.
      room_bytes: Bytes for weights, saved tensors, copies, the arena and transients.
      floor_bytes: Transients that something else needs anyway.
    """

    layers: int
    room_bytes: int
    floor_bytes: int


class Bounds:
    """Bounds on fillings from one list of options."""

    def __init__(self, options: Options):
        self.options = options
        fixed_O = options.rest_O + options.stack_O
        # Bytes of a layer where inputs fill the arena, and where copies do.
        self._peak_O = fixed_O + options.row_bytes * options.input_rows_O
        self._valley_O = fixed_O + options.row_bytes * options.copy_rows_O
        self._level_V = np.unique(options.transient_O)
        self._within_VO = options.transient_O <= self._level_V[:, None]
        self._smallest_V = np.maximum(
            *(
                np.where(self._within_VO, size_O, np.iinfo(int).max).min(axis=1)
                for size_O in (self._peak_O, self._valley_O)
            )
        )
        # Bytes that the first segment, and a further one, cost at least.
        self._first_O = np.minimum(0, options.unrolled_O)
        self._further_O = self._first_O + options.further_bytes
        self._prices = self._candidates()
        self._total_P = np.array([price.peak + price.valley for price in self._prices])
        paid_s_PO = np.array([self._paid_s_O(price) for price in self._prices])
        self._least_s_VP = np.array(
            [paid_s_PO[:, within_O].min(axis=1) for within_O in self._within_VO]
        )
        self._offers: dict[Price, list[prices.Offers]] = {}

    def best_prices(self, task: Task) -> list[Price]:
        """What bytes are worth in a task, at each level of transients."""
        room_V = self._room_V(task)
        dual_s_VP = task.layers * self._least_s_VP - self._total_P * room_V[:, None]
        possible_V = room_V >= task.layers * self._smallest_V
        best = np.unique(dual_s_VP[possible_V].argmax(axis=1))
        return [self._prices[index] for index in best]

    def cases(
        self,
        at: list[Price],
        layers_N: np.ndarray,
        room_N: np.ndarray,
        transient_N: np.ndarray,
    ) -> np.ndarray:
        """Seconds that no filling undercuts; inf where none can fit.

        Args:
          at: Any prices; each gives a bound.
          layers_N: Layers to fill.
          room_N: Bytes, as in `Task`.
          transient_N: Bytes of transients whatever the layers are.

        Returns:
          [numbers of segments, N].
        """
        room_NV = room_N[:, None] - np.maximum(transient_N[:, None], self._level_V)
        full_NV = room_NV < layers_N[:, None] * self._smallest_V
        none_N = np.where(full_NV.all(axis=1), np.inf, -np.inf)
        bound_s_GN = np.repeat(none_N[None], MAX_SEGMENTS, axis=0)
        for price in at:
            paid_s_NV = (price.peak + price.valley) * room_NV
            for number, offers in enumerate(self._offers_at(price)):
                least_s_NV = layers_N[:, None] * offers.least_s_V + offers.every_s_V
                least_s_NV = np.where(full_NV, np.inf, least_s_NV - paid_s_NV)
                bound_s_GN[number] = np.maximum(
                    bound_s_GN[number], least_s_NV.min(axis=1)
                )
        return bound_s_GN

    def sequences(
        self, task: Task, segments: int, limit_s: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sequences of different options that may beat the limit, and their bounds.

        Returns:
          [G, S] options, [S] seconds.
        """
        at = self.best_prices(task) if np.isfinite(limit_s) else []
        kept = self._promising(task, segments, limit_s, at)
        grid = _Grid(len(kept), segments)
        transient = grid.over(np.maximum, self.options.transient_O[kept])
        room = task.room_bytes - np.maximum(transient, task.floor_bytes)
        further = [grid.at(self._further_O[kept], place) for place in range(segments)]
        left = room - grid.at(self._first_O[kept], 0) - sum(further[1:])
        border_s = self._border_s(kept, grid)
        bound_s = np.where(left < 0, np.inf, -np.inf)
        for price in at:
            paid_s_O = self._paid_s_O(price)[kept]
            least_s = grid.over(np.minimum, paid_s_O)
            every_s = grid.over(np.add, paid_s_O) + border_s
            paid_s = (task.layers - segments) * least_s + every_s
            bound_s = np.maximum(bound_s, paid_s - (price.peak + price.valley) * left)
        below = np.nonzero(grid.different() & (room >= 0) & (bound_s < limit_s))
        return kept[np.stack(below)], bound_s[below]

    def _promising(
        self, task: Task, segments: int, limit_s: float, at: list[Price]
    ) -> np.ndarray:
        """Options that some sequence below the limit may have, at some level."""
        room_V = self._room_V(task)
        full_V = room_V < task.layers * self._smallest_V
        fits_VO = ~full_V[:, None] & self._within_VO
        kept_O = fits_VO.any(axis=0)
        for price in at:
            offers = self._offers_at(price)[segments - 1]
            paid_s_V = task.layers * offers.least_s_V
            paid_s_V = paid_s_V - (price.peak + price.valley) * room_V
            least_s_VO = np.where(fits_VO, paid_s_V[:, None] + offers.with_s_VO, np.inf)
            kept_O &= least_s_VO.min(axis=0) < limit_s
        return np.flatnonzero(kept_O)

    def _border_s(self, kept: np.ndarray, grid: "_Grid") -> np.ndarray:
        """What borders cost, for all sequences of the options that are left."""
        options = self.options
        border_s_OP = options.border_s_OP[np.ix_(kept, kept)]
        border_s = grid.at(options.start_s_O[kept], 0)
        border_s = border_s + grid.at(options.end_s_O[kept], grid.length - 1)
        for place in range(grid.length - 1):
            border_s = border_s + grid.at(border_s_OP, place)
        return border_s

    def _room_V(self, task: Task) -> np.ndarray:
        """Bytes that are left to layers whose transients hold to a level."""
        return task.room_bytes - np.maximum(self._level_V, task.floor_bytes)

    def _paid_s_O(self, price: Price) -> np.ndarray:
        """Seconds of a layer, its bytes paid."""
        paid_s_O = price.peak * self._peak_O + price.valley * self._valley_O
        return self.options.layer_s_O + paid_s_O

    def _candidates(self) -> list[Price]:
        """Prices worth trying, at each level of transients."""
        found = {Price(0.0, 0.0)}
        for within_O in self._within_VO:
            layers = (self.options.layer_s_O, self._peak_O, self._valley_O)
            found.update(prices.candidates(*(of_O[within_O] for of_O in layers)))
        return sorted(found)

    def _offers_at(self, price: Price) -> list[prices.Offers]:
        if price not in self._offers:
            total = price.peak + price.valley
            costs = prices.Sequence(
                self.options.start_s_O + total * self._first_O,
                self.options.border_s_OP + total * self._further_O,
                self.options.end_s_O,
            )
            paid_s_VO = np.where(self._within_VO, self._paid_s_O(price), np.inf)
            self._offers[price] = prices.offers(paid_s_VO, costs, MAX_SEGMENTS)
        return self._offers[price]


class _Grid:
    """All sequences of so many of `number` options, as arrays of `length` dims."""

    def __init__(self, number: int, length: int):
        self.number, self.length = number, length

    def at(self, values: np.ndarray, place: int) -> np.ndarray:
        """What depends on the option at a place, or on the pair from there on."""
        after = self.length - place - values.ndim
        return values.reshape((1,) * place + values.shape + (1,) * after)

    def over(self, ufunc: np.ufunc, values_O: np.ndarray) -> np.ndarray:
        """Puts what depends on one option together over all places."""
        result = self.at(values_O, 0)
        for place in range(1, self.length):
            result = ufunc(result, self.at(values_O, place))
        return result

    def different(self) -> np.ndarray:
        """Which sequences have no option twice."""
        places = np.indices((self.number,) * self.length, sparse=True)
        allowed = np.ones((self.number,) * self.length, bool)
        for index, one in enumerate(places):
            for two in places[index + 1 :]:
                allowed &= one != two
        return allowed

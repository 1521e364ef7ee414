"""Lower bounds on the time of fillings, at prices of bytes (`prices`).

At a price a filling takes no less than `layers * (the cheapest layer, its bytes paid)`,
less the price of all room, plus what borders and further segments cost. There is one
such bound for each level of transients, since a filling that holds to a level leaves
its room free; and for each price, of which the best is used.

Letters as in `options`: O options, V levels of transients, P prices, G segments,
S sequences, N cases.
"""

import dataclasses
import itertools

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
        sequences_GS = kept[self._below(kept, task, segments, limit_s, at)]
        options = self.options
        transient_S = options.transient_O[sequences_GS].max(axis=0)
        room_S = task.room_bytes - np.maximum(transient_S, task.floor_bytes)
        further_S = self._further_O[sequences_GS[1:]].sum(axis=0)
        left_S = room_S - self._first_O[sequences_GS[0]] - further_S
        border_s_S = options.ends_s(sequences_GS)
        bound_s_S = np.where(left_S < 0, np.inf, -np.inf)
        for price in at:
            paid_s_GS = self._paid_s_O(price)[sequences_GS]
            paid_s_S = (task.layers - segments) * paid_s_GS.min(axis=0)
            paid_s_S = paid_s_S + paid_s_GS.sum(axis=0) + border_s_S
            paid_s_S = paid_s_S - (price.peak + price.valley) * left_S
            bound_s_S = np.maximum(bound_s_S, paid_s_S)
        below_S = bound_s_S < limit_s
        return sequences_GS[:, below_S], bound_s_S[below_S]

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

    def _below(
        self,
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
        grid, options = _Grid(len(kept), segments), self.options
        transient = grid.largest(options.transient_O[kept])
        room = task.room_bytes - np.maximum(transient, task.floor_bytes)
        below = grid.different() & (room >= 0)
        border_s_OP = options.border_s_OP[np.ix_(kept, kept)]
        for price in at:
            total, paid_s_O = price.peak + price.valley, self._paid_s_O(price)
            least_s = paid_s_O.min()
            more_s_O = paid_s_O[kept] - least_s
            first_s_O = options.start_s_O[kept] + total * self._first_O[kept]
            behind_s_OP = border_s_OP + (total * self._further_O[kept] + more_s_O)
            most_s = limit_s - task.layers * least_s + total * room
            below &= (
                grid.chained(first_s_O + more_s_O, behind_s_OP, options.end_s_O[kept])
                < most_s
            )
        return np.stack(np.nonzero(below))

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

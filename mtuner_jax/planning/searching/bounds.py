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
    """Bounds on fillings from one list of options.

    Attributes:
      options: The options.
      peak_O: Bytes of a layer where inputs fill the arena.
      valley_O: Bytes of a layer where copies do.
      level_V: Transients that options have.
      within_VO: Whether an option's transients are within a level.
      smallest_V: Bytes of the smallest layer within a level.
      first_O: Bytes that a first segment costs at least.
      further_O: Bytes that a further segment costs at least.
    """

    def __init__(self, options: Options):
        self.options = options
        fixed_O = options.rest_O + options.stack_O
        # Bytes of a layer where inputs fill the arena, and where copies do.
        self.peak_O = fixed_O + options.row_bytes * options.input_rows_O
        self.valley_O = fixed_O + options.row_bytes * options.copy_rows_O
        self.level_V = np.unique(options.transient_O)
        self.within_VO = options.transient_O <= self.level_V[:, None]
        self.smallest_V = np.maximum(
            *(
                np.where(self.within_VO, size_O, np.iinfo(int).max).min(axis=1)
                for size_O in (self.peak_O, self.valley_O)
            )
        )
        # Bytes that the first segment, and a further one, cost at least.
        self.first_O = np.minimum(0, options.unrolled_O)
        self.further_O = self.first_O + options.further_bytes
        self._prices = self._candidates()
        self._total_P = np.array([price.peak + price.valley for price in self._prices])
        paid_s_PO = np.array([self.paid_s_O(price) for price in self._prices])
        self._least_s_VP = np.array(
            [paid_s_PO[:, within_O].min(axis=1) for within_O in self.within_VO]
        )
        self._offers: dict[Price, list[prices.Offers]] = {}

    def best_prices(self, task: Task) -> list[Price]:
        """What bytes are worth in a task, at each level of transients."""
        room_V = self.room_V(task)
        dual_s_VP = task.layers * self._least_s_VP - self._total_P * room_V[:, None]
        possible_V = room_V >= task.layers * self.smallest_V
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
        room_NV = room_N[:, None] - np.maximum(transient_N[:, None], self.level_V)
        full_NV = room_NV < layers_N[:, None] * self.smallest_V
        none_N = np.where(full_NV.all(axis=1), np.inf, -np.inf)
        bound_s_GN = np.repeat(none_N[None], MAX_SEGMENTS, axis=0)
        for price in at:
            paid_s_NV = (price.peak + price.valley) * room_NV
            for number, offers in enumerate(self.offers_at(price)):
                least_s_NV = layers_N[:, None] * offers.least_s_V + offers.every_s_V
                least_s_NV = np.where(full_NV, np.inf, least_s_NV - paid_s_NV)
                bound_s_GN[number] = np.maximum(
                    bound_s_GN[number], least_s_NV.min(axis=1)
                )
        return bound_s_GN

    def room_V(self, task: Task) -> np.ndarray:
        """Bytes that are left to layers whose transients hold to a level."""
        return task.room_bytes - np.maximum(self.level_V, task.floor_bytes)

    def paid_s_O(self, price: Price) -> np.ndarray:
        """Seconds of a layer, its bytes paid."""
        paid_s_O = price.peak * self.peak_O + price.valley * self.valley_O
        return self.options.layer_s_O + paid_s_O

    def _candidates(self) -> list[Price]:
        """Prices worth trying, at each level of transients."""
        found = {Price(0.0, 0.0)}
        for within_O in self.within_VO:
            layers = (self.options.layer_s_O, self.peak_O, self.valley_O)
            found.update(prices.candidates(*(of_O[within_O] for of_O in layers)))
        return sorted(found)

    def offers_at(self, price: Price) -> list[prices.Offers]:
        """What sequences of 1, 2, ... options cost at a price."""
        if price not in self._offers:
            total = price.peak + price.valley
            costs = prices.Sequence(
                self.options.start_s_O + total * self.first_O,
                self.options.border_s_OP + total * self.further_O,
                self.options.end_s_O,
            )
            paid_s_VO = np.where(self.within_VO, self.paid_s_O(price), np.inf)
            self._offers[price] = prices.offers(paid_s_VO, costs, MAX_SEGMENTS)
        return self._offers[price]

"""How many layers each option of a sequence gets: all counts that can be best.

The time of a sequence is linear in its counts, and so is each condition on its memory:
fixed bytes and the arena's rows up to its inputs, or up to the copies of a segment's
first or last layer. With the first count given, what fits is therefore an interval of
the second count, and the best lies at one of its ends; loops so short that XLA unrolls
them cost other bytes and are looked at one by one.

Letters as in `options`: G segments, S sequences, C candidates.
"""

import dataclasses
import functools

import numpy as np

from mtuner_jax.planning.costs import arena_layouts, forecasts
from mtuner_jax.planning.costs.arena_layouts import Rows
from mtuner_jax.planning.searching.options import Options

_SHORT = (1, 2)  # layers in loops that may be unrolled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """Counts of the segments of some sequences, and their price.

    Attributes:
      counts_GSC: Layers; one below 1 is no filling.
      seconds_SC: Seconds of all layers, without borders.
      bytes_SC: What they take, without transients.
    """

    counts_GSC: np.ndarray
    seconds_SC: np.ndarray
    bytes_SC: np.ndarray


def candidates(
    options: Options, sequences_GS: np.ndarray, *, layers: int, room_S: np.ndarray
) -> Candidates:
    """Counts of so many layers that can be best; some may not fit.

    Args:
      options: What sequences are of.
      sequences_GS: Indices of options, 1 to 3 segments.
      layers: Layers to fill.
      room_S: Bytes for a sequence's layers, without transients.
    """
    parts = _Parts(options, sequences_GS)
    if len(sequences_GS) == 3:
        counts_GSC = parts.three(layers, room_S)
    else:
        counts_GSC = parts.up_to_two(layers)
    needed = parts.conditions(counts_GSC, parts.extra(counts_GSC))
    return Candidates(
        counts_GSC=counts_GSC,
        seconds_SC=(parts.layer_s_GS1 * counts_GSC).sum(axis=0),
        bytes_SC=functools.reduce(np.maximum, needed),
    )


class _Parts:
    """What the options of sequences cost, by segment and sequence: [G, S, 1]."""

    def __init__(self, options: Options, sequences_GS: np.ndarray):
        def of(values_O: np.ndarray) -> np.ndarray:
            return values_O[sequences_GS][:, :, None]

        self.options = options
        self.layer_s_GS1 = of(options.layer_s_O)
        self.fixed_GS1 = of(options.rest_O + options.stack_O)
        self.input_rows_GS1 = of(options.input_rows_O)
        self.copy_rows_GS1 = of(options.copy_rows_O)
        self.loops_GS1 = of(options.loop_layers_O)
        self.unrolled_GS1 = of(options.unrolled_O)

    def up_to_two(self, layers: int) -> np.ndarray:
        """[G, S, C] of one or two segments: all counts there are."""
        number_segments, number, _ = self.fixed_GS1.shape
        if number_segments == 1:
            return np.full((1, number, 1), layers)
        first_SC = self._first(layers)
        return np.stack([first_SC, layers - first_SC])

    def three(self, layers: int, room_S: np.ndarray) -> np.ndarray:
        """[G, S, C] of three segments: for each first count, the best second ones."""
        first_SC = self._first(layers)
        seconds = [self._best_second(first_SC, layers, room_S[:, None])]
        for short in _SHORT:  # in the second segment, then in the third
            seconds += [np.full_like(first_SC, short), layers - first_SC - short]
        return np.concatenate(
            [
                np.stack([first_SC, second_SC, layers - first_SC - second_SC])
                for second_SC in seconds
            ],
            axis=2,
        )

    def extra(self, counts_GSC: np.ndarray) -> np.ndarray:
        """[S, C] bytes that segments cost beside their layers."""
        unrolled_GSC = np.where(counts_GSC < self.loops_GS1, self.unrolled_GS1, 0)
        further = (len(self.fixed_GS1) - 1) * self.options.further_bytes
        return unrolled_GSC.sum(axis=0) + further

    def conditions(
        self, counts_GSC: np.ndarray, extra_SC: np.ndarray
    ) -> list[np.ndarray]:
        """[S, C] bytes without transients, each linear in counts; the most counts."""
        has_copies = (self.copy_rows_GS1 > 0).any(axis=0)
        base_SC = (self.fixed_GS1 * counts_GSC).sum(axis=0) + extra_SC
        base_SC = base_SC + forecasts.POINTER_BYTES * has_copies
        rows = arena_layouts.rows_needed(
            [
                Rows(*segment)
                for segment in zip(
                    self.input_rows_GS1, self.copy_rows_GS1, counts_GSC, strict=True
                )
            ]
        )
        return [
            base_SC + self.options.empty_bytes,
            *(base_SC + self.options.row_bytes * rows_SC for rows_SC in rows),
        ]

    def _first(self, layers: int) -> np.ndarray:
        """[S, C] all counts that the first of several segments can have."""
        segments, number, _ = self.fixed_GS1.shape
        counts = np.arange(1, layers - segments + 2)
        return np.broadcast_to(counts, (number, counts.size))

    def _best_second(
        self, first_SC: np.ndarray, layers: int, room_S1: np.ndarray
    ) -> np.ndarray:
        """[S, C] best count of the second of three segments, no loop unrolled; or 0.

        Each condition is linear in it, so two of its values say where it is met.
        """
        low_SC = np.broadcast_to(self.loops_GS1[1], first_SC.shape)
        high_SC = layers - first_SC - self.loops_GS1[2]
        # What segments cost: the first one may be short, the others are not.
        short_SC = first_SC < self.loops_GS1[0]
        extra_SC = np.where(short_SC, self.unrolled_GS1[0], 0)
        extra_SC = extra_SC + 2 * self.options.further_bytes
        third_SC = layers - first_SC - low_SC
        at_low, next_to_low = (
            self.conditions(
                np.stack([first_SC, low_SC + moved, third_SC - moved]), extra_SC
            )
            for moved in (0, 1)
        )
        start_SC = low_SC
        for one_SC, two_SC in zip(at_low, next_to_low, strict=True):
            slope_SC, spare_SC = two_SC - one_SC, room_S1 - one_SC
            steps_SC = spare_SC // np.where(slope_SC == 0, 1, np.abs(slope_SC))
            high_SC = np.where(
                slope_SC > 0, np.minimum(high_SC, start_SC + steps_SC), high_SC
            )
            low_SC = np.where(
                slope_SC < 0, np.maximum(low_SC, start_SC - steps_SC), low_SC
            )
            high_SC = np.where((slope_SC == 0) & (spare_SC < 0), 0, high_SC)
        faster_S1 = self.layer_s_GS1[1] < self.layer_s_GS1[2]
        best_SC = np.where(faster_S1, high_SC, low_SC)
        return np.where(low_SC <= high_SC, best_SC, 0)

"""How many layers each option of a sequence gets: all counts that can be best.

The time of a sequence is linear in its counts, and so is each condition on its memory:
fixed bytes and the arena's rows up to its inputs, or up to the copies of a segment's
first or last layer. With the first count given, what fits is therefore an interval of
the second count, and the best lies at one of its ends; loops so short that XLA unrolls
them cost other bytes and are looked at one by one.

Letters as in `options`: G segments, S sequences, N candidates, K conditions.
"""

import functools
from typing import NamedTuple

import numpy as np

from mtuner_jax.planning.costs import arena_layouts, forecasts
from mtuner_jax.planning.costs.arena_layouts import SegmentRows
from mtuner_jax.planning.searching.options import Options

_SHORT = (1, 2)  # layers in loops that may be unrolled


class Candidates(NamedTuple):
    """Counts of the segments of some sequences, and their price.

    Attributes:
      sequence_N: Which of the sequences.
      counts_GN: Layers.
      seconds_N: Seconds of all layers, borders included.
      bytes_N: What they take, without transients.
    """

    sequence_N: np.ndarray
    counts_GN: np.ndarray
    seconds_N: np.ndarray
    bytes_N: np.ndarray


class Counting:
    """Counts so many layers in some sequences, as far as they beat a limit.

    Attributes:
      layers: Layers to fill.
      room_S: Bytes for a sequence's layers, without transients.
      limit_s: Seconds; slower candidates are left out.
    """

    def __init__(
        self,
        options: Options,
        sequences_GS: np.ndarray,
        *,
        layers: int,
        room_S: np.ndarray,
        limit_s: float,
    ):
        self.layers, self.room_S, self.limit_s = layers, room_S, limit_s
        self._layer_s_GS = options.layer_s_O[sequences_GS]
        self._ends_s_S = options.ends_s(sequences_GS)
        self._loops_GS = options.loop_layers_O[sequences_GS]
        self._unrolled_GS = options.unrolled_O[sequences_GS]
        self._least_KS, self._slope_KGS = _conditions(options, sequences_GS)

    def candidates(self) -> Candidates:
        """Counts that can be best, as far as they fit."""
        segments = len(self._layer_s_GS)
        first_C = np.arange(1, self.layers - segments + 2)
        left_C = self.layers - first_C
        if segments == 1:
            found = [self._below(np.array([self.layers]))]
        elif segments == 2:
            found = [self._below(first_C, left_C)]
        else:
            second_SC = self._best_second(first_C)
            found = [self._below(first_C, second_SC, left_C - second_SC)]
            for short in _SHORT:  # in the second segment, then in the third
                short_C = np.full_like(first_C, short)
                found.append(self._below(first_C, short_C, left_C - short))
                found.append(self._below(first_C, left_C - short, short_C))
        return Candidates(*map(np.hstack, zip(*found, strict=True)))

    def _below(self, *counts_GC: np.ndarray) -> Candidates:
        """What of all sequences with these counts, [C] or [S, C], is of interest."""

        def total_SC(each_GS: np.ndarray) -> np.ndarray:
            pairs = zip(each_GS[:, :, None], counts_GC, strict=True)
            products = (each_S1 * counts_C for each_S1, counts_C in pairs)
            return functools.reduce(np.add, products)

        seconds_SC = total_SC(self._layer_s_GS) + self._ends_s_S[:, None]
        kept_SC = seconds_SC < self.limit_s
        for counts_C in counts_GC:
            kept_SC &= counts_C > 0
        # One condition that leaves little to the others.
        room_S = (
            self.room_S
            - self._least_KS[1]
            - np.minimum(self._unrolled_GS, 0).sum(axis=0)
        )
        kept_SC &= total_SC(self._slope_KGS[1]) <= room_S[:, None]
        sequence_N = np.nonzero(kept_SC)[0]
        counts_GN = np.stack(
            [np.broadcast_to(of_C, kept_SC.shape)[kept_SC] for of_C in counts_GC]
        )
        bytes_N = (self._slope_KGS[:, :, sequence_N] * counts_GN).sum(axis=1)
        bytes_N = (bytes_N + self._least_KS[:, sequence_N]).max(axis=0)
        short_GN = counts_GN < self._loops_GS[:, sequence_N]
        unrolled_GN = np.where(short_GN, self._unrolled_GS[:, sequence_N], 0)
        bytes_N = bytes_N + unrolled_GN.sum(axis=0)
        fits_N = bytes_N <= self.room_S[sequence_N]
        return Candidates(
            sequence_N[fits_N],
            counts_GN[:, fits_N],
            seconds_SC[kept_SC][fits_N],
            bytes_N[fits_N],
        )

    def _best_second(self, first_C: np.ndarray) -> np.ndarray:
        """[S, C] best count of the second of three segments, no loop unrolled; or 0.

        Each condition says `slope * count <= spare`, so all of them an interval.
        """
        # What segments cost: the first one may be short, the others are not.
        short_SC = first_C < self._loops_GS[0][:, None]
        extra_SC = np.where(short_SC, self._unrolled_GS[0][:, None], 0)
        room_SC = self.room_S[:, None] + 0.5 - extra_SC
        high_SC = self.layers - first_C - self._loops_GS[2][:, None].astype(float)
        low_SC = np.broadcast_to(self._loops_GS[1][:, None], high_SC.shape).astype(
            float
        )
        for least_S, slope_GS in zip(self._least_KS, self._slope_KGS, strict=True):
            first_S, second_S, third_S = slope_GS
            fixed_S, slope_S1 = (
                least_S + self.layers * third_S,
                (second_S - third_S)[:, None],
            )
            spare_SC = (
                room_SC - fixed_S[:, None] - (first_S - third_S)[:, None] * first_C
            )
            with np.errstate(divide="ignore"):
                count_SC = spare_SC / slope_S1
            np.minimum(high_SC, count_SC, out=high_SC, where=slope_S1 >= 0)
            np.maximum(low_SC, count_SC, out=low_SC, where=slope_S1 < 0)
        high_SC, low_SC = np.floor(high_SC), np.ceil(low_SC)
        faster_S = self._layer_s_GS[1] < self._layer_s_GS[2]
        best_SC = np.where(faster_S[:, None], high_SC, low_SC)
        return np.where(low_SC <= high_SC, best_SC, 0.0).astype(int)


def _conditions(
    options: Options, sequences_GS: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[K, S] bytes that count in any case, [K, G, S] bytes of a layer; most counts.

    All without transients, and without what loops that are unrolled cost.
    """
    inputs_GS = options.input_rows_O[sequences_GS]
    copies_GS = options.copy_rows_O[sequences_GS]

    def rows_KS(counts: np.ndarray) -> np.ndarray:
        segments = zip(inputs_GS, copies_GS, counts, strict=True)
        needed = arena_layouts.rows_needed(
            [SegmentRows(*segment) for segment in segments]
        )
        return options.row_bytes * np.stack([np.zeros_like(needed[0]), *needed])

    segments = len(sequences_GS)
    least_KS = rows_KS(np.zeros(segments, int))
    slope_KGS = np.stack(
        [rows_KS(one) - least_KS for one in np.eye(segments, dtype=int)], 1
    )
    least_KS[0] = options.empty_bytes
    least_KS += forecasts.POINTER_BYTES * (copies_GS > 0).any(axis=0)
    least_KS += (segments - 1) * options.further_bytes
    # As floats they are divided faster, and exact: all are below 2**53.
    return least_KS.astype(float), slope_KGS + (options.rest_O + options.stack_O)[
        sequences_GS
    ].astype(float)

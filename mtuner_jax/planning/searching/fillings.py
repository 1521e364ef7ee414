"""The fastest way to fill a number of layers with at most three treatments, exactly.

Layers are equal, so a plan is a sequence of treatments and how many layers each gets.
For a sequence the best counts are found in closed form (`counts`). Sequences that
cannot beat a limit are left out by bounds (`bounds`, `sequences`); the others are
looked at in the order of their bounds, until one is no better than what was found.
"""

from typing import NamedTuple

import numpy as np

from mtuner_jax.planning.searching import counts, sequences
from mtuner_jax.planning.searching.bounds import Bounds, Task
from mtuner_jax.planning.searching.options import Options

_SAME = 1e-12
# Sequences that are looked at together, the most promising first.
_FIRST, _MOST = 16, 256


class Filling(NamedTuple):
    """A choice for all layers.

    Attributes:
      seconds: Seconds of one forward and backward pass.
      num_bytes: Bytes on a device, transients included.
      sequence: Options in the order of the layers.
      counts: Layers of each.
    """

    seconds: float
    num_bytes: int
    sequence: tuple[int, ...]
    counts: tuple[int, ...]


class Filler:
    """Fills layers from one list of options.

    Attributes:
      options: The options.
      bounds: Lower bounds on what fillings take.
      scored: Plans looked at so far, those within an interval included.
    """

    def __init__(self, options: Options):
        self.options = options
        self.bounds = Bounds(options)
        self.scored = 0

    def best(self, task: Task, segments: int, *, limit_s: float) -> Filling | None:
        """The fastest filling with exactly so many segments, below the limit.

        Without a limit, one that fewer segments undercut may be left out.
        """
        if segments == 0:
            return self._nothing(task)
        if segments > 1 and np.isinf(limit_s):
            simpler = self.best(task, segments - 1, limit_s=limit_s)
            if simpler is None:  # and so nothing fits: the smallest has one segment
                return None
            limit_s = simpler.seconds
        if task.layers < segments:
            return None
        return self._search(task, segments, limit_s)

    def _nothing(self, task: Task) -> Filling | None:
        """No layers: an empty arena and what something else needs anyway."""
        taken = self.options.empty_bytes + task.floor_bytes
        return Filling(0.0, taken, (), ()) if taken <= task.room_bytes else None

    def _search(self, task: Task, segments: int, limit_s: float) -> Filling | None:
        """Looks at sequences in the order of their bounds, some at a time."""
        sequences_GS, bound_s_S = sequences.promising(
            self.bounds, task, segments, limit_s
        )
        order = np.argsort(bound_s_S, kind="stable")
        best, start, number = None, 0, _FIRST
        while start < len(order) and bound_s_S[order[start]] < limit_s:
            some = order[start : start + number]
            found = self._best_of(sequences_GS[:, some], task, limit_s)
            if found and (best is None or found[:2] < best[:2]):
                best = found
                limit_s = found.seconds * (1 + _SAME)  # as fast, but smaller
            start, number = start + number, min(2 * number, _MOST)
        return best

    def _best_of(
        self, sequences_GS: np.ndarray, task: Task, limit_s: float
    ) -> Filling | None:
        """The fastest filling of some sequences; the smallest of equally fast ones."""
        transient_S = self.options.transient_O[sequences_GS].max(axis=0)
        transient_S = np.maximum(transient_S, task.floor_bytes)
        counting = counts.Counting(
            self.options,
            sequences_GS,
            layers=task.layers,
            room_S=task.room_bytes - transient_S,
            limit_s=limit_s * (1 + _SAME),
        )
        segments, number = sequences_GS.shape
        self.scored += number * _compositions(task.layers, segments)
        found = counting.candidates()
        least_s = found.seconds_N.min(initial=np.inf)
        if not least_s < limit_s:
            return None
        equal = np.flatnonzero(found.seconds_N <= least_s * (1 + _SAME))
        sequence = found.sequence_N[equal]
        taken = found.bytes_N[equal] + transient_S[sequence]
        first = np.lexsort((sequence, taken))[0]
        return Filling(
            float(found.seconds_N[equal[first]]),
            int(taken[first]),
            tuple(sequences_GS[:, sequence[first]].tolist()),
            tuple(found.counts_GN[:, equal[first]].tolist()),
        )


def _compositions(layers: int, segments: int) -> int:
    """In how many ways so many layers split into so many segments."""
    return (1, layers - 1, (layers - 1) * (layers - 2) // 2)[segments - 1]

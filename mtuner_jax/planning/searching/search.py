"""The fastest plan that fits: residency, saving, cutting and tables chosen jointly.

Everything but the layers of the main part is enumerated (`frames`: how the batch is
cut, the tail, tables, adapters, whether gathers are merged); the main part is filled
exactly by `fillings`. Each case has a lower bound, cases are taken in its order, and
the search ends when no bound is below the best plan found. So the result is the best
of all plans within the limits on segments and what is allowed.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.costs.forecasts import Forecast
from mtuner_jax.planning.costs.timelines import Timeline
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import frames, options, shortages
from mtuner_jax.planning.searching.allowed import EVERYTHING, MAX_SEGMENTS, Allowed
from mtuner_jax.planning.searching.bounds import Task
from mtuner_jax.planning.searching.fillings import Filler, Filling
from mtuner_jax.planning.searching.frames import Cases, Frame
from mtuner_jax.planning.searching.prices import Price
from mtuner_jax.planning.sites import Site
from mtuner_jax.planning.workloads import Workload

# Share of the step that a further segment has to win: it costs compile time and what
# memory the model does not see, and a plan that gains nothing should be simple.
SEGMENT_SHARE = 0.002
MAX_PRICE = 1 + MAX_SEGMENTS * SEGMENT_SHARE  # of the segments and a tail
_SAMPLES = 8  # cases of a frame whose prices bound all of them
_SAME = 1e-9  # times that differ by less are equal
_TRIES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The fastest plan that fits.

    Attributes:
      plan: The plan.
      timeline: Its step, played.
      forecast: Its bytes.
      searcher: What found it, for further questions.
      budget_bytes: The budget that it keeps.
      num_scored: Plans that the search compared.
      search_s: Its seconds.
    """

    plan: Plan
    timeline: Timeline
    forecast: Forecast
    searcher: "Searcher"
    budget_bytes: int
    num_scored: int
    search_s: float


def fastest(
    workload: Workload,
    hardware: Hardware,
    *,
    mesh_sizes: tuple[int, ...],
    budget_bytes: int,
    allowed: Allowed = EVERYTHING,
) -> Found:
    """Searches the fastest plan of a step.

    Args:
      workload: Sizes and batch.
      hardware: The machine; its links those of the mesh's axes.
      mesh_sizes: Devices along each mesh axis, slowest link first; () is one device.
      budget_bytes: Bytes that a compiled step may take on a device.
      allowed: What plans may use.

    Raises:
      ConfigError: No plan fits; says what the smallest needs and what frees most.
    """
    start_s = time.perf_counter()
    searcher = Searcher(workload, hardware, mesh_sizes=mesh_sizes, allowed=allowed)
    best = searcher.fitting(budget_bytes)
    if best is None:
        axes = searcher.axes
        raise shortages.error(workload, hardware, axes, budget_bytes=budget_bytes)
    return Found(
        plan=best.plan,
        timeline=timelines.replay(best.plan, workload, hardware),
        forecast=forecasts.forecast(best.plan, workload),
        searcher=searcher,
        budget_bytes=budget_bytes,
        num_scored=searcher.scored,
        search_s=time.perf_counter() - start_s,
    )


class Scored(NamedTuple):
    """A plan and what it is chosen by, best first.

    Attributes:
      score_s: Seconds of a step, and the price of its segments.
      num_bytes: Bytes on a device.
      segments: How many segments the plan has.
      plan: The plan.
    """

    score_s: float
    num_bytes: int
    segments: int
    plan: Plan

    def better(self, other: "Scored | None") -> bool:
        """Faster; where equally fast, smaller; where equally large, simpler."""
        if other is None:
            return True
        if abs(self.score_s - other.score_s) > _SAME * other.score_s:
            return self.score_s < other.score_s
        return self[1:3] < other[1:3]


class _Best:
    """The best plan so far, and the score up to which others are of interest."""

    def __init__(self, below_s: float):
        self.scored: Scored | None = None
        self.limit_s = below_s

    def take(self, scored: Scored) -> None:
        """Keeps the better one; smaller plans that are as fast stay of interest."""
        if scored.better(self.scored):
            self.scored = scored
            self.limit_s = min(self.limit_s, scored.score_s * (1 + _SAME))


class Searcher:
    """Searches plans for one workload, machine and mesh, for any budget.

    Attributes:
      workload: Sizes and batch.
      hardware: The machine.
      axes: Devices of the mesh.
      allowed: What plans may use.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        *,
        mesh_sizes: tuple[int, ...],
        allowed: Allowed = EVERYTHING,
    ):
        self.workload = workload
        self.hardware = hardware
        self.axes = Axes(data=mesh_sizes or (1,))  # as the engine's mesh has it
        self.allowed = allowed
        self._fillers: dict[Site, Filler] = {}
        self._frames = list(
            frames.enumerate_frames(workload, hardware, self.axes, allowed)
        )

    @property
    def scored(self) -> int:
        """Plans looked at so far."""
        return sum(filler.scored for filler in self._fillers.values())

    def fitting(self, budget_bytes: int) -> Scored | None:
        """The fastest plan that the whole memory model says fits.

        The search adds bytes up; should the model know more than sums, the search is
        repeated with what it missed taken off.
        """
        left = budget_bytes
        for _ in range(_TRIES):
            best = self.best(left)
            if best is None:
                return None
            taken = forecasts.forecast(best.plan, self.workload).total_bytes
            if taken <= budget_bytes:
                return best
            left = best.num_bytes - (taken - budget_bytes)
        return None

    def best(self, budget_bytes: int, *, below_s: float = math.inf) -> Scored | None:
        """The fastest plan whose sums of bytes fit and whose score is below a limit."""
        best = _Best(below_s)
        # Without a tail first: there are few such cases, and they give a limit.
        for has_tail in (False, True):
            over = [f for f in self._frames if (f.chosen.tail_chunks > 1) == has_tail]
            self._over(over, budget_bytes, best)
        return best.scored

    def _over(self, over: Sequence[Frame], budget_bytes: int, best: _Best) -> None:
        """Solves cases in the order of their bounds until none can be better."""
        found = []
        for frame in over:
            places = self._places(frame, self._cases(frame), budget_bytes, best)
            found += [(frame, place) for place in places.each()]
        for frame, place in sorted(found, key=lambda pair: pair[1].bound_s):
            if place.bound_s >= best.limit_s:
                break
            self._solve(frame, place, budget_bytes, best)

    def _filler(self, frame: Frame, *, chunks: int = 1) -> Filler:
        """Fills layers that run a microbatch, or a chunk of it, at once."""
        site = Site(
            workload=self.workload,
            axes=self.axes,
            rows=frame.chosen.microbatch // chunks,
            merge_gathers=frame.chosen.merge_gathers,
        )
        if site not in self._fillers:
            found = options.worth_trying(site, self.hardware, self.allowed)
            self._fillers[site] = Filler(found)
        return self._fillers[site]

    def _cases(self, frame: Frame) -> Cases:
        """Tails that the frame can have."""
        chunks = frame.chosen.tail_chunks
        tail = self._filler(frame, chunks=chunks).options
        if chunks == 1:
            return frames.no_tail(frame, tail)
        return frames.tails(frame, tail, self.workload.num_layers)

    def _places(
        self, frame: Frame, cases: Cases, budget_bytes: int, best: _Best
    ) -> "_Places":
        """What can be solved of a frame: cases and numbers of segments."""
        layers_N = self.workload.num_layers - cases.layers_N
        room_N = budget_bytes - frame.static_bytes - cases.held_N
        floor_N = np.maximum(frame.floor_bytes, cases.transient_N)
        fits_N = (room_N >= floor_N) & (cases.seconds_N < best.limit_s)
        most = self.allowed.segments
        bound_s_GN = np.full((most + 1, len(layers_N)), np.inf)
        bound_s_GN[0] = np.where(fits_N & (layers_N == 0), cases.seconds_N, np.inf)
        filled = np.flatnonzero(fits_N & (layers_N > 0))
        if filled.size:
            main_s_GN = _bounds_s(
                self._filler(frame), layers_N[filled], room_N[filled], floor_N[filled]
            )[:most]
            step_s_GN = cases.seconds_N[filled] + frame.chosen.accumulation * main_s_GN
            further = np.arange(most)[:, None] + (cases.layers_N[filled] > 0)
            bound_s_GN[1:, filled] = step_s_GN * (1 + SEGMENT_SHARE * further)
        segments, case = np.nonzero(bound_s_GN < best.limit_s)
        return _Places(
            bound_s=bound_s_GN[segments, case],
            segments=segments,
            option=cases.option_N[case],
            seconds=cases.seconds_N[case],
            layers=layers_N[case],
            tail_layers=cases.layers_N[case],
            room=room_N[case],
            floor=floor_N[case],
        )

    def _solve(
        self, frame: Frame, place: "_Places", budget_bytes: int, best: _Best
    ) -> None:
        """Takes a place's fastest plan where it is better than the best one so far."""
        task = Task(layers=place.layers, room_bytes=place.room, floor_bytes=place.floor)
        segments = place.segments + (place.tail_layers > 0)
        price = 1 + SEGMENT_SHARE * (segments - 1)
        runs = frame.chosen.accumulation
        limit_s = (best.limit_s / price - place.seconds) / runs
        filling = self._filler(frame).best(task, place.segments, limit_s=limit_s)
        if filling is None:
            return
        score_s = price * (place.seconds + runs * filling.seconds)
        taken = budget_bytes - task.room_bytes + filling.num_bytes
        plan = self._plan(frame, place, filling)
        best.take(Scored(score_s, taken, segments, plan))

    def _plan(self, frame: Frame, place: "_Places", filling: Filling) -> Plan:
        main = self._filler(frame).options.segments
        parts = [
            dataclasses.replace(main[option], num_layers=count)
            for option, count in zip(filling.sequence, filling.counts, strict=True)
        ]
        if place.tail_layers:
            tail = self._filler(frame, chunks=frame.chosen.tail_chunks).options
            segment = tail.segments[place.option]
            parts.append(dataclasses.replace(segment, num_layers=place.tail_layers))
        return frame.plan(self.workload, tuple(parts), tail_layers=place.tail_layers)


class _Places(NamedTuple):
    """Cases to be filled with so many segments: arrays, or one case's numbers.

    Attributes:
      bound_s: Score that no plan undercuts.
      segments: Segments of the main part.
      option: The tail's treatment, an index.
      seconds: Seconds of a step, without the main part.
      layers: Layers of the main part.
      tail_layers: Layers of the tail.
      room: Bytes of room, as in `bounds.Task`.
      floor: Bytes of transients that something else needs anyway.
    """

    bound_s: Any
    segments: Any
    option: Any
    seconds: Any
    layers: Any
    tail_layers: Any
    room: Any
    floor: Any

    def each(self) -> "list[_Places]":
        """The numbers of each case."""
        return [_Places(*row) for row in zip(*(x.tolist() for x in self), strict=True)]


def _bounds_s(
    filler: Filler,
    layers_N: np.ndarray,
    room_N: np.ndarray,
    floor_N: np.ndarray,
) -> np.ndarray:
    """Bounds at the prices of some of the cases."""
    at: set[Price] = set()
    for case in np.linspace(0, len(layers_N) - 1, _SAMPLES).astype(int):
        task = Task(
            layers=int(layers_N[case]),
            room_bytes=int(room_N[case]),
            floor_bytes=int(floor_N[case]),
        )
        at.update(filler.bounds.best_prices(task))
    return filler.bounds.cases(sorted(at), layers_N, room_N, floor_N)

"""The fastest plan that fits: residency, saving, cutting and tables chosen jointly.

Everything but the layers of the main part is enumerated (`frames`: how the batch is
cut, the tail, tables, adapters, whether gathers are merged); the main part is filled
exactly by `fillings`. Each case has a lower bound, cases are taken in its order, and
the search ends when no bound is below the best plan found. So the result is the best
of all plans within the limits on segments.
"""

import dataclasses
import enum
import math
import time
from typing import Any, NamedTuple

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.numbers import sizes
from mtuner_jax.planning.costs import forecasts, passes, timelines
from mtuner_jax.planning.costs.forecasts import Forecast
from mtuner_jax.planning.costs.timelines import Timeline
from mtuner_jax.planning.plans import Plan, SegmentPlan
from mtuner_jax.planning.searching import fillings, frames, options, shortages
from mtuner_jax.planning.searching.fillings import Filler, Filling, Task
from mtuner_jax.planning.searching.frames import Cases, Frame
from mtuner_jax.planning.searching.prices import Price
from mtuner_jax.planning.workloads import Workload

# Share of the step that a further segment has to win: it costs compile time and what
# memory the model does not see, and a plan that gains nothing should be simple.
SEGMENT_SHARE = 0.002
_SAMPLES = 8  # cases of a frame whose prices bound all of them
_SAME = 1e-9  # times that differ by less are equal
_HIDDEN = 0.02  # a smaller share of exposed communication binds nothing
_WORTH = 0.01  # a smaller share of a step is not worth more memory
_UNLIMITED_BYTES = 2**50
_TRIES = 8


class Binds(enum.StrEnum):
    """What keeps a step from being faster."""

    COMPUTE = "compute-bound"
    LINK = "link-bound"
    MEMORY = "memory-bound"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The fastest plan that fits.

    Attributes:
      plan: The plan.
      timeline: Its step, played.
      forecast: Its bytes.
      binds: What keeps it from being faster.
      reason: The same as a sentence.
      num_scored: Plans that the search compared.
      search_s: Its seconds.
    """

    plan: Plan
    timeline: Timeline
    forecast: Forecast
    binds: Binds
    reason: str
    num_scored: int
    search_s: float


def fastest(
    workload: Workload,
    hardware: Hardware,
    *,
    mesh_sizes: tuple[int, ...],
    budget_bytes: int,
) -> Found:
    """Searches the fastest plan of a step.

    Args:
      workload: Sizes and batch.
      hardware: The machine; its links those of the mesh's axes.
      mesh_sizes: Devices along each mesh axis, slowest link first; () is one device.
      budget_bytes: That a compiled step may take on a device.

    Raises:
      ConfigError: No plan fits; says what the smallest needs and what frees most.
    """
    start_s = time.perf_counter()
    mesh_sizes = mesh_sizes or (1,)  # as the engine's mesh has it
    searcher = Searcher(workload, hardware, mesh_sizes)
    best = _fitting(searcher, budget_bytes)
    if best is None:
        raise shortages.error(workload, hardware, mesh_sizes, budget_bytes=budget_bytes)
    played = timelines.replay(best.plan, workload, hardware)
    binds, reason = _binding(played, searcher, budget_bytes)
    return Found(
        plan=best.plan,
        timeline=played,
        forecast=forecasts.forecast(best.plan, workload),
        binds=binds,
        reason=reason,
        num_scored=searcher.scored,
        search_s=time.perf_counter() - start_s,
    )


def _fitting(searcher, budget_bytes):
    """The best plan that the whole memory model says fits.

    The search adds bytes up; should the model know more than sums, the search is
    repeated with what it missed taken off.
    """
    left = budget_bytes
    for _ in range(_TRIES):
        best = searcher.best(left)
        if best is None:
            return None
        taken = forecasts.forecast(best.plan, searcher.workload).total_bytes
        if taken <= budget_bytes:
            return best
        left = best.num_bytes - (taken - budget_bytes)
    return None


def _binding(played, searcher, budget_bytes):
    """(what binds, the sentence that says so)."""
    hardware = searcher.hardware
    exposed = played.exposed_s / played.step_s
    reason = (
        f"computation is {1 - exposed:.1%} of the step"
        if exposed <= _HIDDEN
        else f"communication is exposed for {exposed:.1%} of the step"
    )
    card_bytes = max(hardware.memory_bytes - hardware.reserve_bytes, budget_bytes)
    most = _Won.of(searcher, played, card_bytes)
    if most.share > _WORTH:
        nearer = _Won.of(
            searcher, played, budget_bytes + (most.num_bytes - budget_bytes) // 4
        )
        steps = [nearer, most] if nearer.share > _WORTH else [most]
        amounts = [
            f"{won.share:.1%} faster with {sizes.gib(won.num_bytes)}" for won in steps
        ]
        how = "by recomputing less " if exposed <= _HIDDEN else ""
        reason += f"; {how}it would be {', '.join(amounts)} per device"
        return Binds.COMPUTE if exposed <= _HIDDEN else Binds.MEMORY, reason
    if exposed <= _HIDDEN:
        return Binds.COMPUTE, reason
    if _Won.of(searcher, played, _UNLIMITED_BYTES).share <= _WORTH:
        return Binds.LINK, f"{reason} with any memory"
    return Binds.MEMORY, (
        f"{reason}; what would hide it takes more than the "
        f"{sizes.gib(hardware.memory_bytes)} of a card"
    )


class _Won(NamedTuple):
    """What another budget wins.

    Attributes:
      share: Of the step's seconds.
      num_bytes: That its plan takes on a device.
    """

    share: float
    num_bytes: int

    @staticmethod
    def of(searcher: "Searcher", played: Timeline, budget_bytes: int) -> "_Won":
        """By the fastest plan within a budget that some plan keeps."""
        workload, best = searcher.workload, searcher.best(budget_bytes)
        assert best is not None
        seconds = passes.step_s(best.plan, workload, searcher.hardware)
        needed = forecasts.forecast(best.plan, workload).total_bytes
        return _Won(1.0 - seconds / played.step_s, needed)


class Scored(NamedTuple):
    """A plan and what it is chosen by, best first.

    Attributes:
      score_s: Seconds of a step, and the price of its segments.
      num_bytes: On a device.
      segments: How many.
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


class Searcher:
    """Searches plans for one workload, machine and mesh, for any budget.

    Attributes:
      workload: Sizes and batch.
      hardware: The machine.
      mesh_sizes: Devices along each mesh axis, slowest link first.
    """

    def __init__(
        self, workload: Workload, hardware: Hardware, mesh_sizes: tuple[int, ...]
    ):
        self.workload = workload
        self.hardware = hardware
        self.mesh_sizes = mesh_sizes
        self._fillers: dict[tuple[int, bool], Filler] = {}
        self.frames = list(frames.enumerate_frames(workload, hardware, mesh_sizes))

    @property
    def scored(self) -> int:
        """Plans looked at so far."""
        return sum(filler.scored for filler in self._fillers.values())

    def best(self, budget_bytes: int) -> Scored | None:
        """The fastest plan that the models say fits."""
        best = None
        plain = [frame for frame in self.frames if frame.chosen.tail_chunks == 1]
        best = self._over(plain, budget_bytes, best)
        with_tail = [frame for frame in self.frames if frame.chosen.tail_chunks > 1]
        return self._over(with_tail, budget_bytes, best)

    def filler(self, rows: int, *, merge_gathers: bool) -> Filler:
        """The options of layers that run so many rows at once."""
        key = (rows, merge_gathers)
        if key not in self._fillers:
            self._fillers[key] = Filler(
                options.worth_trying(
                    self.workload,
                    self.hardware,
                    mesh_sizes=self.mesh_sizes,
                    rows=rows,
                    merge_gathers=merge_gathers,
                )
            )
        return self._fillers[key]

    def _over(self, over, budget_bytes, best):
        """Solves cases in the order of their bounds until none can be better."""
        found = []
        for frame in over:
            places = self._places(frame, self.cases(frame), budget_bytes, best)
            numbers = range(len(places.bound_s))
            found += [(frame, places.one(number)) for number in numbers]
        for frame, place in sorted(found, key=lambda pair: pair[1].bound_s):
            if place.bound_s >= _limit(best):
                break
            best = self._solve(frame, place, budget_bytes, best)
        return best

    def cases(self, frame: Frame) -> Cases:
        """Tails that the frame can have."""
        rows = frame.chosen.microbatch // frame.chosen.tail_chunks
        tail = self.filler(rows, merge_gathers=frame.merge_gathers).options
        if frame.chosen.tail_chunks == 1:
            return frames.no_tail(frame, tail)
        return frames.tails(frame, tail, self.workload.num_layers)

    def _places(self, frame, cases, budget_bytes, best):
        """What can be solved of a frame: cases and numbers of segments."""
        layers = self.workload.num_layers - cases.tail_layers
        room = budget_bytes - frame.static_bytes - cases.held_bytes
        transient = np.maximum(frame.floor_bytes, cases.tail_bytes)
        fits = (room >= transient) & (cases.seconds < _limit(best))
        bound_s = np.full((fillings.MAX_SEGMENTS + 1, len(layers)), np.inf)
        bound_s[0] = np.where(fits & (layers == 0), cases.seconds, np.inf)
        filled = np.flatnonzero(fits & (layers > 0))
        if filled.size:
            main_s = self._bounds_s(
                self._main(frame), layers[filled], room[filled], transient[filled]
            )
            whole_s = cases.seconds[filled] + frame.chosen.accumulation * main_s
            segments = np.arange(fillings.MAX_SEGMENTS)[:, None]
            share = SEGMENT_SHARE * (segments + (cases.tail_layers[filled] > 0))
            bound_s[1:, filled] = whole_s * (1 + share)
        segments, case = np.nonzero(bound_s < _limit(best))
        return _Places(
            bound_s=bound_s[segments, case],
            segments=segments,
            option=cases.option[case],
            seconds=cases.seconds[case],
            layers=layers[case],
            tail_layers=cases.tail_layers[case],
            room=room[case],
            floor=transient[case],
        )

    def _bounds_s(self, filler, layers, room, transient):
        """Bounds at the prices of some of the cases."""
        at: set[Price] = set()
        for case in np.linspace(0, len(layers) - 1, _SAMPLES).astype(int):
            task = Task(
                layers=int(layers[case]),
                room_bytes=int(room[case]),
                floor_bytes=int(transient[case]),
            )
            at.update(filler.prices(task))
        return filler.bounds_s(sorted(at), layers, room, transient)

    def _main(self, frame: Frame) -> Filler:
        rows = frame.chosen.microbatch
        return self.filler(rows, merge_gathers=frame.merge_gathers)

    def _solve(self, frame, place, budget_bytes, best):
        """The better one of a place's fastest plan and the best one so far."""
        task = Task(
            layers=place.layers,
            room_bytes=place.room,
            floor_bytes=place.floor,
        )
        segments = place.segments + (place.tail_layers > 0)
        price = 1 + SEGMENT_SHARE * (segments - 1)
        limit_s = (_limit(best) / price - place.seconds) / frame.chosen.accumulation
        filling = self._fill(frame, task, place.segments, limit_s)
        if filling is None:
            return best
        score_s = price * (place.seconds + frame.chosen.accumulation * filling.seconds)
        taken = budget_bytes - task.room_bytes + filling.num_bytes
        scored = Scored(score_s, taken, segments, self._plan(frame, place, filling))
        return scored if scored.better(best) else best

    def _fill(self, frame, task, segments, limit_s):
        filler = self._main(frame)
        if segments:
            return filler.best(task, segments, limit_s=limit_s)
        row = frames.empty_arena_bytes(filler.options)
        taken = row + task.floor_bytes
        return Filling(0.0, taken, (), ()) if taken <= task.room_bytes else None

    def _plan(self, frame, place, filling):
        main = self._main(frame).options.segments
        parts = [
            dataclasses.replace(main[option], num_layers=count)
            for option, count in zip(filling.sequence, filling.counts, strict=True)
        ]
        if place.tail_layers:
            rows = frame.chosen.microbatch // frame.chosen.tail_chunks
            tail = self.filler(rows, merge_gathers=frame.merge_gathers).options
            segment: SegmentPlan = tail.segments[place.option]
            parts.append(dataclasses.replace(segment, num_layers=place.tail_layers))
        return frame.plan(self.workload, tuple(parts), tail_layers=place.tail_layers)


class _Places(NamedTuple):
    """Cases to be filled with so many segments: arrays, or one case's numbers.

    Attributes:
      bound_s: Score that no plan undercuts.
      segments: Of the main part.
      option: The tail's.
      seconds: Of a step, without the main part.
      layers: Of the main part.
      tail_layers: Of the tail.
      room: Bytes, as in `fillings.Task`.
      floor: Likewise.
    """

    bound_s: Any
    segments: Any
    option: Any
    seconds: Any
    layers: Any
    tail_layers: Any
    room: Any
    floor: Any

    def one(self, place: int) -> "_Places":
        """The numbers of one case."""
        return _Places(*(values[place].item() for values in self))


def _limit(best: Scored | None) -> float:
    """Scores up to it are still of interest: smaller plans may be as fast."""
    return math.inf if best is None else best.score_s * (1 + _SAME)

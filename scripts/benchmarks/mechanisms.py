"""What a plan can do beyond plain sharding, and what a step would take without it.

A mechanism's worth is found by searching again with it forbidden: everything else may
take its place. So worths do not add up, and all can be small where each can replace
the other.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.costs import forecasts
from mtuner_jax.planning.plans import AdapterState, Plan, Saved, SegmentPlan, Table
from mtuner_jax.planning.searching import frames, search
from mtuner_jax.planning.searching.fillings import Filler
from mtuner_jax.planning.searching.frames import Frame
from mtuner_jax.planning.searching.options import Options
from mtuner_jax.planning.workloads import Workload

_TRIES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Something that a plan may use.

    Attributes:
      title: For people.
      used_by: Whether a treatment of layers uses it; the second argument is the least
        number of axes that can be held, 0 but on one device.
      frame: Fields of `StepChoices` that do without it.
      is_tail: Whether it is the tail.
      is_mix: Whether it is that layers may be treated differently.
    """

    title: str
    used_by: Callable[[SegmentPlan, int], bool] | None = None
    frame: tuple[tuple[str, Any], ...] = ()
    is_tail: bool = False
    is_mix: bool = False

    def share(self, plan: Plan) -> float:
        """Share of the layers that use it; 0 or 1 where it is not about layers."""
        if self.is_tail:
            return plan.tail_layers / plan.num_layers if plan.tail_chunks > 1 else 0.0
        if self.is_mix:
            kinds = {dataclasses.replace(s, num_layers=1) for s in plan.segments}
            return float(len(kinds) > 1)
        if self.used_by is None:
            return float(any(getattr(plan, k) != value for k, value in self.frame))
        lowest = _lowest(plan.mesh_sizes)
        layers = sum(s.num_layers for s in plan.segments if self.used_by(s, lowest))
        return layers / plan.num_layers


# In the order in which maps show them.
ALL: dict[str, Mechanism] = {
    "held": Mechanism(
        title="more held (rest, fwd_keep)",
        used_by=lambda segment, lowest: (
            max(segment.rest_axes, segment.fwd_keep_axes) > lowest
        ),
    ),
    "bwd_keep": Mechanism(
        title="copies across steps (bwd_keep)",
        used_by=lambda segment, lowest: segment.bwd_keep_axes > segment.rest_axes,
    ),
    "saved": Mechanism(
        title="tensors saved, not redone (saved)",
        used_by=lambda segment, lowest: (
            segment.saved not in (Saved.LAYER_INPUT, Saved.LAYER_INPUT_ON_HOST)
        ),
    ),
    "on_host": Mechanism(
        title="layer inputs on the host",
        used_by=lambda segment, lowest: segment.saved is Saved.LAYER_INPUT_ON_HOST,
    ),
    "tail": Mechanism(title="tail in parts of the batch (tail)", is_tail=True),
    "mix": Mechanism(title="layers treated differently", is_mix=True),
    "tables": Mechanism(
        title="tables split or resident",
        frame=(("embedding", Table.GATHERED), ("head", Table.GATHERED)),
    ),
    "adapters": Mechanism(
        title="adapters sharded", frame=(("adapters", AdapterState.REPLICATED),)
    ),
}


class Without(search.Searcher):
    """Searches plans that do without a mechanism.

    What the search left out because of a forbidden treatment stays left out, so that
    a result can be a little slower than the best without the mechanism, never faster.

    Attributes:
      mechanism: What is forbidden.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        workload: Workload,
        hardware: Hardware,
        mesh_sizes: tuple[int, ...],
    ):
        super().__init__(workload, hardware, mesh_sizes)
        self.mechanism = mechanism
        if mechanism.is_tail or mechanism.is_mix:
            self.frames = [f for f in self.frames if f.chosen.tail_chunks == 1]
        if mechanism.frame:
            others = (self._replaced(frame) for frame in self.frames)
            self.frames = list(dict.fromkeys(others))

    def fitting(self, budget_bytes: int) -> Plan | None:
        """The fastest plan without the mechanism that the whole memory model says fits.

        As `search.fastest` does: where that model knows more than the sums that a
        search adds up, what they missed is taken off and the search repeated.
        """
        left_bytes = budget_bytes
        for _ in range(_TRIES):
            best = self.best(left_bytes)
            if best is None:
                return None
            forecast = forecasts.forecast(best.plan, self.workload)
            if forecast.total_bytes <= budget_bytes:
                return best.plan
            left_bytes = best.num_bytes - (forecast.total_bytes - budget_bytes)
        return None

    def filler(self, rows: int, *, merge_gathers: bool) -> Filler:
        """As `Searcher.filler`, of the treatments that are left."""
        key = (rows, merge_gathers)
        if key in self._fillers:
            return self._fillers[key]
        whole = super().filler(rows, merge_gathers=merge_gathers).options
        kind = _Uniform if self.mechanism.is_mix else Filler
        self._fillers[key] = kind(self._left(whole))
        return self._fillers[key]

    def _left(self, options: Options) -> Options:
        used_by, lowest = self.mechanism.used_by, _lowest(self.mesh_sizes)
        if used_by is None:
            return options
        kept = np.array(
            [i for i, s in enumerate(options.segments) if not used_by(s, lowest)]
        )
        arrays = {
            field.name: getattr(options, field.name)[kept]
            for field in dataclasses.fields(options)
            if isinstance(getattr(options, field.name), np.ndarray)
        }
        arrays["border_s"] = options.border_s[np.ix_(kept, kept)]
        segments = tuple(options.segments[index] for index in kept)
        return dataclasses.replace(options, segments=segments, **arrays)

    def _replaced(self, frame: Frame) -> Frame:
        chosen = dataclasses.replace(frame.chosen, **dict(self.mechanism.frame))
        priced = frames.price(self.workload, self.hardware, chosen)
        return dataclasses.replace(priced, merge_gathers=frame.merge_gathers)


class _Uniform(Filler):
    """Fills layers with one treatment only."""

    def best(self, task, segments, **settings):
        """As `Filler.best`; None for more than one segment."""
        return None if segments > 1 else super().best(task, segments, **settings)


def _lowest(mesh_sizes: tuple[int, ...]) -> int:
    return len(mesh_sizes) if math.prod(mesh_sizes) == 1 else 0

"""How the times of layers add up to passes over the layers, and to a step.

The engine gathers exactly one layer ahead, also across the border of segments: a layer
takes the longer of its own computation and the gather of the next one, and the first
gather of a pass is waited for. So time is additive over layers, with a correction at
each border of segments that does not depend on how many layers they have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning import sites
from mtuner_jax.planning.costs import durations, fitted, forecasts
from mtuner_jax.planning.costs.durations import Clock, LayerTimes, Phase
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.workloads import Workload

# What the last layer of a pass looks ahead to.
NOTHING = Phase(compute_s=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """How gathers and computation share a device.

    Attributes:
      slowdown: How many times longer computation takes while a collective runs.
      share: Part of a layer's computation that can run beside gathers.
    """

    slowdown: float
    share: float

    def beside(
        self, phase: Phase | Phases, ahead: Phase | Phases, *, backward: bool
    ) -> Any:
        """Seconds of a layer while what the next one, `ahead`, waits for arrives.

        That is its gathers and, backward, its input from the host. Forward, the own
        input leaves for the host meanwhile.
        """
        lost_s = ahead.link_s * (1.0 - 1.0 / self.slowdown)
        share = np.where(ahead.link_s > 0.0, self.share, 1.0)
        together_s = np.maximum(ahead.link_s, share * phase.compute_s + lost_s)
        seconds = together_s + (1.0 - share) * phase.compute_s
        host_s = ahead.host_s if backward else phase.host_s
        return np.maximum(seconds, host_s) + phase.carry_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
    """Phases of several layers: arrays of seconds; see `durations.Phase`."""

    compute_s: np.ndarray
    link_s: np.ndarray
    carry_s: np.ndarray
    host_s: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class EqualLayers:
    """Equal layers in a row, in one direction.

    Attributes:
      phase: One of them.
      count: How many.
      prefetch: Whether the next layer is gathered meanwhile.
    """

    phase: Phase
    count: int
    prefetch: bool


def overlap(hardware: Hardware, *, merge_gathers: bool) -> Overlap:
    """What the machine and the plan say about it."""
    share = 1.0 if merge_gathers else fitted.BESIDE_MANY_GATHERS
    return Overlap(slowdown=hardware.overlap_slowdown, share=share)


def alone(phase: Phase | Phases, *, backward: bool) -> Any:
    """Seconds of a layer that nothing is fetched ahead for (no prefetch).

    An input that goes to the host leaves while the layer runs; one that comes from
    there is waited for, together with the gathers.
    """
    waited_s = awaited(phase, backward=backward)
    sent_s = 0.0 if backward else phase.host_s
    return waited_s + np.maximum(phase.compute_s, sent_s) + phase.carry_s


def awaited(phase: Phase | Phases, *, backward: bool) -> Any:
    """Seconds until a layer can run that nothing was fetched ahead for."""
    if backward:
        return np.maximum(phase.link_s, phase.host_s)
    return phase.link_s


def over_layers(
    runs: Sequence[EqualLayers], shared: Overlap, *, backward: bool = False
) -> float:
    """Seconds of one pass over runs of layers, in the order in which they run."""
    seconds, ready = 0.0, False
    for run, following in itertools.zip_longest(runs, runs[1:]):
        if not run.prefetch:
            seconds += run.count * alone(run.phase, backward=backward)
            ready = False
            continue
        seconds += 0.0 if ready else awaited(run.phase, backward=backward)
        inner_s = shared.beside(run.phase, run.phase, backward=backward)
        ready = following is not None and following.prefetch
        ahead = following.phase if ready else NOTHING
        last_s = shared.beside(run.phase, ahead, backward=backward)
        seconds += (run.count - 1) * inner_s + last_s
    return float(seconds)


def segments(
    plan: Plan, workload: Workload, hardware: Hardware
) -> tuple[LayerTimes, ...]:
    """One layer of each segment."""
    return tuple(
        Clock(site=site, hardware=hardware).layer(
            segment, forecasts.layer_bytes(site, segment)
        )
        for site, segment in zip(
            sites.of_segments(plan, workload), plan.segments, strict=True
        )
    )


def step_s(plan: Plan, workload: Workload, hardware: Hardware) -> float:
    """Seconds of a step; `timelines.replay` arrives at the same by playing it."""
    times = segments(plan, workload, hardware)
    fixed = durations.step(workload, hardware, plan)
    shared = overlap(hardware, merge_gathers=plan.merge_gathers)
    main, tail = slice(plan.tail_start), slice(plan.tail_start, None)
    passes_s = [
        over_layers(_runs(plan, times, part, backward=False), shared)
        + over_layers(_runs(plan, times, part, backward=True), shared, backward=True)
        for part in (main, tail)
    ]
    return fixed.once_s + plan.accumulation * (
        fixed.each_microbatch_s
        + passes_s[0]
        + plan.tail_chunks * (passes_s[1] + fixed.loss.total_s)
    )


def _runs(
    plan: Plan, times: Sequence[LayerTimes], part: slice, *, backward: bool
) -> list[EqualLayers]:
    """Runs of a part of the segments, in the order in which they run."""
    runs = [
        EqualLayers(
            phase=layer.phase(backward=backward),
            count=segment.num_layers,
            prefetch=segment.prefetch,
        )
        for segment, layer in zip(plan.segments[part], times[part], strict=True)
    ]
    return runs[::-1] if backward else runs

"""What a picture of a plan shows: bytes, local ratios and streams over a step.

Letters: L layers, I instants, E spans between changes, N intervals.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning.costs import timelines
from mtuner_jax.planning.costs.timelines import Event, Timeline
from mtuner_jax.planning.plans import Plan

_TOUCH_S = 1e-9  # apart at most, where a span follows another
LANES = (timelines.COMPUTE, timelines.LINK, timelines.HOST)
# Kinds of bars: of layers, of the rest, and of the lack of any computation.
BARS = "forward backward copies other waits weights moved layer_input".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn of a step.

    Attributes:
      window_s: Begin and end of what is shown, in seconds from the step's start.
      time_s: [I] from when on the bytes are held.
      num_bytes: By kind [I], on a device.
      edges_s: [E + 1] times at which a layer's ratio may change.
      held_axes: [L, E] mesh axes over which a layer is held from edge to edge.
      ratios: By number of held axes, the share of a layer's weights on a device.
      bars: By lane and kind, [(start, seconds)].
    """

    window_s: tuple[float, float]
    time_s: np.ndarray
    num_bytes: dict[str, np.ndarray]
    edges_s: np.ndarray
    held_axes: np.ndarray
    ratios: tuple[float, ...]
    bars: dict[str, dict[str, list[tuple[float, float]]]]


def picture(
    plan: Plan, timeline: Timeline, *, microbatch: int | None = None
) -> Picture:
    """Computes what is drawn.

    Args:
      plan: What was played.
      timeline: How it went.
      microbatch: Show this one only, counted from 0; None for the whole step.

    Raises:
      ConfigError: A timeline of another plan, or no such microbatch.
    """
    layers = {event.layer for event in timeline.events if event.layer >= 0}
    if layers != set(range(plan.num_layers)):
        raise ConfigError(
            f"timeline of {len(layers)} layers, plan of {plan.num_layers}; replay "
            "this plan"
        )
    edges_s, held_axes = _held(plan, timeline)
    sizes, memory = plan.mesh_sizes, timeline.memory
    return Picture(
        window_s=_window(plan, timeline, microbatch),
        time_s=np.array([instant.time_s for instant in memory]),
        num_bytes={
            kind: np.array([instant.num_bytes[kind] for instant in memory])
            for kind in memory[0].num_bytes
        },
        edges_s=edges_s,
        held_axes=held_axes,
        ratios=tuple(1 / math.prod(sizes[axes:]) for axes in range(len(sizes) + 1)),
        bars=_bars(timeline),
    )


def headline(name: str, plan: Plan, timeline: Timeline) -> str:
    """A title: what is drawn and what it comes to."""
    return (
        f"{name} on {plan.num_devices} devices: {timeline.step_s:.3g} s a step, "
        f"{timeline.tokens_per_s:,.0f} tokens/s, nothing computes in "
        f"{timeline.exposed_s / timeline.step_s:.0%} of it (predicted)"
    )


def shares(spans: Sequence[tuple[float, float]], edges_s: np.ndarray) -> np.ndarray:
    """Share of each interval that spans cover.

    Args:
      spans: (start, seconds), in order, apart from each other.
      edges_s: [N + 1] borders of intervals.

    Returns:
      [N], from 0 to 1.
    """
    starts, seconds = np.array(spans).T
    times = np.stack([starts, starts + seconds], axis=1).ravel()
    done_s = np.repeat(np.cumsum(seconds), 2)
    done_s[::2] -= seconds
    return np.diff(np.interp(edges_s, times, done_s)) / np.diff(edges_s)


def _window(
    plan: Plan, timeline: Timeline, microbatch: int | None
) -> tuple[float, float]:
    if microbatch is None:
        return 0.0, timeline.step_s
    if not 0 <= microbatch < plan.accumulation:
        raise ConfigError(
            f"microbatch={microbatch}: the plan has {plan.accumulation}, counted from 0"
        )
    starts = [event.start_s for event in timeline.events if event.kind == "embed"]
    ends = [*starts[1:], timeline.step_s]
    return starts[microbatch], ends[microbatch]


def _held(plan: Plan, timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """(edges [E + 1], axes held [L, E]); a gather counts from its start."""
    segments = [s for s in plan.segments for _ in range(s.num_layers)]
    whole = len(plan.mesh_sizes)
    changes = [  # (time, starts after ends, layer, axes held from then on)
        (event.start_s, 1, event.layer, event.axes[1])
        for event in timeline.events
        if event.kind == "weights"
    ]
    runs = [event for event in timeline.events if event.kind in ("forward", "backward")]
    # A layer that waits amid its work has several events, one after the other.
    for (kind, layer), found in itertools.groupby(runs, lambda e: (e.kind, e.layer)):
        parts, segment = list(found), segments[layer]
        kept = segment.fwd_keep_axes if kind == "forward" else segment.bwd_keep_axes
        changes.append((parts[0].start_s, 1, layer, whole))
        changes.append((parts[-1].end_s, 0, layer, kept))
    changes.sort(key=lambda change: change[:2])
    edges_s = np.unique([0.0, timeline.step_s, *(change[0] for change in changes)])
    held = np.zeros((plan.num_layers, len(edges_s) - 1), int)
    held[:] = [[segment.bwd_keep_axes] for segment in segments]
    for time_s, _, layer, axes in changes:
        held[layer, np.searchsorted(edges_s, time_s) :] = axes
    return edges_s, held


def _bars(timeline: Timeline) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By lane and kind, spans; touching spans of a kind are one."""
    lanes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for stream in LANES:
        events = [event for event in timeline.events if event.stream == stream]
        events.sort(key=lambda event: (_bar(event), event.start_s))
        for kind, found in itertools.groupby(events, key=_bar):
            spans = _spans((event.start_s, event.end_s) for event in found)
            lanes.setdefault(stream, {})[kind] = spans
    computes = lanes.get(timelines.COMPUTE, {})
    ends = sorted(
        (start, start + s) for spans in computes.values() for start, s in spans
    )
    # Where the end of what computes lies before the next start, nothing does.
    busy = [(0.0, 0.0), *_spans(ends), (timeline.step_s, 0.0)]
    gaps = [(a + s, b - a - s) for (a, s), (b, _) in itertools.pairwise(busy)]
    if idle := [(start, s) for start, s in gaps if s > _TOUCH_S]:
        computes["waits"] = idle
    return lanes


def _bar(event: Event) -> str:
    if event.kind in BARS:
        return event.kind
    return "other" if event.stream == timelines.COMPUTE else "moved"


def _spans(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted (start, end) -> (start, seconds), joined where they touch."""
    joined: list[list[float]] = []
    for start_s, end_s in intervals:
        if joined and start_s <= joined[-1][1] + _TOUCH_S:
            joined[-1][1] = max(joined[-1][1], end_s)
        else:
            joined.append([start_s, end_s])
    return [(start_s, end_s - start_s) for start_s, end_s in joined]

"""What plans may use: a filter of the search, as data."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.plans import Saved, SegmentPlan, StepChoices

MAX_SEGMENTS = 3  # of the layers before the tail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allowed:
    """What plans may use; by default everything that the engine can run.

    Attributes:
      saved: What layers may save.
      levels: Numbers of axes over which a device may hold a layer between steps, at
        rest or as a copy; empty for all.
      held_more: Whether a layer may hold more than its least, at rest or from its
        forward to its backward pass.
      fwd_copies: Whether copies may be kept from forward to backward.
      bwd_copies: Whether copies may be kept across steps.
      tail: Whether the last layers may run in parts of the microbatch.
      segments: Most segments of the layers before the tail.
      fixed: Fields of `StepChoices` that have to have these values.
    """

    saved: Collection[Saved] = tuple(Saved)
    levels: Collection[int] = ()
    held_more: bool = True
    fwd_copies: bool = True
    bwd_copies: bool = True
    tail: bool = True
    segments: int = MAX_SEGMENTS
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def layer(self, segment: SegmentPlan, axes: Axes) -> bool:
        """Whether layers may be treated like this."""
        rest, fwd, bwd = (
            segment.rest_axes,
            segment.fwd_keep_axes,
            segment.bwd_keep_axes,
        )
        return (
            segment.saved in self.saved
            and (not self.levels or {rest, bwd} <= set(self.levels))
            and (self.held_more or max(rest, fwd) == axes.lowest)
            and (self.fwd_copies or fwd == rest)
            and (self.bwd_copies or bwd == rest)
        )

    def step(self, choices: StepChoices) -> bool:
        """Whether a step may be cut and hold its tables and adapters like this."""
        return (self.tail or choices.tail_chunks == 1) and all(
            getattr(choices, name) == value for name, value in self.fixed.items()
        )


EVERYTHING = Allowed()

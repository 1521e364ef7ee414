"""Where and what: all that a layer's bytes depend on beside its own treatment."""

import dataclasses

from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.plans import Plan, StepChoices
from mtuner_jax.planning.workloads import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Where and what a layer runs.

    Attributes:
      workload: Sizes of what is trained.
      axes: Devices of the mesh.
      rows: Rows of a device that run at once: the microbatch, in the tail the
        microbatch over the chunks.
      merge_gathers: Whether one collective gathers all weights of a layer.
    """

    workload: Workload
    axes: Axes
    rows: int
    merge_gathers: bool

    @property
    def tokens(self) -> int:
        """Tokens of a device that run at once."""
        return self.rows * self.workload.max_length


def main(choices: StepChoices, workload: Workload) -> Site:
    """The site of the layers before the tail."""
    return _site(choices, workload, choices.microbatch)


def tail(choices: StepChoices, workload: Workload) -> Site:
    """The site of the tail's layers and of the loss: one chunk of the microbatch."""
    return _site(choices, workload, choices.microbatch // choices.tail_chunks)


def of_segments(plan: Plan, workload: Workload) -> list[Site]:
    """The site of each segment of a plan."""
    before, behind = main(plan, workload), tail(plan, workload)
    return [
        before if index < plan.tail_start else behind
        for index in range(len(plan.segments))
    ]


def _site(choices: StepChoices, workload: Workload, rows: int) -> Site:
    return Site(
        workload=workload,
        axes=choices.axes,
        rows=rows,
        merge_gathers=choices.merge_gathers,
    )

"""Plans that show what one mechanism of the mTuner paper is worth, all else equal.

Fillings: the memory between steps filled with nothing, with whole weights of some
layers, or with any ratios. Tails: the last layers in parts of the batch, or not. The
paper has neither layer inputs on the host nor a tail in its fillings, so these are
without.
"""

import dataclasses
from collections.abc import Callable, Collection

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.costs import passes
from mtuner_jax.planning.plans import Plan, Saved, SegmentPlan
from mtuner_jax.planning.workloads import Workload
from scripts.benchmarks import mechanisms
from scripts.benchmarks.mechanisms import Mechanism

NOTHING_KEPT, ONE_RATIO, PROGRESSIVE = "nothing kept", "one ratio", "progressive"
TAIL, NO_TAIL = "tail", "no tail"
_FILLINGS = (NOTHING_KEPT, ONE_RATIO, PROGRESSIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What plans are made for.

    Attributes:
      workload: Sizes and batch.
      hardware: The machine; its links those of the mesh's axes.
      mesh_sizes: Devices along each mesh axis, slowest link first.
      budget_bytes: That a compiled step may take on a device.
    """

    workload: Workload
    hardware: Hardware
    mesh_sizes: tuple[int, ...]
    budget_bytes: int

    def searcher(self, mechanism: Mechanism) -> mechanisms.Without:
        """Searches plans without a mechanism."""
        return mechanisms.Without(
            mechanism,
            workload=self.workload,
            hardware=self.hardware,
            mesh_sizes=self.mesh_sizes,
        )

    def step_s(self, plan: Plan) -> float:
        """Predicted seconds of a step."""
        return passes.step_s(plan, self.workload, self.hardware)


def fillings(place: Place) -> dict[str, Plan]:
    """The fastest plan of each filling; they differ only in what layers hold.

    All save layer inputs on the device and nothing else, and share the cut of the
    batch, tables and adapters with the fastest plan that keeps nothing.

    Returns:
      By name; empty if not even the plan that keeps nothing fits.
    """
    whole = len(place.mesh_sizes)
    levels = dict(zip(_FILLINGS, ({0}, {0, whole}, range(whole + 1)), strict=True))
    found: dict[str, Plan] = {}
    for name, allowed in levels.items():
        searcher = place.searcher(
            Mechanism(title=name, used_by=_other_than(allowed), is_tail=True)
        )
        if found:
            chosen = _frame(found[NOTHING_KEPT])
            searcher.frames = [f for f in searcher.frames if _frame_of(f) == chosen]
        plan = searcher.fitting(place.budget_bytes)
        if plan is None:
            return {}
        found[name] = plan
    return found


def tails(place: Place) -> dict[str, Plan]:
    """The fastest plan with the batch cut in parts only between steps, and in a tail.

    Both are without layer inputs on the host; the one with a tail has the tables and
    adapters of the other one.

    Returns:
      By name; empty if none fits, or none with a tail is faster.
    """
    on_host = mechanisms.ALL["on_host"]
    plain = place.searcher(dataclasses.replace(on_host, is_tail=True)).fitting(
        place.budget_bytes
    )
    if plain is None:
        return {}
    searcher = place.searcher(on_host)
    held = _frame(plain)[1:]
    searcher.frames = [f for f in searcher.frames if _frame_of(f)[1:] == held]
    plan = searcher.fitting(place.budget_bytes)
    if plan is None or plan.tail_chunks == 1:
        return {}
    return {NO_TAIL: plain, TAIL: plan}


def _other_than(levels: Collection[int]) -> Callable[[SegmentPlan, int], bool]:
    """Whether a layer holds something else between steps, or saves more than inputs."""

    def used_by(segment: SegmentPlan, lowest: int) -> bool:
        del lowest
        held = {segment.rest_axes, segment.bwd_keep_axes}
        return (
            segment.saved is not Saved.LAYER_INPUT
            or segment.fwd_keep_axes != segment.rest_axes
            or not held <= set(levels)
        )

    return used_by


def _frame(plan):
    cut = (plan.microbatch, plan.accumulation, plan.tail_chunks)
    return (cut, plan.embedding, plan.head, plan.adapters, plan.merge_gathers)


def _frame_of(frame):
    chosen = frame.chosen
    cut = (chosen.microbatch, chosen.accumulation, chosen.tail_chunks)
    return (cut, chosen.embedding, chosen.head, chosen.adapters, frame.merge_gathers)

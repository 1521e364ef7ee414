"""Plans that show what one mechanism of the mTuner paper is worth, all else equal.

Fillings: the memory between steps filled with nothing, with whole weights of some
layers, or with any ratios. Tails: the last layers in parts of the batch, or not. The
paper has neither layer inputs on the host nor a tail in its fillings, so these are
without.
"""

import dataclasses

from mtuner_jax.planning.costs import passes
from mtuner_jax.planning.plans import Plan, Saved
from mtuner_jax.planning.searching.allowed import Allowed
from mtuner_jax.planning.searching.search import Searcher
from mtuner_jax.runs.requests import PlanningInputs
from scripts.benchmarks import mechanisms

NOTHING_KEPT, ONE_RATIO, PROGRESSIVE = "nothing kept", "one ratio", "progressive"
TAIL, NO_TAIL = "tail", "no tail"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(PlanningInputs):
    """What plans are made for."""

    def plan(self, allowed: Allowed) -> Plan | None:
        """The fastest plan that fits and uses only what is allowed."""
        searcher = Searcher(
            self.workload, self.hardware, mesh_sizes=self.mesh_sizes, allowed=allowed
        )
        best = searcher.fitting(self.budget_bytes)
        return best.plan if best else None

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
    levels = {
        NOTHING_KEPT: (0,),
        ONE_RATIO: (0, whole),
        PROGRESSIVE: tuple(range(whole + 1)),
    }
    allowed = Allowed(saved=(Saved.LAYER_INPUT,), fwd_copies=False, tail=False)
    found: dict[str, Plan] = {}
    for name, held in levels.items():
        plan = place.plan(dataclasses.replace(allowed, levels=held))
        if plan is None:
            return {}
        allowed = dataclasses.replace(allowed, fixed=vars(plan.choices))
        found[name] = plan
    return found


def tails(place: Place) -> dict[str, Plan]:
    """The fastest plan with the batch cut in parts only between steps, and in a tail.

    Both are without layer inputs on the host; the one with a tail has the tables and
    adapters of the other one.

    Returns:
      By name; empty if none fits, or none with a tail is faster.
    """
    on_device = mechanisms.ALL["on_host"].without
    plain = place.plan(dataclasses.replace(on_device, tail=False))
    if plain is None:
        return {}
    names = ("embedding", "head", "adapters", "merge_gathers")
    fixed = {name: getattr(plain, name) for name in names}
    plan = place.plan(dataclasses.replace(on_device, fixed=fixed))
    if plan is None or plan.tail_chunks == 1:
        return {}
    return {NO_TAIL: plain, TAIL: plan}

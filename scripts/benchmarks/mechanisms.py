"""What a plan can do beyond plain sharding, and what a step would take without it.

A mechanism's worth is found by searching again with it forbidden: everything else may
take its place. So worths do not add up, and all can be small where each can replace
the other.
"""

import dataclasses

from mtuner_jax.planning.plans import AdapterState, Plan, Saved, Table
from mtuner_jax.planning.searching.allowed import Allowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Something that a plan may use.

    Attributes:
      title: Its name for people.
      without: What plans may use that do without it.
    """

    title: str
    without: Allowed

    def share(self, plan: Plan) -> float:
        """Share of the layers that use it; 0 or 1 where it is not about layers."""
        without = self.without
        if without.fixed:
            return float(not without.step(plan))
        if without.segments == 1:
            kinds = {dataclasses.replace(s, num_layers=1) for s in plan.segments}
            return float(len(kinds) > 1)
        if not without.tail:
            return plan.tail_layers / plan.num_layers if plan.tail_chunks > 1 else 0.0
        layers = sum(
            segment.num_layers
            for segment in plan.segments
            if not without.layer(segment, plan.axes)
        )
        return layers / plan.num_layers


_INPUTS = (Saved.LAYER_INPUT, Saved.LAYER_INPUT_ON_HOST)
# In the order in which maps show them.
ALL: dict[str, Mechanism] = {
    "held": Mechanism(
        title="more held (rest, fwd_keep)", without=Allowed(held_more=False)
    ),
    "bwd_keep": Mechanism(
        title="copies across steps (bwd_keep)", without=Allowed(bwd_copies=False)
    ),
    "saved": Mechanism(
        title="tensors saved, not redone (saved)", without=Allowed(saved=_INPUTS)
    ),
    "on_host": Mechanism(
        title="layer inputs on the host",
        without=Allowed(saved=tuple(set(Saved) - {Saved.LAYER_INPUT_ON_HOST})),
    ),
    "tail": Mechanism(
        title="tail in parts of the batch (tail)", without=Allowed(tail=False)
    ),
    "mix": Mechanism(
        title="layers treated differently", without=Allowed(segments=1, tail=False)
    ),
    "tables": Mechanism(
        title="tables split or resident",
        without=Allowed(fixed={"embedding": Table.GATHERED, "head": Table.GATHERED}),
    ),
    "adapters": Mechanism(
        title="adapters sharded",
        without=Allowed(fixed={"adapters": AdapterState.REPLICATED}),
    ),
}

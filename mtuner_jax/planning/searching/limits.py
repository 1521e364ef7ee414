"""What keeps a step from being faster: computation, the link, or memory.

This takes further searches, so it is looked for only where it is shown. They only look
for plans that win more than a share worth naming, and so are cheaper than the first.
"""

import enum
from typing import NamedTuple

from mtuner_jax.numbers import sizes
from mtuner_jax.planning.costs import forecasts, passes
from mtuner_jax.planning.searching import search
from mtuner_jax.planning.searching.search import Found

_HIDDEN = 0.02  # a smaller share of exposed communication binds nothing
_WORTH = 0.01  # a smaller share of a step is not worth more memory
_UNLIMITED_BYTES = 2**50


class Binds(enum.StrEnum):
    """What keeps a step from being faster."""

    COMPUTE = "compute-bound"
    LINK = "link-bound"
    MEMORY = "memory-bound"


class Limit(NamedTuple):
    """What binds, and the sentence that says so."""

    binds: Binds
    reason: str


class _Won(NamedTuple):
    """What another budget wins: a share of the step, by a plan of so many bytes."""

    share: float
    num_bytes: int


def find(found: Found) -> Limit:
    """What binds the fastest step of a budget."""
    hardware, budget_bytes = found.searcher.hardware, found.budget_bytes
    exposed = found.timeline.exposed_s / found.timeline.step_s
    hidden = exposed <= _HIDDEN
    reason = (
        f"computation is {1 - exposed:.1%} of the step"
        if hidden
        else f"communication is exposed for {exposed:.1%} of the step"
    )
    card_bytes = max(hardware.memory_bytes - hardware.reserve_bytes, budget_bytes)
    most = _won(found, card_bytes)
    if most is not None:
        between = budget_bytes + (most.num_bytes - budget_bytes) // 4
        steps = [_won(found, between), most]
        amounts = [
            f"{won.share:.1%} faster with {sizes.gib(won.num_bytes)}"
            for won in steps
            if won is not None
        ]
        how = "by recomputing less " if hidden else ""
        reason += f"; {how}it would be {', '.join(amounts)} per device"
        return Limit(Binds.COMPUTE if hidden else Binds.MEMORY, reason)
    if hidden:
        return Limit(Binds.COMPUTE, reason)
    if _won(found, _UNLIMITED_BYTES) is None:
        return Limit(Binds.LINK, f"{reason} with any memory")
    return Limit(
        Binds.MEMORY,
        f"{reason}; what would hide it takes more than the "
        f"{sizes.gib(hardware.memory_bytes)} of a card",
    )


def _won(found: Found, budget_bytes: int) -> _Won | None:
    """What the fastest plan within a budget wins, if it is worth anything."""
    # A score is a step's seconds and at most this price of segments, so a plan that
    # wins enough scores below; where nothing does, no plan wins enough.
    searcher, step_s = found.searcher, found.timeline.step_s
    limit_s = (1.0 - _WORTH) * step_s * search.MAX_PRICE
    best = searcher.best(budget_bytes, below_s=limit_s)
    if best is None:
        return None
    seconds = passes.step_s(best.plan, searcher.workload, searcher.hardware)
    share = 1.0 - seconds / step_s
    if share <= _WORTH:
        return None
    needed = forecasts.forecast(best.plan, searcher.workload).total_bytes
    return _Won(share, needed)

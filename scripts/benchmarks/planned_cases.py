"""Cases of a comparison with their plans, and which of them decide most."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import search, static_plans
from scripts.benchmarks import ablations
from scripts.benchmarks.run_lists import Case

MOST_GAIN = 99.0
_GAIN_STEP = 0.05
_NUM_STATICS = 2


class PlannedCase(NamedTuple):
    """A case with what is planned for it.

    Attributes:
      case: What is compared.
      place: What plans are made for.
      planned: The fastest plan.
      statics: (name, plan) of the fastest static plans, best first.
    """

    case: Case
    place: ablations.Place
    planned: Plan
    statics: tuple[tuple[str, Plan], ...]

    @property
    def gain(self) -> float:
        """How many times faster than the best static plan; infinite without one."""
        if not self.statics:
            return math.inf
        return self.place.step_s(self.statics[0][1]) / self.place.step_s(self.planned)


def make(case: Case, place: ablations.Place) -> PlannedCase:
    """Plans a case.

    Raises:
      ConfigError: No plan fits.
    """
    planned = search.fastest(**vars(place)).plan
    found = [s for s in static_plans.best(**vars(place)) if s.plan is not None]
    fastest = sorted(found, key=lambda static: (static.step_s, static.name))
    return PlannedCase(
        case=case,
        place=place,
        planned=planned,
        statics=tuple((s.name, s.plan) for s in fastest[:_NUM_STATICS] if s.plan),
    )


def rounds(cases: Iterable[PlannedCase]) -> Mapping[Case, int]:
    """By case: its number among those of its model and setting, most gain first."""

    def deciding(one: PlannedCase) -> tuple[int, float, Case]:
        # Gains that differ by less than a step are the same; the shorter step decides.
        steps_of_gain = round(min(one.gain, MOST_GAIN) / _GAIN_STEP)
        return -steps_of_gain, one.place.step_s(one.planned), one.case

    seen: dict[tuple[str, str], int] = {}
    found: dict[Case, int] = {}
    for one in sorted(cases, key=deciding):
        group = (one.case.setting, one.case.model)
        found[one.case] = seen.get(group, 0)
        seen[group] = found[one.case] + 1
    return found

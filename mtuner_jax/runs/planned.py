"""Plan, compile, compare with the budget, plan smaller: here and nowhere else."""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from mtuner_jax.configs import ConfigError
from mtuner_jax.numbers import sizes
from mtuner_jax.planning.reports import Report
from mtuner_jax.runs import pricing
from mtuner_jax.runs.requests import PlanningInputs
from mtuner_jax.training.executors import NoSmallerPlanError

T = TypeVar("T")
MAX_REPLANS = 3
# XLA's temporaries on CPUs are 1.1 to 1.7 times those that are forecast for GPUs.
_CPU_OVERHEAD = 1.5
_NO_BYTES = 16  # per device: as good as nothing, while 0 stands for any number
_logger = logging.getLogger(__name__)


def host_bytes(report: Report) -> int:
    """What a plan takes of the host's memory where all its devices are virtual."""
    device = _CPU_OVERHEAD * report.forecast.total_bytes + report.host_bytes
    return int(math.prod(report.plan.mesh_sizes) * device)


def warn_of_host(report: Report, free_bytes: int, *, name: str) -> None:
    """Says that a given plan takes more than the host of virtual devices has.

    Args:
      report: The plan.
      free_bytes: Of the host's memory; 0 for GPUs.
      name: What the user calls the plan.
    """
    needed = host_bytes(report)
    if free_bytes and needed > free_bytes:
        _logger.warning(
            "plan %s takes about %s of this host's memory on virtual devices, %s are "
            "free: lower max_length or the global batch, or use --plan auto",
            name,
            sizes.gib(needed),
            sizes.gib(free_bytes),
        )


class Settled(NamedTuple, Generic[T]):
    """What was built of the last plan.

    Attributes:
      built: The engine, or what was compiled.
      over_bytes: By which it exceeds the budget, per device; 0 or less if it fits.
    """

    built: T
    over_bytes: int


class Planner:
    """Searches for the plan of a step, and for smaller ones where it was too large.

    However often and from wherever it is asked, it plans again `MAX_REPLANS` times.

    Attributes:
      inputs: What plans are priced by.
      report: The plan found last; compares with the budget that was asked for, also
        where the search was held to less.
      host_bytes: Of this host's memory, which virtual devices share; 0 for GPUs.
    """

    report: Report

    def __init__(self, inputs: PlanningInputs, *, host_bytes: int = 0):
        self.inputs = inputs
        self.host_bytes = host_bytes
        self._replans = 0

    def fastest(self) -> Report:
        """The fastest plan whose forecast is within the budget.

        One for virtual devices also fits the host's memory.

        Raises:
          ConfigError: No plan fits.
        """
        self.report = pricing.search_plan(self.inputs)
        needed = host_bytes(self.report)
        if self.host_bytes and needed > self.host_bytes:
            _logger.info(
                "the fastest plan would take %s of this host's memory, %s are free: "
                "planned again for that",
                sizes.gib(needed),
                sizes.gib(self.host_bytes),
            )
            self._share_host()
        return self.report

    def _share_host(self) -> None:
        """Plans for equal parts of the host's memory, as the only memory there is."""
        hardware = self.inputs.hardware
        nowhere_else = dataclasses.replace(
            hardware, host_memory_bytes=_NO_BYTES * hardware.devices_per_host
        )
        devices = math.prod(self.inputs.mesh_sizes)
        for overhead in (_CPU_OVERHEAD, 1.0):
            held = dataclasses.replace(
                self.inputs,
                hardware=nowhere_else,
                budget_bytes=int(self.host_bytes / overhead) // devices,
            )
            try:
                self.report = pricing.search_plan(held)
            except ConfigError as error:
                problem = error
            else:
                self.inputs = held
                return
        raise ConfigError(
            f"{devices} virtual devices share this host's memory, of which "
            f"{sizes.gib(self.host_bytes)} are free: {problem}"
        )

    def smaller(self, missing_bytes: int) -> Report:
        """The fastest plan that is forecast to take that much less than the last one.

        Raises:
          NoSmallerPlanError: There is none, or it was planned again often enough.
        """
        budget = self.inputs.budget_bytes
        if self._replans == MAX_REPLANS:
            raise NoSmallerPlanError(
                f"the plan was changed {MAX_REPLANS} times; lower memory_budget, "
                "max_length or lora.r"
            )
        limit = self.report.forecast.total_bytes - missing_bytes
        try:
            report = pricing.search_plan(
                dataclasses.replace(self.inputs, budget_bytes=limit)
            )
        except ConfigError as error:
            raise NoSmallerPlanError(
                f"no plan fits the budget of {budget:,} bytes ({sizes.gib(budget)}) "
                f"per device: the last one needs {sizes.gib(missing_bytes)} more than "
                "there is, and none takes that much less; raise memory_budget where "
                "the card has more, or lower max_length or lora.r"
            ) from error
        self._replans += 1
        self.report = dataclasses.replace(report, budget_bytes=budget)
        return self.report

    def settle(
        self,
        build: Callable[[Report], T],
        *,
        over_bytes: Callable[[T], int],
        tell: Callable[[int], Any],
    ) -> Settled[T]:
        """Builds the last plan, and smaller ones until what was built fits.

        Args:
          build: Makes of a plan what is compared with the budget.
          over_bytes: By how much that exceeds the budget; 0 or less if it fits.
          tell: Told the missing bytes before it is planned again.

        Returns:
          What was built last; it exceeds the budget where `MAX_REPLANS` was reached.

        Raises:
          NoSmallerPlanError: No plan is small enough.
        """
        built = build(self.report)
        over = over_bytes(built)
        while over > 0 and self._replans < MAX_REPLANS:
            tell(over)
            built = build(self.smaller(over))
            over = over_bytes(built)
        return Settled(built, over)

"""Runs a run's steps, and has the plan mended where a device disagrees with it.

A plan rests on a forecast of memory. What XLA allocates is compared with the budget
whenever the step has been compiled anew, and the first execution of each program is
watched: where memory does not suffice, a smaller plan takes over, with the state of
before that step, so that no step is lost and none is done twice. Where none may take
over, the user is told what to change.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from mtuner_jax.configs import ConfigError
from mtuner_jax.engines import compiling, profile_guided
from mtuner_jax.engines.elastic import steps
from mtuner_jax.numbers import sizes
from mtuner_jax.ops.cross_entropy.operands import TokenLoss
from mtuner_jax.protocols.states import Batch, Params, StepMetrics, TrainState

_logger = logging.getLogger(__name__)
MAX_REPLANS = 3
_UNKNOWN_SHARE = 0.05  # of the budget, where an allocation failed


class OverBudgetError(ConfigError):
    """A compiled step that takes more than the budget, where that is to stop a run.

    Attributes:
      missing_bytes: By which it exceeds the budget, per device.
    """

    def __init__(self, needed_bytes: int, budget_bytes: int):
        self.missing_bytes = needed_bytes - budget_bytes
        super().__init__(
            f"strict_plan: the compiled step takes {needed_bytes:,} bytes per device, "
            f"{self.missing_bytes:,} more than the budget; raise memory_budget, or "
            "leave strict_plan=false to have it planned again"
        )


class OutOfMemoryError(ConfigError):
    """An allocation failed on a device, and no smaller plan may take over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The compiled programs of a plan.

    Attributes:
      spec: What they were built from.
      train: (state, weights, batch, arenas) -> (state, StepMetrics, arenas).
      evaluate: (adapters, weights, batch) -> TokenLoss.
      state_shardings: Where the state lies.
      learning_rate: Optimizer steps done -> the next step's rate.
    """

    spec: steps.StepSpec
    train: profile_guided.GuidedStep
    evaluate: Callable[[Params, Params, Batch], TokenLoss]
    state_shardings: TrainState
    learning_rate: optax.Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A plan that is ready to run: its programs, weights and arenas."""

    programs: Programs
    weights: Params
    arenas: steps.Arenas


class Executor:
    """Runs steps of one setup, and of the next one if that needs too much memory.

    Attributes:
      refusal: Why the run should end after the step that was just done, which is
        good; None while it may go on.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        budget_bytes: int,
        rebuild: Callable[[int], Setup] | None,
        strict: bool = False,
    ):
        """Takes over a setup.

        Args:
          setup: To run.
          budget_bytes: That a compiled step may take on a device; 0 checks nothing.
          rebuild: Missing bytes -> a setup that needs that much less; None where the
            plan is the user's own.
          strict: Refuse a step that exceeds the budget, where nothing is rebuilt.
        """
        self._setup = setup
        self._budget_bytes = budget_bytes
        self._rebuild = rebuild
        self._strict = strict
        self._replans = 0
        self._done: int | None = None  # optimizer steps
        self._proven: jax.stages.Compiled | None = None
        self._evaluated: Programs | None = None
        self.refusal: OverBudgetError | None = None

    @property
    def programs(self) -> Programs:
        """Those in use."""
        return self._setup.programs

    def train(self, state: TrainState, rows: Batch) -> tuple[TrainState, StepMetrics]:
        """One optimizer step on a global batch; `state` is donated.

        Raises:
          OutOfMemoryError: No smaller plan may be tried.
        """
        host: TrainState | None = None
        if self._done is None:
            self._done = int(state.step)
        while True:
            step = self.programs.train
            compiled = step.compiled
            new = compiled is None or compiled is not self._proven
            if new and self._rebuild is not None and host is None:
                host = _to_host(state)
            try:
                results = self._run(state, rows)
                results = jax.block_until_ready(results) if new else results
            except jax.errors.JaxRuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                if host is None or not self._may_mend():
                    raise self._out_of_memory(rows, f"step {self._done + 1}") from error
                missing = int(_UNKNOWN_SHARE * self._budget_bytes)
                state = self._mend(host, missing, "an allocation failed")
                continue
            self._proven = compiled
            self._done += 1
            return self._check(results) if step.compiled is not compiled else results

    def evaluate(self, state: TrainState, rows: Batch) -> TokenLoss:
        """Sums over a batch, on their way.

        Raises:
          OutOfMemoryError: The evaluation needs more memory than there is.
        """
        programs = self.programs
        batch = _put(programs.spec, rows)
        try:
            sums = programs.evaluate(state.adapters, self._setup.weights, batch)
            if programs is not self._evaluated:
                sums = jax.block_until_ready(sums)
        except jax.errors.JaxRuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            where = f"the evaluation after step {self._done or 0}"
            raise self._out_of_memory(rows, where) from error
        self._evaluated = programs
        return sums

    def _run(self, state, rows):
        programs = self.programs
        batch = _put(programs.spec, rows)
        state, metrics, arenas = programs.train(
            state, self._setup.weights, batch, self._setup.arenas
        )
        self._setup = dataclasses.replace(self._setup, arenas=arenas)
        return state, metrics

    def _check(self, results):
        """Compares what was compiled anew with the budget."""
        state, metrics = results
        compiled = self.programs.train.compiled
        if compiled is None or not self._budget_bytes:
            return results
        needed = compiling.compiled_bytes(compiled).total
        missing = needed - self._budget_bytes
        if missing <= 0:
            return results
        if self._rebuild is not None and self._replans < MAX_REPLANS:
            why = f"compiled again it takes {sizes.gib(missing)} more than the budget"
            state = self._mend(_to_host(state), missing, why)
        elif self._strict:
            self.refusal = OverBudgetError(needed, self._budget_bytes)
        else:
            warn_over_budget(needed, self._budget_bytes)
        return state, metrics

    def _may_mend(self) -> bool:
        # Several processes need not fail together, and would wait for each other.
        return jax.process_count() == 1 and self._replans < MAX_REPLANS

    def _mend(self, host: TrainState, missing_bytes: int, why: str) -> TrainState:
        """Another setup for the same state."""
        assert self._rebuild is not None
        self._replans += 1
        _logger.warning("the plan is changed: %s", why)
        programs = self.programs
        self._setup = Setup(programs=programs, weights={}, arenas={})  # frees memory
        self._proven = None
        self._setup = self._rebuild(missing_bytes)
        return _to_devices(host, self.programs.state_shardings)

    def _out_of_memory(self, rows: Batch, where: str) -> OutOfMemoryError:
        """The error for an allocation that failed for good."""
        plan, compiled = self.programs.spec.plan, self.programs.train.compiled
        if self._rebuild is None:
            advice = (
                "use --plan auto without strict_plan, which plans again with less, or "
                "lower per_device_train_batch_size or max_length, or set "
                "gradient_checkpointing=true"
            )
        else:
            advice = "lower memory_budget, max_length or lora.r"
        parts = [
            f"out of memory in {where}: the plan runs {plan.microbatch} rows of "
            f"{rows.input_ids.shape[-1]:,} tokens on a device at once"
        ]
        if compiled is not None:
            needed = compiling.compiled_bytes(compiled).total
            parts.append(f"its compiled step takes {needed:,} bytes per device")
        if self._budget_bytes:
            parts.append(f"the budget is {self._budget_bytes:,}")
        if self._replans:
            parts.append(f"the plan was changed {self._replans} times")
        return OutOfMemoryError(f"{', '.join(parts)}; {advice}")


def warn_over_budget(needed_bytes: int, budget_bytes: int) -> None:
    """Says that a compiled step exceeds the budget and runs nevertheless."""
    _logger.warning(
        "the compiled step takes %s bytes per device, %s more than the budget of %s: "
        "it may run out of memory; --plan auto with a smaller memory_budget leaves "
        "more room",
        f"{needed_bytes:,}",
        f"{needed_bytes - budget_bytes:,}",
        f"{budget_bytes:,}",
    )


def _is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _put(spec: steps.StepSpec, rows: Batch) -> Batch:
    return steps.put(steps.cut(rows, spec.plan), spec.mesh)


def _to_host(state: TrainState) -> TrainState:
    """The whole state in this process's memory."""

    def copy(leaf: Any) -> np.ndarray:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.array(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(copy, state)


def _to_devices(state: TrainState, placed: TrainState) -> TrainState:
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: leaf[index]
        ),
        state,
        placed,
    )

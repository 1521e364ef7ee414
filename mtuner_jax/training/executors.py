"""Runs a run's steps, and has the plan mended where a device disagrees with it.

A plan rests on a forecast of memory. What XLA allocates is compared with the budget
whenever the step has been compiled anew, and the first execution of each program is
watched: where memory does not suffice, a smaller plan takes over, with the state of
before that step, so that no step is lost and none is done twice.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from mtuner_jax import sizes
from mtuner_jax.engines import compiling, elastic_step, profile_guided
from mtuner_jax.engines.states import Batch, Params, StepMetrics, TrainState
from mtuner_jax.ops import losses

_logger = logging.getLogger(__name__)
MAX_REPLANS = 3
_UNKNOWN_SHARE = 0.05  # of the budget, where an allocation failed


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

    spec: elastic_step.StepSpec
    train: profile_guided.GuidedStep
    evaluate: Callable[[Params, Params, Batch], losses.TokenLoss]
    state_shardings: TrainState
    learning_rate: optax.Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A plan that is ready to run: its programs, weights and arenas."""

    programs: Programs
    weights: Params
    arenas: elastic_step.Arenas


class Executor:
    """Runs steps of one setup, and of the next one if that needs too much memory."""

    def __init__(
        self,
        setup: Setup,
        *,
        budget_bytes: int,
        rebuild: Callable[[int], Setup] | None,
    ):
        """Takes over a setup.

        Args:
          setup: To run.
          budget_bytes: That a compiled step may take on a device; 0 checks nothing.
          rebuild: Missing bytes -> a setup that needs that much less; None where the
            plan is the user's own.
        """
        self._setup = setup
        self._budget_bytes = budget_bytes
        self._rebuild = rebuild
        self._replans = 0
        self._proven: jax.stages.Compiled | None = None

    @property
    def programs(self) -> Programs:
        """Those in use."""
        return self._setup.programs

    def train(self, state: TrainState, rows: Batch) -> tuple[TrainState, StepMetrics]:
        """One optimizer step on a global batch; `state` is donated.

        Raises:
          jax.errors.JaxRuntimeError: Out of memory, and no smaller plan may be tried.
        """
        host: TrainState | None = None
        while True:
            step = self.programs.train
            compiled = step.compiled
            new = compiled is None or compiled is not self._proven
            watched = new and self._rebuild is not None
            if watched and host is None:
                host = _to_host(state)
            try:
                results = self._run(state, rows)
                results = jax.block_until_ready(results) if watched else results
            except jax.errors.JaxRuntimeError as error:
                if host is None or not self._may_mend(error):
                    raise
                missing = int(_UNKNOWN_SHARE * self._budget_bytes)
                state = self._mend(host, missing, "an allocation failed")
                continue
            self._proven = compiled
            return self._check(results) if step.compiled is not compiled else results

    def evaluate(self, state: TrainState, rows: Batch) -> losses.TokenLoss:
        """Sums over a batch, on their way."""
        programs = self.programs
        batch = _put(programs.spec, rows)
        return programs.evaluate(state.adapters, self._setup.weights, batch)

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
        if compiled is None or not self._budget_bytes or self._rebuild is None:
            return results
        missing = compiling.compiled_bytes(compiled).total - self._budget_bytes
        if missing > 0 and self._replans < MAX_REPLANS:
            why = f"compiled again it takes {sizes.gib(missing)} more than the budget"
            state = self._mend(_to_host(state), missing, why)
        return state, metrics

    def _may_mend(self, error: Exception) -> bool:
        out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
        # Several processes need not fail together, and would wait for each other.
        alone = jax.process_count() == 1
        return out_of_memory and alone and self._replans < MAX_REPLANS

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


def _put(spec: elastic_step.StepSpec, rows: Batch) -> Batch:
    return elastic_step.put(elastic_step.cut(rows, spec.plan), spec.mesh)


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

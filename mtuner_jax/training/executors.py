"""Runs a run's steps, and has the plan mended where a device disagrees with it.

A plan rests on a forecast of memory. What XLA allocates is compared with the budget
whenever the step has been compiled anew, and the first execution of each program is
watched: where memory does not suffice, a smaller plan takes over, with the state of
before that step, so that no step is lost and none is done twice. Where none may take
over, a program that runs goes on, and a step that failed ends the run with the state
of before it in the error.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtuner_jax.configs import ConfigError
from mtuner_jax.numbers import sizes
from mtuner_jax.ops.cross_entropy.operands import TokenLoss
from mtuner_jax.protocols.engines import Engine, State
from mtuner_jax.protocols.states import Batch, StepMetrics

_logger = logging.getLogger(__name__)
_UNKNOWN_SHARE = 0.05  # of the budget, where an allocation failed

# (missing bytes, frees the engine's memory) -> the loaded engine of a plan that takes
# that much less; raises NoSmallerPlanError.
Replan = Callable[[int, Callable[[], None]], Engine]


class NoSmallerPlanError(ConfigError):
    """No plan takes less than the one that was too large."""


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
    """An allocation failed on a device, and no smaller plan may take over.

    Attributes:
      state: The state of before what failed; None where it is lost, or where other
        processes may not save it with this one.
    """

    state: State | None = None


class Executor:
    """Runs steps of one engine, and of the next one if that needs too much memory.

    Attributes:
      engine: The one in use.
      refusal: Why the run should end after the step that was just done, which is
        good; None while it may go on.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        budget_bytes: int,
        replan: Replan | None,
        strict: bool = False,
    ):
        """Takes over a loaded engine.

        Args:
          engine: To run.
          budget_bytes: That a compiled step may take on a device; 0 checks nothing.
          replan: Makes the engine of a smaller plan; None where the plan is the
            user's own.
          strict: Refuse a step that exceeds the budget, where nothing is replanned.
        """
        self.engine = engine
        self.refusal: OverBudgetError | None = None
        self._budget_bytes = budget_bytes
        self._replan = replan
        self._strict = strict
        self._done: int | None = None  # optimizer steps
        self._proven: object | None = None  # the program that has run
        self._evaluated: Engine | None = None

    def train(self, state: State, rows: Batch) -> tuple[State, StepMetrics]:
        """One optimizer step on a global batch; `state` is donated.

        Raises:
          OutOfMemoryError: No smaller plan may be tried.
        """
        host: State | None = None
        if self._done is None:
            self._done = int(state.step)
        while True:
            engine, program = self.engine, self.engine.program
            new = program is None or program is not self._proven
            if new and self._replan is not None and host is None:
                host = _to_host(state)
            try:
                results = engine.train(state, rows)
                results = jax.block_until_ready(results) if new else results
            except jax.errors.JaxRuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                state = self._after_failure(host, rows, error)
                continue
            self._proven = program
            self._done += 1
            return results if engine.program is program else self._check(*results)

    def evaluate(self, state: State, rows: Batch) -> TokenLoss:
        """Sums over a batch, on their way.

        Raises:
          OutOfMemoryError: The evaluation needs more memory than there is; the state
            is as good as before.
        """
        try:
            sums = self.engine.evaluate(state, rows)
            if self.engine is not self._evaluated:
                sums = jax.block_until_ready(sums)
        except jax.errors.JaxRuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            where = f"the evaluation after step {self._done or 0}"
            failure = self._out_of_memory(rows, where)
            # Other processes need not fail, and saving would wait for them.
            failure.state = state if jax.process_count() == 1 else None
            raise failure from error
        self._evaluated = self.engine
        return sums

    def _after_failure(self, host: State | None, rows: Batch, error: Exception) -> Any:
        """The state of before a step that found no memory, on a smaller plan."""
        where = f"step {(self._done or 0) + 1}"
        # Several processes need not fail together, and would wait for each other.
        if host is None or jax.process_count() > 1:
            raise self._out_of_memory(rows, where) from error
        missing = int(_UNKNOWN_SHARE * self._budget_bytes)
        try:
            return self._mend(host, missing, "an allocation failed")
        except NoSmallerPlanError as reason:
            failure = self._out_of_memory(rows, where, str(reason))
            failure.state = host
            raise failure from error

    def _check(self, state: State, metrics: StepMetrics) -> tuple[State, StepMetrics]:
        """Compares what was compiled anew with the budget."""
        needed = self.engine.compiled_bytes() if self._budget_bytes else 0
        missing = needed - self._budget_bytes
        if missing <= 0:
            return state, metrics
        if self._replan is None and self._strict:
            self.refusal = OverBudgetError(needed, self._budget_bytes)
        elif self._replan is None:
            warn_over_budget(needed, self._budget_bytes)
        else:
            why = f"compiled again it takes {sizes.gib(missing)} more than the budget"
            try:
                state = self._mend(_to_host(state), missing, why)
            except NoSmallerPlanError as reason:
                self.engine.load()
                warn_over_budget(needed, self._budget_bytes, because=f" ({reason})")
        return state, metrics

    def _mend(self, host: State, missing_bytes: int, why: str) -> State:
        """The same state on the engine of a smaller plan."""
        assert self._replan is not None
        _logger.info("a smaller plan is looked for: %s", why)
        self.engine = self._replan(missing_bytes, self.engine.release)
        _logger.warning("the plan is changed: %s", why)
        self._proven = None
        return jax.tree.map(
            lambda leaf, target: jax.make_array_from_callback(
                leaf.shape, target.sharding, lambda index: leaf[index]
            ),
            host,
            self.engine.abstract_state(),
        )

    def _out_of_memory(
        self, rows: Batch, where: str, reason: str = ""
    ) -> OutOfMemoryError:
        """The error for an allocation that failed for good."""
        advice = reason or "lower memory_budget, max_length or lora.r"
        if self._replan is None:
            advice = (
                "use --plan auto without strict_plan, which plans again with less, or "
                "lower per_device_train_batch_size or max_length, or set "
                "gradient_checkpointing=true"
            )
        parts = [
            f"out of memory in {where}: the plan runs {self.engine.device_rows} rows "
            f"of {rows.input_ids.shape[-1]:,} tokens on a device at once"
        ]
        if self.engine.program is not None:
            needed = self.engine.compiled_bytes()
            parts.append(f"its compiled step takes {needed:,} bytes per device")
        if self._budget_bytes:
            parts.append(f"the budget is {self._budget_bytes:,}")
        return OutOfMemoryError(f"{', '.join(parts)}; {advice}")


def warn_over_budget(
    needed_bytes: int, budget_bytes: int, *, because: str = ""
) -> None:
    """Says that a compiled step exceeds the budget and runs nevertheless."""
    _logger.warning(
        f"the compiled step takes {needed_bytes:,} bytes per device, "
        f"{needed_bytes - budget_bytes:,} more than the budget of {budget_bytes:,}: it "
        "may run out of memory; --plan auto with a smaller memory_budget leaves more "
        f"room{because}"
    )


def _is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _to_host(state: State) -> State:
    """The whole state in this process's memory."""

    def copy(leaf: jax.Array) -> np.ndarray:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.array(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(copy, state)

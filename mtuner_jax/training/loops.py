"""The training loop: batches in, records and checkpoints out.

Metrics of a step are read after the next step has been sent to the devices, so that
the devices never wait for the host, except before an evaluation or a checkpoint.
"""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from mtuner_jax.checkpoints import metas, store
from mtuner_jax.configs import RunConfig
from mtuner_jax.data import loading
from mtuner_jax.protocols.engines import State
from mtuner_jax.protocols.states import Params, StepMetrics
from mtuner_jax.training import executors, metrics, reporters

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keeper:
    """Where a run is kept.

    Attributes:
      checkpoints: The run's checkpoints.
      meta: The run's identity.
      write_adapter: (what the engine exports, folder) -> writes the adapter's files.
    """

    checkpoints: store.Store
    meta: metas.RunMeta
    write_adapter: Callable[[Params, pathlib.Path], None]


@dataclasses.dataclass
class _Pending:
    """A step that is on its way: what is known, and what the devices will tell."""

    step: int
    epoch: float
    tokens: int
    data_time: float
    metrics: StepMetrics


class Loop:
    """One run from its current step to its last."""

    def __init__(
        self,
        config: RunConfig,
        executor: executors.Executor,
        *,
        data: loading.RunData,
        keeper: Keeper,
        learning_rate: optax.Schedule,
    ):
        self._config = config
        self._executor = executor
        self._train_data = data.train
        self._eval_data = data.eval
        self._keeper = keeper
        self._learning_rate = learning_rate
        self._pending: _Pending | None = None
        self._last_end = 0.0

    def run(
        self, state: State, reporter: reporters.Reporter, *, total_steps: int
    ) -> State:
        """Trains until `total_steps` optimizer steps are done.

        Raises:
          NonFiniteError: A loss or gradient is NaN or infinite; the step is not saved.
          SaveError: A checkpoint could not be written.
          OverBudgetError: A step compiled again exceeds the budget, with
            `strict_plan`; what was done is saved.
          OutOfMemoryError: Of a step or an evaluation; the state of before it is
            saved if the error has it.
        """
        config, first = self._config, int(state.step)
        if config.eval_on_start and first == 0:
            self._evaluate(state, reporter, step=0)
        self._last_end = time.perf_counter()
        for step in range(first + 1, total_steps + 1):
            state = self._step(state, reporter, step=step)
            last = step == total_steps
            if last or _due(step, config.eval_steps):
                self._flush(reporter)
                self._evaluate(state, reporter, step=step)
            refusal = None if last else self._executor.refusal
            if last or refusal or _due(step, config.save_steps):
                self._flush(reporter)
                self._save(state, step=step)
            if refusal is not None:
                raise refusal
            self._keeper.checkpoints.poll()
        return state

    def _step(self, state: State, reporter: reporters.Reporter, *, step: int) -> State:
        start = time.perf_counter()
        position = self._train_data.get_state()
        rows = next(self._train_data)
        data_time = time.perf_counter() - start
        try:
            state, step_metrics = self._executor.train(state, rows)
        except executors.OutOfMemoryError as error:
            self._flush(reporter)
            if error.state is not None:
                self._save(error.state, step=step - 1, position=position)
                _logger.warning("step %d failed: saved what was before it", step)
            raise
        self._flush(reporter)
        self._pending = _Pending(
            step=step,
            epoch=self._train_data.epoch,
            tokens=int(np.count_nonzero(rows.segment_ids)),
            data_time=data_time,
            metrics=step_metrics,
        )
        return state

    def _flush(self, reporter: reporters.Reporter) -> None:
        """Reports the step on its way, waiting for it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = jax.device_get(pending.metrics)
        end = time.perf_counter()
        lr: Any = self._learning_rate(pending.step - 1)
        record = metrics.StepRecord(
            step=pending.step,
            epoch=pending.epoch,
            loss=float(values.loss),
            lr=float(lr),
            grad_norm=float(values.grad_norm),
            tokens=pending.tokens,
            trained_tokens=int(values.trained_tokens),
            step_time=end - self._last_end,
            data_time=pending.data_time,
            peak_memory=metrics.peak_memory(self._executor.engine.devices),
        )
        self._last_end = end
        reporter.step(record)

    def _evaluate(
        self, state: State, reporter: reporters.Reporter, *, step: int
    ) -> None:
        """Mean loss of a trained token over the whole evaluation set."""
        if self._eval_data is None:
            return
        limit = self._config.max_eval_batches
        sums = []
        for number, rows in enumerate(self._eval_data):
            if limit and number >= limit:
                break
            try:
                sums.append(self._executor.evaluate(state, rows))
            except executors.OutOfMemoryError as error:
                if step and error.state is not None:
                    self._save(error.state, step=step)
                    _logger.warning("evaluation failed: saved step %d", step)
                raise
        values = jax.device_get(sums)
        tokens = sum(float(value.tokens) for value in values)
        loss = sum(float(value.loss) for value in values) / max(tokens, 1.0)
        reporter.evaluation(
            metrics.EvalRecord(step=step, eval_loss=loss, eval_tokens=int(tokens))
        )
        self._last_end = time.perf_counter()

    def _save(self, state: State, *, step: int, position: Any = None) -> None:
        """Saves a state with the position of its data, by default the present one."""
        keeper, exported = self._keeper, self._executor.engine.export(state)
        keeper.checkpoints.save(
            state,
            step=step,
            data=position or self._train_data.get_state(),
            meta=keeper.meta,
            write_adapter=lambda folder: keeper.write_adapter(exported, folder),
        )
        self._last_end = time.perf_counter()


def num_steps(config: RunConfig, *, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: `max_steps`, else the epochs asked for."""
    if config.max_steps:
        return config.max_steps
    return max(1, round(config.num_train_epochs * steps_per_epoch))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

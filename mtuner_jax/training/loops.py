"""The training loop: batches in, records and checkpoints out.

Metrics of a step are read after the next step has been sent to the devices, so that
the devices never wait for the host, except before an evaluation, a hook or a
checkpoint. When a step was done is seen by a thread that waits for it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from mtuner_jax.checkpoints import metas, store
from mtuner_jax.configs import RunConfig
from mtuner_jax.data import loading
from mtuner_jax.protocols.engines import State
from mtuner_jax.protocols.states import Params, StepMetrics
from mtuner_jax.training import executors, metrics, reporters, stopping, watchdogs
from mtuner_jax.training.progress import Progress

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


class Hook(NamedTuple):
    """Something to do between two steps, such as generating samples.

    Attributes:
      due: Whether it is to be done after this many optimizer steps.
      do: (state, step) -> does it; the state stays as it is.
    """

    due: Callable[[int], bool]
    do: Callable[[State, int], None]


@dataclasses.dataclass
class _Pending:
    """A step that is on its way: what is known, and what the devices will tell."""

    step: int
    epoch: float
    tokens: int
    data_time: float
    metrics: StepMetrics
    ready: concurrent.futures.Future[float]


@dataclasses.dataclass(kw_only=True, eq=False)
class Loop:
    """One run from its current step to its last.

    Attributes:
      config: The run's.
      executor: Runs the steps.
      data: What they are about.
      keeper: Where they are kept.
      learning_rate: Optimizer steps done -> the next step's rate.
      stop: Whether the run is to end early.
      hooks: What is done between steps, after evaluations and before saving.
      progress: What evaluations have shown so far.
      stopped: Whether `run` ended because it was asked to.
    """

    config: RunConfig
    executor: executors.Executor
    data: loading.RunData
    keeper: Keeper
    learning_rate: optax.Schedule
    stop: stopping.Stop = dataclasses.field(default_factory=stopping.Stop)
    hooks: Sequence[Hook] = ()
    progress: Progress = dataclasses.field(default_factory=Progress)
    stopped: bool = dataclasses.field(default=False, init=False)
    _pending: _Pending | None = dataclasses.field(default=None, init=False)
    _last_end: float = dataclasses.field(default=0.0, init=False)
    _last_save: float = dataclasses.field(default=0.0, init=False)

    def run(
        self, state: State, reporter: reporters.Reporter, *, total_steps: int
    ) -> State:
        """Trains until `total_steps` optimizer steps are done, or a stop is asked for.

        Raises:
          NonFiniteError: A loss or gradient is NaN or infinite; the step is not saved.
          SaveError: A checkpoint could not be written.
          OverBudgetError: A step compiled again exceeds the budget, with
            `strict_plan`; what was done is saved.
          OutOfMemoryError: Of a step or an evaluation; the state of before it is
            saved if the error has it.
        """
        with self._clock, self._watchdog:
            first = int(state.step)
            self._last_save = time.perf_counter()
            if self.owes_evaluation(first, total_steps=total_steps):
                self._evaluate(state, reporter, step=first)
            self._last_end = time.perf_counter()
            for step in range(first + 1, total_steps + 1):
                if self.stops_early:
                    break
                state = self._step(state, reporter, step=step)
                if self._boundary(state, reporter, step=step, last=step == total_steps):
                    break
        return state

    @property
    def stops_early(self) -> bool:
        """Whether evaluations have not gained for `early_stopping_patience` times."""
        patience = self.config.early_stopping_patience
        return 0 < patience <= self.progress.without_gain

    def owes_evaluation(self, step: int, *, total_steps: int) -> bool:
        """Whether an evaluation is due before the steps after `step`.

        That is one at the start, or one that a stop has cut off.
        """
        if self.data.eval is None:
            return False
        due = step == total_steps or _due(step, self.config.eval_steps)
        due = due if step else self.config.eval_on_start
        return due and self.progress.evaluated < step

    @functools.cached_property
    def _clock(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(1, "step-clock")

    @functools.cached_property
    def _watchdog(self) -> watchdogs.Watchdog:
        tell = functools.partial(watchdogs.warn, self.executor.engine.devices)
        return watchdogs.Watchdog(60 * self.config.watchdog_minutes, tell)

    def _boundary(
        self, state: State, reporter: reporters.Reporter, *, step: int, last: bool
    ) -> bool:
        """What is due after a step; returns whether the run ends here."""
        self.stop.defer()
        config, before = self.config, self.progress.best_step
        if last or _due(step, config.eval_steps):
            self._flush(reporter)
            self._evaluate(state, reporter, step=step)
        for hook in self.hooks:
            if hook.due(step):
                with self._between_steps(reporter):
                    hook.do(state, step)
        refusal = None if last else self.executor.refusal
        self.stopped, timed = stopping.anywhere(bool(self.stop.asked), self._save_due())
        ends = last or self.stopped or self.stops_early or refusal is not None
        best = config.save_best and self.progress.best_step > before
        if ends or timed or best or _due(step, config.save_steps):
            self._flush(reporter)
            self._save(state, step=step)
        if refusal is not None:
            raise refusal
        self.keeper.checkpoints.poll()
        return ends

    def _step(self, state: State, reporter: reporters.Reporter, *, step: int) -> State:
        start = time.perf_counter()
        position = self.data.train.get_state()
        rows = next(self.data.train)
        data_time = time.perf_counter() - start
        try:
            with self._watchdog.waiting(f"step {step}"):
                state, step_metrics = self.executor.train(state, rows)
        except executors.OutOfMemoryError as error:
            self._flush(reporter)
            if error.state is not None:
                self._save(error.state, step=step - 1, position=position)
                _logger.warning("step %d failed: saved what was before it", step)
            raise
        ready = self._clock.submit(_when_ready, step_metrics)
        self._flush(reporter)
        self._pending = _Pending(
            step=step,
            epoch=self.data.train.epoch,
            tokens=int(np.count_nonzero(rows.segment_ids)),
            data_time=data_time,
            metrics=step_metrics,
            ready=ready,
        )
        return state

    def _flush(self, reporter: reporters.Reporter) -> None:
        """Reports the step on its way, waiting for it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._watchdog.waiting(f"step {pending.step}"):
            end = pending.ready.result()
        values = jax.device_get(pending.metrics)
        lr: Any = self.learning_rate(pending.step - 1)
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
            peak_memory=metrics.peak_memory(self.executor.engine.devices),
        )
        self._last_end = end
        reporter.step(record)

    def _evaluate(
        self, state: State, reporter: reporters.Reporter, *, step: int
    ) -> None:
        """Mean loss of a trained token over the whole set; a stop cuts it off."""
        if self.data.eval is None:
            return
        limit, what = self.config.max_eval_batches, f"the evaluation after step {step}"
        sums = []
        with self._between_steps(reporter):
            for number, rows in enumerate(self.data.eval):
                if limit and number >= limit:
                    break
                if any(stopping.anywhere(bool(self.stop.asked))):
                    return
                with self._watchdog.waiting(what):
                    sums.append(self._evaluate_batch(state, rows, step=step))
            with self._watchdog.waiting(what):
                values = jax.device_get(sums)
        tokens = sum(float(value.tokens) for value in values)
        loss = sum(float(value.loss) for value in values) / max(tokens, 1.0)
        record = metrics.EvalRecord(step=step, eval_loss=loss, eval_tokens=int(tokens))
        threshold = self.config.early_stopping_threshold
        self.progress = self.progress.after(record, threshold=threshold)
        reporter.evaluation(record)

    def _evaluate_batch(self, state: State, rows: Any, *, step: int) -> Any:
        try:
            return self.executor.evaluate(state, rows)
        except executors.OutOfMemoryError as error:
            if step and error.state is not None:
                self._save(error.state, step=step)
                _logger.warning("evaluation failed: saved step %d", step)
            raise

    def _save(self, state: State, *, step: int, position: Any = None) -> None:
        """Saves a state with the position of its data, by default the present one."""
        keeper, exported = self.keeper, self.executor.engine.export(state)
        best_step = self.progress.best_step if self.config.save_best else -1
        keeper.checkpoints.best_step = best_step
        keeper.checkpoints.notes = {"progress": self.progress.to_json()}
        keeper.checkpoints.save(
            state,
            step=step,
            data=position or self.data.train.get_state(),
            meta=keeper.meta,
            write_adapter=lambda folder: keeper.write_adapter(exported, folder),
        )
        self._last_end = self._last_save = time.perf_counter()

    def _save_due(self) -> bool:
        """Whether it is time to save, where `save_steps` does not say when."""
        minutes = 0 if self.config.save_steps else self.config.save_minutes
        return 0 < 60 * minutes <= time.perf_counter() - self._last_save

    @contextlib.contextmanager
    def _between_steps(self, reporter: reporters.Reporter) -> Generator[None]:
        """Reports the step before, and keeps what is done inside out of the next."""
        self._flush(reporter)
        yield
        self._last_end = time.perf_counter()


def num_steps(config: RunConfig, *, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: `max_steps`, else the epochs asked for."""
    if config.max_steps:
        return config.max_steps
    return max(1, round(config.num_train_epochs * steps_per_epoch))


def _when_ready(step_metrics: StepMetrics) -> float:
    jax.block_until_ready(step_metrics)
    return time.perf_counter()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

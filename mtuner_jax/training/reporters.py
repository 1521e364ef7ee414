"""Tells about a run while it goes: metrics.jsonl, TensorBoard, console, loss plot."""

import dataclasses
import logging
import pathlib
import sys
from typing import Any, TextIO

import jax
import tqdm

from mtuner_jax import configs
from mtuner_jax.plots import loss_plots
from mtuner_jax.training import logs, metrics, run_dirs

_logger = logging.getLogger(__name__)


class Reporter:
    """Takes a record for each step and evaluation; use it as a context manager.

    Only process 0 writes; every process checks that the numbers are finite.
    """

    def __init__(
        self,
        run: run_dirs.RunDir,
        config: configs.RunConfig,
        *,
        rates: metrics.Rates,
        total_steps: int,
        start_step: int = 0,
    ):
        """Opens the run's files; records of steps after `start_step` are removed.

        Args:
          run: The run's folder, claimed.
          config: For `logging_steps`, `report_to` and `plot_loss`.
          rates: Turns tokens and seconds into speed and MFU.
          total_steps: The step at which the run will end.
          start_step: The step that was restored, 0 for a new run.
        """
        self._run = run
        self._rates = rates
        self._plot_loss = config.plot_loss
        self._total_tokens = 0
        self._sinks: list[_TensorBoard | _Console] = []
        self._is_primary = jax.process_index() == 0
        if not self._is_primary:
            return
        self._total_tokens = metrics.cut_after(run.metrics, start_step)
        if config.report_to == "tensorboard":
            self._sinks += _tensorboard(run.tensorboard, start_step)
        steps = {"total_steps": total_steps, "start_step": start_step}
        self._sinks.append(_Console(logging_steps=config.logging_steps, **steps))

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, record: metrics.StepRecord) -> metrics.StepRecord:
        """Reports an optimizer step.

        Returns:
          The record with rates and total of tokens.

        Raises:
          NonFiniteError: Loss or gradient norm is NaN or infinite.
        """
        metrics.check_finite(record)
        record = self._rates.fill(record, tokens_before=self._total_tokens)
        self._total_tokens = record.total_tokens
        if self._is_primary:
            metrics.append(self._run.metrics, record)
        for sink in self._sinks:
            sink.step(record)
        return record

    def evaluation(self, record: metrics.EvalRecord) -> None:
        """Reports an evaluation."""
        if self._is_primary:
            metrics.append(self._run.metrics, record)
        for sink in self._sinks:
            sink.evaluation(record)

    def close(self) -> None:
        """Ends the bar, closes files and writes the loss plot."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        if self._is_primary and self._plot_loss:
            records = metrics.read(self._run.metrics)
            if any("loss" in record for record in records):
                self._plot(records)
        self._is_primary = False

    def _plot(self, records: list[dict[str, Any]]) -> None:
        try:
            loss_plots.write(self._run.loss_plot, {self._run.root.name: records})
        except OSError as error:
            _logger.warning(
                "%s could not be written: %s", self._run.loss_plot, error.strerror
            )


class _TensorBoard:
    """Scalars of each record under train/ and eval/."""

    def __init__(self, writer: Any):
        self._writer = writer

    def step(self, record: metrics.StepRecord) -> None:
        values = dataclasses.asdict(record)
        step = values.pop("step")
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, step)

    def evaluation(self, record: metrics.EvalRecord) -> None:
        self._writer.add_scalar("eval/loss", record.eval_loss, record.step)
        self._writer.add_scalar("eval/perplexity", record.eval_perplexity, record.step)

    def close(self) -> None:
        self._writer.close()


def _tensorboard(folder: pathlib.Path, start_step: int) -> list[_TensorBoard]:
    try:
        import tensorboardX  # slow, and not needed with report_to=none
    except ModuleNotFoundError:
        _logger.warning(
            "report_to=tensorboard is ignored: tensorboardX is not installed "
            "(`pip install tensorboardX`, or --report_to none)"
        )
        return []
    purge_step = start_step + 1 if start_step else None
    writer = tensorboardX.SummaryWriter(str(folder), purge_step=purge_step)
    return [_TensorBoard(writer)]


class _Console:
    """A bar on a terminal, otherwise a line every `logging_steps`."""

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int,
        logging_steps: int,
        stream: TextIO | None = None,
    ):
        stream = stream or sys.stderr
        self._total_steps = total_steps
        self._logging_steps = logging_steps
        self._on_terminal = stream.isatty()
        self._bar = tqdm.tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            file=stream,
            disable=not self._on_terminal,
            dynamic_ncols=True,
        )

    def step(self, record: metrics.StepRecord) -> None:
        self._bar.update()
        last = record.step == self._total_steps
        if record.step % self._logging_steps and not last:
            return
        speed = f"{record.tokens_per_sec:,.0f} tok/s"
        self._bar.set_postfix_str(f"loss {record.loss:.4f}, {speed}", refresh=False)
        mfu = "" if record.mfu is None else f"  mfu {record.mfu:.1%}"
        _logger.info(
            f"step {record.step}/{self._total_steps}  loss {record.loss:.4f}  "
            f"lr {record.lr:.2e}  grad_norm {record.grad_norm:.3f}  {speed}  "
            f"{record.step_time:.2f} s/step{mfu}",
            extra=logs.FILE_ONLY if self._on_terminal else {},
        )

    def evaluation(self, record: metrics.EvalRecord) -> None:
        _logger.info(
            f"step {record.step}  eval_loss {record.eval_loss:.4f}  eval_perplexity "
            f"{record.eval_perplexity:.2f}  ({record.eval_tokens:,} tokens)"
        )

    def close(self) -> None:
        self._bar.close()

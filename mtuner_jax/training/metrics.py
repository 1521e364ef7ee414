"""Numbers of a run: one JSON object a line in `metrics.jsonl`.

`tokens` are the tokens of a step that are not padding, `trained_tokens` those of them
with loss, `total_tokens` the sum of `tokens` so far. Seconds and bytes throughout:
`step_time` is from the end of one step to the end of the next, `data_time` the part
of it spent waiting for the batch, `peak_memory` the fullest device so far.

    mfu = flops_per_token * tokens / step_time / (devices * peak FLOP/s of a device)

with the model's own operations in `flops_per_token` (no recomputation) and the peak
of `hardware/cards.py`; null where that is not known, as on CPUs.
"""

import dataclasses
import json
import logging
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from mtuner_jax.configs import ConfigError, RunError
from mtuner_jax.training import run_dirs

_logger = logging.getLogger(__name__)


class NonFiniteError(RunError):
    """A loss or a gradient that is NaN or infinite; the run must end here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step; the rates are filled in by `Rates.fill`."""

    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    step_time: float
    data_time: float
    peak_memory: int | None = None
    total_tokens: int = 0
    tokens_per_sec: float = 0.0
    tokens_per_sec_per_device: float = 0.0
    mfu: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation, after `step` optimizer steps.

    Attributes:
      eval_loss: Mean loss of a token over the whole evaluation set.
      eval_tokens: Tokens with loss in it.
    """

    step: int
    eval_loss: float
    eval_tokens: int

    @property
    def eval_perplexity(self) -> float:
        """exp(eval_loss), infinite where that overflows."""
        return math.exp(self.eval_loss) if self.eval_loss < 700 else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What turns tokens and seconds into speed.

    Attributes:
      num_devices: Devices of the mesh.
      flops_per_token: Operations of the model for a token, forward and backward.
      peak_flops_per_s: Of one device, None if unknown.
    """

    num_devices: int
    flops_per_token: float
    peak_flops_per_s: float | None

    def fill(self, record: StepRecord, *, tokens_before: int) -> StepRecord:
        """Adds speeds, MFU and the total of tokens to a record."""
        per_sec = record.tokens / record.step_time if record.step_time > 0 else 0.0
        per_device = per_sec / self.num_devices
        mfu = None
        if self.peak_flops_per_s:
            mfu = per_device * self.flops_per_token / self.peak_flops_per_s
        return dataclasses.replace(
            record,
            total_tokens=tokens_before + record.tokens,
            tokens_per_sec=per_sec,
            tokens_per_sec_per_device=per_device,
            mfu=mfu,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in a few numbers; None where there is nothing to tell.

    Attributes:
      steps: The last step.
      tokens_per_sec: Median over the steps but the first, which compiles.
      eval_loss: Of the last evaluation.
    """

    steps: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    tokens_per_sec: float | None


def check_finite(record: StepRecord) -> None:
    """Raises NonFiniteError if the loss or the gradient's norm is NaN or infinite."""
    numbers = {"loss": record.loss, "grad_norm": record.grad_norm}
    bad = [f"{name}={x}" for name, x in numbers.items() if not math.isfinite(x)]
    if bad:
        raise NonFiniteError(
            f"step {record.step}: {' and '.join(bad)}. The run ends here, checkpoints "
            "and adapter of earlier steps are untouched; try a lower learning_rate, "
            "more warmup_steps, max_grad_norm=1, or dtype=float32, and look at the "
            "data of this step"
        )


def peak_memory(devices: Iterable[jax.Device]) -> int | None:
    """Most bytes that any of this process's devices has held, None on CPUs."""
    stats = [device.memory_stats() for device in devices]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat]
    return max(peaks) if peaks else None


def to_line(record: StepRecord | EvalRecord) -> str:
    """A record as one line of JSON; what is not finite becomes null."""
    content = dataclasses.asdict(record)
    if isinstance(record, EvalRecord):
        content["eval_perplexity"] = record.eval_perplexity
    for name, value in content.items():
        if isinstance(value, float) and not math.isfinite(value):
            content[name] = None
    return json.dumps(content, allow_nan=False) + "\n"


def append(path: pathlib.Path, record: StepRecord | EvalRecord) -> None:
    """Adds a record to `metrics.jsonl`.

    Raises:
      ConfigError: The file cannot be written, for example on a full disk.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(to_line(record))
    except OSError as error:
        raise ConfigError(
            f"{path} could not be written after step {record.step}: {error.strerror}; "
            "checkpoints are untouched; check free space and permissions there"
        ) from error


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """All records; a line that is no JSON object (cut by a kill) is passed over."""
    if not path.is_file():
        return []
    records = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif line.strip():
            _logger.warning("%s:%d is no record, passed over", path, number)
    return records


def cut_after(path: pathlib.Path, step: int) -> int:
    """Removes records of later steps than `step`, so that each step stands once.

    Args:
      path: `metrics.jsonl`.
      step: The step that was restored, 0 for a new run.

    Returns:
      `total_tokens` of the last step that stays.
    """
    records = read(path)
    kept = [record for record in records if record["step"] <= step]
    if len(kept) < len(records):
        _logger.info(
            "%s: %d records after step %d removed", path, len(records) - len(kept), step
        )
    if path.is_file():
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        run_dirs.replace(path, lines)
    return max((record.get("total_tokens", 0) for record in kept), default=0)


def summarize(records: Sequence[dict[str, Any]]) -> Summary:
    """First and last loss, last evaluation and median speed of a run's records."""
    steps = [record for record in records if "loss" in record]
    evals = [record for record in records if "eval_loss" in record]
    speeds = [record["tokens_per_sec"] for record in steps[1:] or steps]
    return Summary(
        steps=steps[-1]["step"] if steps else 0,
        first_loss=steps[0]["loss"] if steps else None,
        last_loss=steps[-1]["loss"] if steps else None,
        eval_loss=evals[-1]["eval_loss"] if evals else None,
        tokens_per_sec=statistics.median(speeds) if speeds else None,
    )

"""What a run's evaluations have shown so far; kept in its checkpoints."""

import dataclasses
import math
from typing import Any

from mtuner_jax.training import metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Which evaluation was the best, and how many came since.

    Attributes:
      evaluated: Step of the last evaluation; -1 before the first one.
      best_step: Step of the lowest evaluation loss; -1 before the first one.
      best_loss: That loss.
      without_gain: Evaluations since the loss last fell by more than the threshold.
      reference_loss: The loss that has to be undercut by the threshold.
    """

    evaluated: int = -1
    best_step: int = -1
    best_loss: float = math.inf
    without_gain: int = 0
    reference_loss: float = math.inf

    def after(self, record: metrics.EvalRecord, *, threshold: float) -> "Progress":
        """The progress with one evaluation more."""
        loss = record.eval_loss
        is_best, gains = loss < self.best_loss, loss < self.reference_loss - threshold
        return Progress(
            evaluated=record.step,
            best_step=record.step if is_best else self.best_step,
            best_loss=loss if is_best else self.best_loss,
            without_gain=0 if gains else self.without_gain + 1,
            reference_loss=loss if gains else self.reference_loss,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values; a loss that is not finite, as before any evaluation, is null."""
        values = dataclasses.asdict(self)
        return {k: None if v == math.inf else v for k, v in values.items()}


def from_json(values: dict[str, Any]) -> Progress:
    """What `to_json` returned."""
    infinite: Any = math.inf
    return Progress(**{k: infinite if v is None else v for k, v in values.items()})

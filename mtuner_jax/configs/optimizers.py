"""The optimizer and its schedule."""

import dataclasses

from mtuner_jax.configs import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule, counted in optimizer steps.

    Attributes:
      learning_rate: Highest rate of the schedule.
      lr_scheduler_type: `linear`, `cosine`, `constant` or `constant_with_warmup`.
      warmup_steps: Steps of linear warm-up; below 1 it is a share of all steps.
      weight_decay: Decoupled decay of the adapters.
      adam_beta1: Decay of the first moment.
      adam_beta2: Decay of the second moment.
      adam_epsilon: Added to the root of the second moment.
      max_grad_norm: Global norm to which gradients are clipped; 0 switches it off.
    """

    learning_rate: float = 2e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.03
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0

    def __post_init__(self):
        schedules = ("linear", "cosine", "constant", "constant_with_warmup")
        errors.one_of(self, "lr_scheduler_type", schedules)
        errors.require(
            self.learning_rate > 0, f"learning_rate={self.learning_rate}: above 0"
        )
        errors.not_negative(self, "warmup_steps", "max_grad_norm")

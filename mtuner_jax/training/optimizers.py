"""AdamW and its learning-rate schedule, from optax."""

import optax

from mtuner_jax.configs import ConfigError, OptimizerConfig


def schedule(config: OptimizerConfig, *, num_steps: int) -> optax.Schedule:
    """Learning rate as a function of optimizer steps done.

    Warm-up rises linearly from 0; `linear` and `cosine` end at 0 after `num_steps`.

    Raises:
      ConfigError: A warm-up as long as the run.
    """
    peak, warmup = config.learning_rate, num_warmup_steps(config, num_steps=num_steps)
    if config.lr_scheduler_type == "constant":
        return optax.constant_schedule(peak)
    if warmup >= num_steps:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} leaves no step of the {num_steps} at "
            "the full learning rate; lower it, or raise max_steps"
        )
    decays = {
        "linear": optax.linear_schedule(peak, 0.0, num_steps - warmup),
        "cosine": optax.cosine_decay_schedule(peak, num_steps - warmup),
        "constant_with_warmup": optax.constant_schedule(peak),
    }
    decay = decays[config.lr_scheduler_type]
    if not warmup:
        return decay
    # As in Hugging Face, the ramp starts at 0.
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup), decay], [warmup]
    )


def num_warmup_steps(config: OptimizerConfig, *, num_steps: int) -> int:
    """Warm-up in optimizer steps; a value below 1 is a share of all steps."""
    if config.warmup_steps < 1:
        return int(config.warmup_steps * num_steps)
    return int(config.warmup_steps)


def adamw(
    config: OptimizerConfig, learning_rate: optax.Schedule
) -> optax.GradientTransformation:
    """Clips by global norm, then AdamW with moments in the adapters' float32."""
    most = config.max_grad_norm
    clip = optax.clip_by_global_norm(most) if most else optax.identity()
    return optax.chain(
        clip,
        optax.adamw(
            learning_rate,
            b1=config.adam_beta1,
            b2=config.adam_beta2,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        ),
    )

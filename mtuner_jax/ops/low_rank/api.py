"""A frozen linear with a low-rank update: y = x W + b + s * drop(x) A B."""

import jax
import jax.numpy as jnp

from mtuner_jax.ops.low_rank import reference
from mtuner_jax.ops.low_rank.operands import Dropout, Lora

# Modules with `apply`, differentiable to `x_BTD` and `lora`. Each takes any dtype on
# any device, unless its row says otherwise.
BACK_ENDS = {"xla": reference}


def apply(
    x_BTD: jax.Array,
    kernel_DF: jax.Array,
    bias_F: jax.Array | None = None,
    *,
    lora: Lora | None = None,
    drop: Dropout | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Applies the linear in the dtype of `x_BTD`; the adapter is cast to it.

    Args:
      x_BTD: [B, T, D].
      kernel_DF: The frozen weights, [D, F].
      bias_F: The frozen bias, [F]; None is no bias.
      lora: The adapter; None is no adapter.
      drop: Dropout of the adapter's input.
      implementation: A key of `BACK_ENDS`.

    Returns:
      [B, T, F].
    """
    back_end = BACK_ENDS[implementation]
    return back_end.apply(x_BTD, kernel_DF, bias_F, lora=lora, drop=drop)


def merged(kernel_DF: jax.Array, lora: Lora) -> jax.Array:
    """The frozen kernel with its update added, in float32 [D, F]."""
    delta_DF = (lora.a_DR * lora.scaling) @ lora.b_RF
    return kernel_DF.astype(jnp.float32) + delta_DF

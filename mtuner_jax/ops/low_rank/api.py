"""Frozen linears with low-rank updates: y = x W + b + s * drop(x) A B."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mtuner_jax.ops.low_rank import reference
from mtuner_jax.ops.low_rank.operands import Dropout, Linear, Lora

# Modules with `apply`, differentiable to `x_BTD` and `lora`. Each takes any dtype on
# any device, unless its row says otherwise.
BACK_ENDS = {"xla": reference}


def apply(
    x_BTD: jax.Array,
    linears: Sequence[Linear],
    *,
    drop: Dropout | None = None,
    implementation: str = "xla",
) -> list[jax.Array]:
    """Applies linears that read one input, in its dtype; adapters are cast to it.

    The input of their adapters is dropped out once for all of them, so that it is
    read once for all their A matrices.

    Args:
      x_BTD: [B, T, D].
      linears: The frozen linears [D, F], each of its own F, and their adapters.
      drop: Dropout of the adapters' input.
      implementation: A key of `BACK_ENDS`.

    Returns:
      [B, T, F] of each linear.
    """
    return BACK_ENDS[implementation].apply(x_BTD, linears, drop=drop)


def merged(kernel_DF: jax.Array, lora: Lora) -> jax.Array:
    """The frozen kernel with its update added, in float32 [D, F]."""
    delta_DF = (lora.a_DR * lora.scaling) @ lora.b_RF
    return kernel_DF.astype(jnp.float32) + delta_DF

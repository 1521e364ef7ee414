"""Next-token cross-entropy that never holds the logits of all tokens."""

from typing import NamedTuple

import jax

from mtuner_jax.ops.cross_entropy import reference


class TokenLoss(NamedTuple):
    """Sums over tokens, to be divided by the trained tokens of the global step.

    Attributes:
      loss: Sum of weighted cross-entropies, float32 (float64 for such inputs).
      tokens: Sum of weights.
    """

    loss: jax.Array
    tokens: jax.Array


# Modules with `value` and `value_and_grad`. Each takes any dtype on any device, unless
# its row says otherwise.
BACK_ENDS = {"xla": reference}


def value(
    x_SD: jax.Array,
    table_VD: jax.Array,
    targets_S: jax.Array,
    weights_S: jax.Array,
    *,
    implementation: str = "xla",
) -> jax.Array:
    """Weighted sum of -log p(target) over S tokens; forward only.

    Args:
      x_SD: Token vectors, [S, D].
      table_VD: The output table, [V, D].
      targets_S: The token to be predicted at each place, int32 [S].
      weights_S: What each token's loss counts, [S]; one of weight 0 adds exactly 0,
        whatever its target.
      implementation: A key of `BACK_ENDS`.

    Returns:
      Scalar sum in at least float32.
    """
    return BACK_ENDS[implementation].value(x_SD, table_VD, targets_S, weights_S)


def value_and_grad(
    x_SD: jax.Array,
    table_VD: jax.Array,
    targets_S: jax.Array,
    weights_S: jax.Array,
    *,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """As `value`, with its gradient to `x_SD` from the same run.

    Returns:
      (scalar sum, gradient [S, D] in the dtype of `x_SD`).
    """
    back_end = BACK_ENDS[implementation]
    return back_end.value_and_grad(x_SD, table_VD, targets_S, weights_S)

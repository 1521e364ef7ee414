"""What cross-entropy's back ends take, and the sums that steps make of it."""

from typing import NamedTuple

import jax


class LossTokens(NamedTuple):
    """S tokens and what is to be predicted at each.

    Attributes:
      x_SD: Normed token vectors, [S, D].
      targets_S: The next token, int32 [S].
      weights_S: What each token's loss counts, [S]; one of weight 0 adds exactly 0,
        whatever its vector and target.
    """

    x_SD: jax.Array
    targets_S: jax.Array
    weights_S: jax.Array


class TokenLoss(NamedTuple):
    """Sums over tokens, to be divided by the trained tokens of the global step.

    Attributes:
      loss: Sum of weighted cross-entropies, float32 (float64 for such inputs).
      tokens: Sum of weights.
    """

    loss: jax.Array
    tokens: jax.Array

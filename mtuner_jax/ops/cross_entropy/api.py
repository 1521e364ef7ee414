"""Next-token cross-entropy that never holds the logits of all tokens."""

import jax

from mtuner_jax.ops.cross_entropy import reference
from mtuner_jax.ops.cross_entropy.operands import LossTokens

# Modules with `value` and `value_and_grad`. Each takes any dtype on any device, unless
# its row says otherwise.
BACK_ENDS = {"xla": reference}


def value(
    tokens: LossTokens, table_VD: jax.Array, *, implementation: str = "xla"
) -> jax.Array:
    """Weighted -log p(target) of each token; forward only.

    Args:
      tokens: S tokens.
      table_VD: The output table, [V, D].
      implementation: A key of `BACK_ENDS`.

    Returns:
      [S], in at least float32.
    """
    return BACK_ENDS[implementation].value(tokens, table_VD)


def value_and_grad(
    tokens: LossTokens, table_VD: jax.Array, *, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """As `value`, with the gradient to the token vectors from the same run.

    Returns:
      ([S], gradient of its sum [S, D] in the dtype of the vectors).
    """
    return BACK_ENDS[implementation].value_and_grad(tokens, table_VD)

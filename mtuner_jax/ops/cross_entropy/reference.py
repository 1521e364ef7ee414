"""Next-token cross-entropy as its formula. S tokens, D model, V vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np


def cross_entropy(
    x_SD: jax.Array, table_VD: jax.Array, targets_S: jax.Array, weights_S: jax.Array
) -> jax.Array:
    """Weighted sum of -log p(target) over S tokens; materialises [S, V] logits.

    Tokens of weight 0 add exactly 0, whatever their target.

    Args:
      x_SD: Token vectors, [S, D].
      table_VD: The output table, [V, D].
      targets_S: The token to be predicted at each place, int32 [S].
      weights_S: What each token's loss counts, [S].

    Returns:
      Scalar sum in at least float32.
    """
    wide = np.promote_types(x_SD.dtype, jnp.float32)
    logits_SV = jnp.einsum("sd,vd->sv", x_SD, table_VD, preferred_element_type=wide)
    normaliser_S = jax.nn.logsumexp(logits_SV, axis=-1)
    columns = jnp.arange(logits_SV.shape[-1], dtype=targets_S.dtype)
    picked = jnp.where(columns[None, :] == targets_S[:, None], logits_SV, 0)
    loss_S = normaliser_S - picked.sum(axis=-1)
    return jnp.sum(loss_S * weights_S.astype(wide))

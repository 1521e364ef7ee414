"""Next-token cross-entropy that never holds the logits of all tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LOGIT_BYTES = 256 * 2**20


class TokenLoss(NamedTuple):
    """Sums over tokens, to be divided by the trained tokens of the global step.

    Attributes:
      loss: Sum of weighted cross-entropies, float32 (float64 for such inputs).
      tokens: Sum of weights.
    """

    loss: jax.Array
    tokens: jax.Array


def chunk_tokens(
    num_tokens: int, vocab_size: int, *, limit_bytes: int = LOGIT_BYTES
) -> int:
    """Largest divisor of `num_tokens` whose float32 logits stay within the limit."""
    limit = max(1, limit_bytes // (4 * vocab_size))
    if num_tokens <= limit:
        return num_tokens
    return max(size for size in range(1, limit + 1) if num_tokens % size == 0)


def cross_entropy(
    x_SD: jax.Array, table_VD: jax.Array, targets_S: jax.Array, weights_S: jax.Array
) -> jax.Array:
    """Weighted sum of -log p(target) over S tokens; materialises [S, V] logits.

    Tokens of weight 0 add exactly 0, whatever their target.
    """
    wide = np.promote_types(x_SD.dtype, jnp.float32)
    logits_SV = jnp.einsum("sd,vd->sv", x_SD, table_VD, preferred_element_type=wide)
    normaliser_S = jax.nn.logsumexp(logits_SV, axis=-1)
    columns = jnp.arange(logits_SV.shape[-1], dtype=targets_S.dtype)
    picked = jnp.where(columns[None, :] == targets_S[:, None], logits_SV, 0)
    loss_S = normaliser_S - picked.sum(axis=-1)
    return jnp.sum(loss_S * weights_S.astype(wide))


def chunked(
    x_SD: jax.Array,
    table_VD: jax.Array,
    targets_S: jax.Array,
    weights_S: jax.Array,
    *,
    limit_bytes: int = LOGIT_BYTES,
) -> jax.Array:
    """`cross_entropy` a chunk of tokens at a time; forward only.

    Returns:
      Scalar sum in at least float32. Peak extra memory: one chunk of logits.
    """
    size = chunk_tokens(x_SD.shape[0], table_VD.shape[0], limit_bytes=limit_bytes)
    chunks = _chunks((x_SD, targets_S, weights_S), size)

    def body(_, chunk):
        return None, cross_entropy(chunk[0], table_VD, *chunk[1:])

    return jax.lax.scan(body, None, chunks)[1].sum()


def chunked_value_and_grad(
    x_SD: jax.Array,
    table_VD: jax.Array,
    targets_S: jax.Array,
    weights_S: jax.Array,
    *,
    limit_bytes: int = LOGIT_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy` and its gradient to `x_SD`, a chunk of tokens at a time.

    The logits of a chunk are computed once and dropped, as in Liger's fused linear
    cross-entropy (Hsu et al., 2024).

    Returns:
      (scalar sum, gradient [S, D] in the dtype of `x_SD`).
    """
    size = chunk_tokens(x_SD.shape[0], table_VD.shape[0], limit_bytes=limit_bytes)
    chunks = _chunks((x_SD, targets_S, weights_S), size)

    def body(_, chunk):
        return None, jax.value_and_grad(cross_entropy)(chunk[0], table_VD, *chunk[1:])

    _, (sums, dx) = jax.lax.scan(body, None, chunks)
    return sums.sum(), dx.reshape(x_SD.shape)


def _chunks(arrays, size):
    return jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), arrays)

"""Next-token cross-entropy that never holds the logits of all tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.numbers import chunking


class TokenLoss(NamedTuple):
    """Sums over tokens, to be divided by the trained tokens of the global step.

    Attributes:
      loss: Sum of weighted cross-entropies, float32 (float64 for such inputs).
      tokens: Sum of weights.
    """

    loss: jax.Array
    tokens: jax.Array


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
    limit_bytes: int = chunking.LOGIT_BYTES,
) -> jax.Array:
    """`cross_entropy` a chunk of tokens at a time; forward only.

    Returns:
      Scalar sum in at least float32. Peak extra memory: one chunk of logits.
    """
    size = chunking.loss_tokens(
        x_SD.shape[0], table_VD.shape[0], limit_bytes=limit_bytes
    )
    chunks = _chunks((x_SD, targets_S, weights_S), _trained_first(weights_S), size)

    def trained(x_SD, targets_S, weights_S):
        return cross_entropy(x_SD, table_VD, targets_S, weights_S)

    return _over_chunks(trained, chunks).sum()


def chunked_value_and_grad(
    x_SD: jax.Array,
    table_VD: jax.Array,
    targets_S: jax.Array,
    weights_S: jax.Array,
    *,
    limit_bytes: int = chunking.LOGIT_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy` and its gradient to `x_SD`, a chunk of tokens at a time.

    The logits of a chunk are computed once and dropped, as in Liger's fused linear
    cross-entropy (Hsu et al., 2024). Tokens without loss are put last, and chunks of
    them alone are skipped.

    Returns:
      (scalar sum, gradient [S, D] in the dtype of `x_SD`).
    """
    size = chunking.loss_tokens(
        x_SD.shape[0], table_VD.shape[0], limit_bytes=limit_bytes
    )
    order_S = _trained_first(weights_S)
    chunks = _chunks((x_SD, targets_S, weights_S), order_S, size)

    def trained(x_SD, targets_S, weights_S):
        return jax.value_and_grad(cross_entropy)(x_SD, table_VD, targets_S, weights_S)

    sums, dx = _over_chunks(trained, chunks)
    dx_SD = jnp.take(dx.reshape(x_SD.shape), jnp.argsort(order_S), axis=0)
    return sums.sum(), dx_SD


def _trained_first(weights_S):
    """An order of the tokens in which those with loss come first."""
    return jnp.argsort(weights_S == 0, stable=True)


def _chunks(arrays, order_S, size):
    return jax.tree.map(
        lambda array: jnp.take(array, order_S, axis=0).reshape(
            -1, size, *array.shape[1:]
        ),
        arrays,
    )


def _over_chunks(trained, chunks):
    """Scans `trained` over chunks; one whose weights are all 0 is not computed."""

    def skipped(*chunk):
        zero = chunk[2].sum()  # exactly 0 here, and varying over the mesh as needed
        return jax.tree.map(
            lambda result: jnp.broadcast_to(zero, result.shape).astype(result.dtype),
            jax.eval_shape(trained, *chunk),
        )

    def body(_, chunk):
        has_loss = jnp.any(chunk[2] != 0)
        return None, jax.lax.cond(has_loss, trained, skipped, *chunk)

    return jax.lax.scan(body, None, chunks)[1]

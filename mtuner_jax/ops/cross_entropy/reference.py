"""Cross-entropy in plain JAX: any dtype, any device.

It goes a chunk of tokens at a time; the logits of a chunk are computed once and
dropped, as in Liger's fused linear cross-entropy (Hsu et al., 2024). Tokens without
loss are put last, and chunks of them alone are skipped. Letters: S tokens, D model, V
vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.numbers import chunking
from mtuner_jax.ops.cross_entropy.operands import LossTokens


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
    return jnp.sum(_weighted(LossTokens(x_SD, targets_S, weights_S), table_VD))


class _EachLoss(NamedTuple):
    """Losses of single tokens, and what their gradients are made of.

    Attributes:
      logits_SV: In at least float32, [S, V].
      normaliser_S: Their log-sum-exp, [S].
      hit_SV: Where the target is, bool [S, V].
      loss_S: -log p(target), [S].
    """

    logits_SV: jax.Array
    normaliser_S: jax.Array
    hit_SV: jax.Array
    loss_S: jax.Array


def _each_loss(tokens: LossTokens, table_VD: jax.Array) -> _EachLoss:
    x_SD, targets_S, _ = tokens
    wide = np.promote_types(x_SD.dtype, jnp.float32)
    logits_SV = jnp.einsum("sd,vd->sv", x_SD, table_VD, preferred_element_type=wide)
    normaliser_S = jax.nn.logsumexp(logits_SV, axis=-1)
    columns = jnp.arange(logits_SV.shape[-1], dtype=targets_S.dtype)
    hit_SV = columns[None, :] == targets_S[:, None]
    picked_S = jnp.where(hit_SV, logits_SV, 0).sum(axis=-1)
    return _EachLoss(logits_SV, normaliser_S, hit_SV, normaliser_S - picked_S)


def value(
    tokens: LossTokens, table_VD: jax.Array, *, limit_bytes: int = chunking.LOGIT_BYTES
) -> jax.Array:
    """As `api.value`; beside its input it holds one chunk's logits, `limit_bytes`."""
    order_S = _trained_first(tokens)
    chunks = _chunks(tokens, order_S, num_rows=len(table_VD), limit_bytes=limit_bytes)

    def trained(chunk: LossTokens) -> jax.Array:
        return _weighted(chunk, table_VD)

    losses = _over_chunks(trained, chunks)
    return jnp.take(losses.reshape(-1), jnp.argsort(order_S))


def value_and_grad(
    tokens: LossTokens, table_VD: jax.Array, *, limit_bytes: int = chunking.LOGIT_BYTES
) -> tuple[jax.Array, jax.Array]:
    """As `api.value_and_grad`, [S, D]; beside its input it holds as much as `value`."""
    order_S = _trained_first(tokens)
    chunks = _chunks(tokens, order_S, num_rows=len(table_VD), limit_bytes=limit_bytes)

    def trained(chunk: LossTokens) -> tuple[jax.Array, jax.Array]:
        return _loss_and_grad(chunk, table_VD)

    losses, dx = _over_chunks(trained, chunks)
    back_S = jnp.argsort(order_S)
    dx_SD = jnp.take(dx.reshape(tokens.x_SD.shape), back_S, axis=0)
    return jnp.take(losses.reshape(-1), back_S), dx_SD


def _weighted(tokens: LossTokens, table_VD: jax.Array) -> jax.Array:
    """Each token's loss times its weight, [S]."""
    loss_S = _each_loss(tokens, table_VD).loss_S
    return loss_S * tokens.weights_S.astype(loss_S.dtype)


def _loss_and_grad(
    tokens: LossTokens, table_VD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`_weighted` and the gradient of its sum to the token vectors, [S, D].

    Differentiated by JAX the gradient's product has float32 probabilities on one side,
    and XLA multiplies in tf32 at half the speed; here they are rounded to the dtype of
    the table, and sums stay in float32.
    """
    each = _each_loss(tokens, table_VD)
    wide = each.loss_S.dtype
    weights_S = tokens.weights_S.astype(wide)
    share_SV = jnp.exp(each.logits_SV - each.normaliser_S[:, None])
    share_SV = (share_SV - each.hit_SV.astype(wide)) * weights_S[:, None]
    share_SV = share_SV.astype(table_VD.dtype)
    dx_SD = jnp.einsum("sv,vd->sd", share_SV, table_VD, preferred_element_type=wide)
    return each.loss_S * weights_S, dx_SD.astype(tokens.x_SD.dtype)


def _trained_first(tokens: LossTokens) -> jax.Array:
    """An order of the tokens in which those with loss come first, [S]."""
    return jnp.argsort(tokens.weights_S == 0, stable=True)


def _chunks(
    tokens: LossTokens, order_S: jax.Array, *, num_rows: int, limit_bytes: int
) -> LossTokens:
    """Fields [chunks, S / chunks, ...]: a chunk's logits are within `limit_bytes`."""
    size = chunking.loss_tokens(len(order_S), num_rows, limit_bytes=limit_bytes)
    return jax.tree.map(
        lambda x: jnp.take(x, order_S, axis=0).reshape(-1, size, *x.shape[1:]), tokens
    )


def _over_chunks(trained: Callable[[LossTokens], Any], chunks: LossTokens) -> Any:
    """Scans `trained` over chunks; one whose weights are all 0 is not computed."""

    def skipped(chunk: LossTokens) -> Any:
        # A constant 0 would not vary over the mesh, which shard_map's check of both
        # branches asks for.
        zero = chunk.weights_S.sum()
        return jax.tree.map(
            lambda result: jnp.broadcast_to(zero, result.shape).astype(result.dtype),
            jax.eval_shape(trained, chunk),
        )

    def body(carry: None, chunk: LossTokens) -> tuple[None, Any]:
        has_loss = jnp.any(chunk.weights_S != 0)
        return carry, jax.lax.cond(has_loss, trained, skipped, chunk)

    return jax.lax.scan(body, None, chunks)[1]

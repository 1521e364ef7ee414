"""A vocabulary table that no device holds whole: lookup and loss where the rows are.

Call these inside `jax.shard_map`. `shard_VD` is a device's rows of a table split over
`axes` with the slowest axis minor, as `ops.elastic` stores weights.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mtuner_jax.numbers import chunking
from mtuner_jax.ops.cross_entropy.operands import LossTokens


def _order(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(reversed(axes))


def lookup(shard_VD: jax.Array, ids_BT: jax.Array, *, axes: Sequence[str]) -> jax.Array:
    """Rows of the split table for this device's tokens, [B, T, D].

    One all-gather of all devices' tokens and one reduce-scatter of their vectors, in
    which each sum has one term that is not zero, so it is exact.
    """
    order, rows = _order(axes), shard_VD.shape[0]
    every_BT = jax.lax.all_gather(ids_BT, order, axis=0, tiled=True)
    local_BT = every_BT - jax.lax.axis_index(order) * rows
    mine_BT = (local_BT >= 0) & (local_BT < rows)
    found = jnp.take(shard_VD, jnp.clip(local_BT, 0, rows - 1), axis=0)
    found = jnp.where(mine_BT[:, :, None], found, jnp.zeros_like(found))
    return jax.lax.psum_scatter(found, order, scatter_dimension=0, tiled=True)


def value_and_grad(
    tokens: LossTokens,
    shard_VD: jax.Array,
    *,
    axes: Sequence[str],
    vocab_size: int,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy.reference` of this device's tokens on the split table.

    Args:
      tokens: This device's, [S, D] and [S].
      shard_VD: This device's rows, in the dtype of the tokens.
      axes: Mesh axes that the table is split over, slowest link first.
      vocab_size: Rows that are tokens; the others are padding.

    Returns:
      (losses of this device's tokens [S], gradient to them [S, D]). Per chunk of
      tokens, one all-gather and one reduce-scatter of vectors, and two reductions of
      a number per token.
    """
    size = chunking.loss_tokens(tokens.x_SD.shape[0], shard_VD.shape[0])
    chunks = jax.tree.map(
        lambda array: array.reshape(-1, size, *array.shape[1:]), tokens
    )

    def body(_: None, chunk: LossTokens) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, _chunk(chunk, shard_VD, axes=axes, vocab_size=vocab_size)

    _, (losses, dx) = jax.lax.scan(body, None, chunks)
    return losses.reshape(-1), dx.reshape(tokens.x_SD.shape)


def _chunk(
    chunk: LossTokens, shard_VD: jax.Array, *, axes: Sequence[str], vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """(losses of this device's tokens, gradient to them) for one chunk each."""
    order, rows = _order(axes), shard_VD.shape[0]
    wide = jnp.promote_types(shard_VD.dtype, jnp.float32)
    # [S of all devices, ...]: each device has logits of all tokens for its own rows.
    every = LossTokens(
        *(jax.lax.all_gather(part, order, axis=0, tiled=True) for part in chunk)
    )
    first = jax.lax.axis_index(order) * rows
    logits_SV = jnp.einsum(
        "sd,vd->sv", every.x_SD, shard_VD, preferred_element_type=wide
    )
    columns_V = first + jnp.arange(rows, dtype=chunk.targets_S.dtype)
    logits_SV = jnp.where(
        columns_V[None, :] < vocab_size, logits_SV, jnp.finfo(wide).min
    )
    # The largest logit is known to all before any exponential: sums then add up.
    top_S = jax.lax.pmax(logits_SV.max(axis=-1), order)
    exp_SV = jnp.exp(logits_SV - top_S[:, None])
    total_S = jax.lax.psum(exp_SV.sum(axis=-1), order)
    hit_SV = columns_V[None, :] == every.targets_S[:, None]
    picked = jnp.where(hit_SV, logits_SV, jnp.zeros_like(logits_SV)).sum(axis=-1)
    loss_S = jnp.log(total_S) + top_S - jax.lax.psum(picked, order)
    share_SV = exp_SV / total_S[:, None] - hit_SV.astype(wide)
    weights_S = every.weights_S.astype(wide)
    share_SV = (share_SV * weights_S[:, None]).astype(shard_VD.dtype)
    dx_SD = jnp.einsum("sv,vd->sd", share_SV, shard_VD)
    dx_SD = jax.lax.psum_scatter(dx_SD, order, scatter_dimension=0, tiled=True)
    mine = chunk.targets_S.shape[0]
    start = jax.lax.axis_index(order) * mine
    own_S = jax.lax.dynamic_slice_in_dim(loss_S, start, mine, 0)
    return own_S * chunk.weights_S.astype(wide), dx_SD

"""Attention of new tokens to all tokens before them, whose keys and values are kept.

Letters: B batch, T new tokens, S room for tokens, N query heads, K key/value heads,
G = N / K, H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.ops.attention.operands import Qkv


class KeyValues(NamedTuple):
    """Keys and values of a layer, by position, each [B, S, K, H]."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array


def attend(
    qkv: Qkv, cache: KeyValues, positions_BT: jax.Array, *, window: int
) -> tuple[jax.Array, KeyValues]:
    """Writes new keys and values into the cache and attends to all up to each query.

    What lies in the cache at later positions is not looked at, so rows may be padded
    at their end: a later token takes the place of the padding.

    Args:
      qkv: Of T new tokens: queries [B, T, N, H], keys and values [B, T, K, H].
      cache: Of the tokens before them.
      positions_BT: Position of each new token; consecutive in a row, and T of them fit.
      window: Tokens a position may look back over, itself included; 0 means all.

    Returns:
      (output [B, T, N, H], the cache with the new tokens).
    """
    q_BTNH, k_BTKH, v_BTKH = qkv

    def put(stored: jax.Array, new: jax.Array) -> jax.Array:
        write = jax.vmap(
            lambda old, part, start: jax.lax.dynamic_update_slice_in_dim(
                old, part, start, 0
            )
        )
        return write(stored, new.astype(stored.dtype), positions_BT[:, 0])

    cache = KeyValues(put(cache.k_BSKH, k_BTKH), put(cache.v_BSKH, v_BTKH))
    batch, tokens, heads, head_dim = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, tokens, k_BTKH.shape[2], -1, head_dim)
    wide = np.promote_types(q_BTNH.dtype, jnp.float32)
    scores_BKGTS = head_dim**-0.5 * jnp.einsum(
        "btkgh,bskh->bkgts", q_BTKGH, cache.k_BSKH, preferred_element_type=wide
    )
    key = jnp.arange(cache.k_BSKH.shape[1])[None, None, :]
    query = positions_BT[:, :, None]
    allowed_BTS = key <= query
    if window:
        allowed_BTS &= key > query - window
    lowest = jnp.finfo(wide).min
    scores_BKGTS = jnp.where(allowed_BTS[:, None, None], scores_BKGTS, lowest)
    weights = jax.nn.softmax(scores_BKGTS, axis=-1).astype(q_BTNH.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, cache.v_BSKH)
    return out.reshape(batch, tokens, heads, head_dim), cache

"""Attention in plain JAX: any dtype, any device, packed rows.

Queries go in blocks, each against the keys up to its end, so that about half of the
scores above the diagonal are never computed. Letters: B batch, T tokens, S the first
tokens of T, N query heads, K key/value heads, G = N / K, H head dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.numbers import chunking
from mtuner_jax.ops.attention.operands import Attended, Documents, Qkv, Residuals


def forward(qkv: Qkv, documents: Documents, *, window: int) -> Attended:
    """As `api.attend`; the statistics are the scores' log-sum-exp, [B, K, G, T].

    Scores and statistics are in at least float32.
    """
    q_BTNH, k_BTKH, v_BTKH = qkv
    segment_ids_BT = documents.segment_ids_BT
    q_BTKGH = _grouped(q_BTNH, k_BTKH.shape[2])
    outputs, stats = [], []
    for start, end in chunking.attention_blocks(q_BTNH.shape[1]):
        scores_BKGTS = _scores(q_BTKGH[:, start:end], k_BTKH[:, :end])
        allowed = _allowed(segment_ids_BT, start, end, window=window)
        lowest = jnp.finfo(scores_BKGTS.dtype).min
        scores_BKGTS = jnp.where(allowed, scores_BKGTS, lowest)
        lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
        weights_BKGTS = jnp.exp(scores_BKGTS - lse_BKGT[..., None]).astype(v_BTKH.dtype)
        outputs.append(jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BTKH[:, :end]))
        stats.append(lse_BKGT)
    out_BTNH = jnp.concatenate(outputs, axis=1).reshape(q_BTNH.shape)
    return Attended(out_BTNH, jnp.concatenate(stats, axis=-1))


def backward(residuals: Residuals, grad_BTNH: jax.Array, *, window: int) -> Qkv:
    """Gradients of queries, keys and values, summed in at least float32.

    Written out because differentiated by JAX it would keep the weights of all blocks,
    [B, N, T, T] / 2 elements, where this one computes a block's anew.
    """
    (q_BTNH, k_BTKH, v_BTKH), documents, (out_BTNH, lse_BKGT) = residuals
    segment_ids_BT = documents.segment_ids_BT
    wide = lse_BKGT.dtype
    q_BTKGH = _grouped(q_BTNH, k_BTKH.shape[2])
    grad_BTKGH = _grouped(grad_BTNH, k_BTKH.shape[2])
    scale = q_BTNH.shape[-1] ** -0.5
    products = grad_BTNH.astype(wide) * out_BTNH.astype(wide)
    delta_BTKG = _grouped(products, k_BTKH.shape[2]).sum(axis=-1)
    delta_BKGT = jnp.transpose(delta_BTKG, (0, 2, 3, 1))
    dq = []
    dk, dv = jnp.zeros_like(k_BTKH, wide), jnp.zeros_like(v_BTKH, wide)
    for start, end in chunking.attention_blocks(q_BTNH.shape[1]):
        q, grad = q_BTKGH[:, start:end], grad_BTKGH[:, start:end]
        k, v = k_BTKH[:, :end], v_BTKH[:, :end]
        scores = _scores(q, k)
        allowed = _allowed(segment_ids_BT, start, end, window=window)
        weights = jnp.exp(scores - lse_BKGT[..., start:end, None])
        weights = jnp.where(allowed, weights, jnp.zeros_like(weights))
        d_weights = jnp.einsum(
            "btkgh,bskh->bkgts", grad, v, preferred_element_type=wide
        )
        d_scores = weights * (d_weights - delta_BKGT[..., start:end, None]) * scale
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
        dq.append(jnp.einsum("bkgts,bskh->btkgh", d_scores, k))
        dk = _add_first(dk, _over_queries(d_scores, q, wide))
        dv = _add_first(dv, _over_queries(weights, grad, wide))
    dq_BTNH = jnp.concatenate(dq, axis=1).reshape(q_BTNH.shape)
    return Qkv(dq_BTNH, dk.astype(k_BTKH.dtype), dv.astype(v_BTKH.dtype))


def _scores(q_BTKGH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Scaled scores in at least float32, [B, K, G, T, S]."""
    return q_BTKGH.shape[-1] ** -0.5 * jnp.einsum(
        "btkgh,bskh->bkgts",
        q_BTKGH,
        k_BSKH,
        preferred_element_type=np.promote_types(q_BTKGH.dtype, jnp.float32),
    )


def _over_queries(
    weights_BKGTS: jax.Array, x_BTKGH: jax.Array, dtype: np.dtype
) -> jax.Array:
    """Sums over a block's queries and the heads of a group, [B, S, K, H]."""
    return jnp.einsum(
        "bkgts,btkgh->bskh", weights_BKGTS, x_BTKGH, preferred_element_type=dtype
    )


def _allowed(
    segment_ids_BT: jax.Array, start: int, end: int, *, window: int
) -> jax.Array:
    """bool [B, 1, 1, end - start, end]: which key each query of a block may see."""
    query = jnp.arange(start, end)[:, None]
    key = jnp.arange(end)[None, :]
    ordered = key <= query
    if window:
        ordered &= key > query - window
    same = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, :end]
    return (same & ordered[None, :, :])[:, None, None, :, :]


def _grouped(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, T, K, G, H]."""
    batch, tokens, _, head_dim = x_BTNH.shape
    return x_BTNH.reshape(batch, tokens, num_kv_heads, -1, head_dim)


def _add_first(total_BTKH: jax.Array, part_BSKH: jax.Array) -> jax.Array:
    """Adds `part` to the first S of T tokens."""
    first = total_BTKH[:, : part_BSKH.shape[1]] + part_BSKH
    return jax.lax.dynamic_update_slice_in_dim(total_BTKH, first, 0, axis=1)

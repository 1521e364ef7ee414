"""Causal grouped-query attention that never lets one document see another.

Letters: B batch, T tokens, N query heads, K key/value heads, G = N / K, H head dim.
Both implementations return the output and the softmax statistics, so that a plan
can save the two and skip attention's forward run in the backward pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.configs import ConfigError
from mtuner_jax.numbers import chunking
from mtuner_jax.ops import attention_cudnn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Which attention runs.

    Attributes:
      implementation: `xla` (any dtype, any device, packed rows) or `cudnn` (GPUs,
        16-bit floats, one document in a row).
      window: Tokens a position may look back over, itself included; 0 means all.
    """

    implementation: str = "xla"
    window: int = 0


def choose(requested: str, *, on_gpu: bool, packing: bool, dtype: str) -> str:
    """Resolves `attention: auto` and refuses what would leak or cannot run.

    Raises:
      ConfigError: cuDNN asked for with packed rows (it ignores document borders), or
        without a GPU, or with another dtype than bfloat16.
    """
    if requested == "auto":
        usable = on_gpu and not packing and dtype == "bfloat16"
        return "cudnn" if usable else "xla"
    if requested == "cudnn":
        reasons = {
            "packing=true (it ignores document borders); set packing=false": packing,
            "no GPU; set attention=xla": not on_gpu,
            f"dtype={dtype}; set dtype=bfloat16": dtype != "bfloat16",
        }
        for reason, applies in reasons.items():
            if applies:
                raise ConfigError(f"attention=cudnn cannot be used with {reason}")
    return requested


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec: Spec):
    """Attention within documents.

    Args:
      q_BTNH: Queries, [B, T, N, H].
      k_BTKH: Keys, [B, T, K, H].
      v_BTKH: Values, [B, T, K, H].
      segment_ids_BT: The document of each token, int32 [B, T].
      spec: Which implementation.

    Returns:
      The output [B, T, N, H], and statistics for `attend_saved` that carry no
      gradient.
    """
    return _forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec)


def _attend_fwd(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec):
    output, stats = _forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec)
    return (output, stats), (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, output, stats)


def _attend_bwd(spec, residuals, cotangents):
    return *_backward(residuals, cotangents[0], spec), None


attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend_saved(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, saved, spec: Spec):
    """Has the value of a saved output and attention's gradient; runs nothing.

    `saved` is what `attend` returned: (output, statistics).
    """
    del q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec
    return saved[0]


def _attend_saved_fwd(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, saved, spec):
    del spec
    return saved[0], (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, *saved)


def _attend_saved_bwd(spec, residuals, cotangent):
    grads = _backward(residuals, cotangent, spec)
    return *grads, None, jax.tree.map(jnp.zeros_like, residuals[4:])


attend_saved.defvjp(_attend_saved_fwd, _attend_saved_bwd)


def _forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec):
    if spec.implementation == "cudnn":
        return attention_cudnn.forward(q_BTNH, k_BTKH, v_BTKH, window=spec.window)
    return _xla_forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec)


def _backward(residuals, grad_BTNH, spec):
    if spec.implementation == "cudnn":
        q_BTNH, k_BTKH, v_BTKH, _, output, stats = residuals
        saved = (q_BTNH, k_BTKH, v_BTKH, output, stats)
        return attention_cudnn.backward(saved, grad_BTNH, window=spec.window)
    return _xla_backward(residuals, grad_BTNH, spec)


def _allowed(segment_ids_BT, start, end, window):
    """bool [B, 1, 1, end - start, end]: which key each query of a block may see."""
    query = jnp.arange(start, end)[:, None]
    key = jnp.arange(end)[None, :]
    ordered = key <= query
    if window:
        ordered &= key > query - window
    same = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, :end]
    return (same & ordered[None, :, :])[:, None, None, :, :]


def _grouped(q_BTNH, num_kv_heads):
    batch, tokens, heads, head_dim = q_BTNH.shape
    groups = heads // num_kv_heads
    return q_BTNH.reshape(batch, tokens, num_kv_heads, groups, head_dim)


def _xla_forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, spec):
    wide = np.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = _grouped(q_BTNH, k_BTKH.shape[2])
    scale = q_BTNH.shape[-1] ** -0.5
    outputs, stats = [], []
    for start, end in chunking.attention_blocks(q_BTNH.shape[1]):
        scores = scale * jnp.einsum(
            "btkgh,bskh->bkgts",
            q_BTKGH[:, start:end],
            k_BTKH[:, :end],
            preferred_element_type=wide,
        )
        allowed = _allowed(segment_ids_BT, start, end, spec.window)
        scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(v_BTKH.dtype)
        outputs.append(jnp.einsum("bkgts,bskh->btkgh", weights, v_BTKH[:, :end]))
        stats.append(lse)
    output = jnp.concatenate(outputs, axis=1).reshape(q_BTNH.shape)
    return output, jnp.concatenate(stats, axis=-1)


def _xla_backward(residuals, grad_BTNH, spec):
    q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, output, lse_BKGT = residuals
    wide = lse_BKGT.dtype
    num_kv_heads = k_BTKH.shape[2]
    q_BTKGH = _grouped(q_BTNH, num_kv_heads)
    grad_BTKGH = _grouped(grad_BTNH, num_kv_heads)
    scale = q_BTNH.shape[-1] ** -0.5
    products = grad_BTNH.astype(wide) * output.astype(wide)
    delta_BTKG = _grouped(products, num_kv_heads).sum(axis=-1)
    delta_BKGT = jnp.transpose(delta_BTKG, (0, 2, 3, 1))
    dq = []
    dk, dv = jnp.zeros_like(k_BTKH, wide), jnp.zeros_like(v_BTKH, wide)
    for start, end in chunking.attention_blocks(q_BTNH.shape[1]):
        q, grad = q_BTKGH[:, start:end], grad_BTKGH[:, start:end]
        k, v = k_BTKH[:, :end], v_BTKH[:, :end]
        scores = scale * jnp.einsum(
            "btkgh,bskh->bkgts", q, k, preferred_element_type=wide
        )
        allowed = _allowed(segment_ids_BT, start, end, spec.window)
        weights = jnp.exp(scores - lse_BKGT[..., start:end, None])
        weights = jnp.where(allowed, weights, jnp.zeros_like(weights))
        d_weights = jnp.einsum(
            "btkgh,bskh->bkgts", grad, v, preferred_element_type=wide
        )
        d_scores = weights * (d_weights - delta_BKGT[..., start:end, None]) * scale
        d_scores = d_scores.astype(q.dtype)
        weights = weights.astype(q.dtype)
        dq.append(jnp.einsum("bkgts,bskh->btkgh", d_scores, k))
        dk = _add_first(
            dk,
            jnp.einsum("bkgts,btkgh->bskh", d_scores, q, preferred_element_type=wide),
        )
        dv = _add_first(
            dv,
            jnp.einsum("bkgts,btkgh->bskh", weights, grad, preferred_element_type=wide),
        )
    d_query = jnp.concatenate(dq, axis=1).reshape(q_BTNH.shape)
    return d_query, dk.astype(k_BTKH.dtype), dv.astype(v_BTKH.dtype)


def _add_first(total_BTKH, part_BSKH):
    """Adds `part` to the first S of T tokens."""
    first = total_BTKH[:, : part_BSKH.shape[1]] + part_BSKH
    return jax.lax.dynamic_update_slice_in_dim(total_BTKH, first, 0, axis=1)

"""cuDNN flash attention with its backward pass callable on saved outputs.

The one place that touches `jax._src.cudnn`: `jax.nn.dot_product_attention` runs the
same kernels, but its backward pass cannot be given the forward's output and softmax
statistics, so saving them would not spare the second forward run.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused


def forward(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array]:
    """Causal attention; rows must hold one document each, padding at their end.

    Returns:
      The output [B, T, N, H] and the statistics that `backward` takes.
    """
    output_and_stats: Any = fused.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=q_BTNH.shape[-1] ** -0.5,
        mask_type=fused.MaskType.CAUSAL,
        sliding_window_length=window or None,
        return_residual=True,
    )
    output, stats = output_and_stats
    return output, stats


def backward(
    saved: tuple[jax.Array, ...], grad_BTNH: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, v from (q, k, v, output, statistics)."""
    q_BTNH, k_BTKH, v_BTKH, output_BTNH, stats = saved
    unused = jnp.zeros(0, q_BTNH.dtype)
    grads = fused._dot_product_attention_bwd_p_wrapper.bind(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        *(unused,) * 7,
        stats,
        output_BTNH,
        grad_BTNH,
        scale=q_BTNH.shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=fused.MaskType.CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window or None,
    )
    return grads[0], grads[1], grads[2]

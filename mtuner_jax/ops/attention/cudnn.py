"""cuDNN flash attention with its backward pass callable on saved outputs.

The one place that touches `jax._src.cudnn`: `jax.nn.dot_product_attention` runs the
same kernels, but its backward pass cannot be given the forward's output and softmax
statistics, so saving them would not spare the second forward run.

Segment ids are ignored: rows must hold one document each, padding at their end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

from mtuner_jax.ops.attention.operands import Attended, Documents, Qkv, Residuals


def forward(qkv: Qkv, documents: Documents, *, window: int) -> Attended:
    """As `api.attend`, on a GPU; statistics [B, N, T], float32."""
    del documents
    output_and_stats: Any = fused.dot_product_attention(
        *qkv,
        scale=qkv.q_BTNH.shape[-1] ** -0.5,
        mask_type=fused.MaskType.CAUSAL,
        sliding_window_length=window or None,
        return_residual=True,
    )
    return Attended(*output_and_stats)


def backward(residuals: Residuals, grad_BTNH: jax.Array, *, window: int) -> Qkv:
    """Gradients of queries, keys and values in their shapes; runs no forward."""
    qkv, attended = residuals.qkv, residuals.attended
    unused = jnp.zeros(0, qkv.q_BTNH.dtype)
    grads = fused._dot_product_attention_bwd_p_wrapper.bind(
        *qkv,
        *(unused,) * 7,
        attended.stats,
        attended.out_BTNH,
        grad_BTNH,
        scale=qkv.q_BTNH.shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=fused.MaskType.CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window or None,
    )
    return Qkv(*grads[:3])

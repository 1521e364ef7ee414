"""FlashAttention-3 with variable lengths, from the package `dew-flash-attn`.

The kernels are Dao-AILab's, compiled for Hopper and called through XLA's FFI; each
document of a row is a sequence of its own, so nothing is computed across borders
(Shah et al., FlashAttention-3, NeurIPS 2024). The package is asked for its forward and
backward calls, not for its differentiable function, so that a saved output spares the
second forward run; these are private to it, hence the one version in pyproject.toml.

The gradient of the queries is summed in the order in which blocks end, so two runs
agree to rounding, as cuDNN's do.
"""

from collections.abc import Sequence
from typing import Any

import jax

from mtuner_jax.ops.attention.operands import Attended, Documents, Qkv, Residuals

PACKAGE = "dew_flash_attn"


def forward(qkv: Qkv, documents: Documents, *, window: int) -> Attended:
    """As `api.attend`, on a Hopper GPU; statistics [N, B * T], float32."""
    q_BTNH = qkv.q_BTNH
    flat = (_flat(array) for array in qkv)
    found = _package()._forward3(*flat, *_settings(q_BTNH, documents, window))
    out, stats = _varying(found, q_BTNH)
    return Attended(out.reshape(q_BTNH.shape), stats)


def backward(residuals: Residuals, grad_BTNH: jax.Array, *, window: int) -> Qkv:
    """Gradients of queries, keys and values in their shapes; runs no forward."""
    qkv, documents, (out_BTNH, stats) = residuals
    flat = (_flat(array) for array in (grad_BTNH, *qkv, out_BTNH))
    found = _package()._backward3(
        *flat, stats, *_settings(qkv.q_BTNH, documents, window)
    )
    grads = _varying(found, qkv.q_BTNH)
    return Qkv(
        *(grad.reshape(array.shape) for grad, array in zip(grads, qkv, strict=True))
    )


def _settings(q_BTNH: jax.Array, documents: Documents, window: int) -> tuple[Any, ...]:
    """Starts of queries and keys, longest document, scale, causal, window."""
    starts, longest = documents.starts, q_BTNH.shape[1]
    back = window - 1 if window else -1
    scale = q_BTNH.shape[-1] ** -0.5
    return (starts, starts), (longest, longest), scale, True, (back, -1)


def _varying(found: Sequence[jax.Array], like: jax.Array) -> list[jax.Array]:
    """Results of a foreign call, which JAX takes for the same on all devices."""
    axes = tuple(jax.typeof(like).manual_axis_type.varying)
    return [
        jax.lax.pcast(array, axes, to="varying") if axes else array for array in found
    ]


def _flat(x_BTNH: jax.Array) -> jax.Array:
    """[B, T, N, H] -> [B * T, N, H]."""
    return x_BTNH.reshape(-1, *x_BTNH.shape[2:])


def _package() -> Any:
    """The package; it loads CUDA libraries, so it is imported when it is used."""
    import dew_flash_attn  # pyrefly: ignore[missing-import]

    return dew_flash_attn

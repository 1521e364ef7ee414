"""The low-rank update in plain JAX, its backward pass written out.

Letters: B batch, T tokens, D input features, F output features, R rank.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.ops import dropout
from mtuner_jax.ops.low_rank.operands import Dropout, Lora


def apply(
    x_BTD: jax.Array,
    kernel_DF: jax.Array,
    bias_F: jax.Array | None,
    *,
    lora: Lora | None,
    drop: Dropout | None,
) -> jax.Array:
    """As `api.apply`, [B, T, F]."""
    y_BTF = x_BTD @ kernel_DF
    if bias_F is not None:
        y_BTF = y_BTF + bias_F[None, None, :]
    if lora is None:
        return y_BTF
    if drop is not None and drop.rate > 0.0:
        x_BTD = dropout.apply(x_BTD, drop.key, drop.places, rate=drop.rate)
    return y_BTF + low_rank(x_BTD, lora)


@jax.custom_vjp
def low_rank(x_BTD: jax.Array, lora: Lora) -> jax.Array:
    """scaling * (x A) B in the dtype of `x_BTD`, [B, T, F].

    The backward pass is written out so that sums over tokens run in float32 and that
    of each product the small operand is the one laid out anew: differentiated by JAX,
    the gradient of B asks for the [B, T, F] cotangent transposed, which on CPUs costs
    more than the product.
    """
    return _down(x_BTD, lora) @ lora.b_RF.astype(x_BTD.dtype)


class _Residuals(NamedTuple):
    x_BTD: jax.Array
    lora: Lora


def _low_rank_fwd(x_BTD: jax.Array, lora: Lora) -> tuple[jax.Array, _Residuals]:
    return low_rank(x_BTD, lora), _Residuals(x_BTD, lora)


def _low_rank_bwd(residuals: _Residuals, dy_BTF: jax.Array) -> tuple[jax.Array, Lora]:
    x_BTD, lora = residuals
    dtype, wide = x_BTD.dtype, lora.a_DR.dtype
    scaling = lora.scaling.astype(dtype)
    ds_BTR = jnp.einsum("btf,rf->btr", dy_BTF, lora.b_RF.astype(dtype)) * scaling
    dx_BTD = jnp.einsum("btr,dr->btd", ds_BTR, lora.a_DR.astype(dtype))
    da_RD = jnp.einsum("btr,btd->rd", ds_BTR, x_BTD, preferred_element_type=wide)
    db_RF = jnp.einsum(
        "btr,btf->rf", _down(x_BTD, lora), dy_BTF, preferred_element_type=wide
    )
    return dx_BTD, Lora(da_RD.T, db_RF, jnp.zeros_like(lora.scaling))


low_rank.defvjp(_low_rank_fwd, _low_rank_bwd)


def _down(x_BTD: jax.Array, lora: Lora) -> jax.Array:
    """scaling * x A, [B, T, R]."""
    dtype = x_BTD.dtype
    return (x_BTD @ lora.a_DR.astype(dtype)) * lora.scaling.astype(dtype)

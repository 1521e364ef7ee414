"""Low-rank updates in plain JAX, their backward pass written out.

Letters: B batch, T tokens, D input features, F output features, R rank, S the ranks
of all adapters that read one input, side by side.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.ops import dropout
from mtuner_jax.ops.low_rank.operands import Dropout, Linear, Lora


def apply(
    x_BTD: jax.Array, linears: Sequence[Linear], *, drop: Dropout | None
) -> list[jax.Array]:
    """As `api.apply`, [B, T, F] of each linear."""
    outputs = []
    for linear in linears:
        y_BTF = x_BTD @ linear.kernel_DF
        if linear.bias_F is not None:
            y_BTF = y_BTF + linear.bias_F[None, None, :]
        outputs.append(y_BTF)
    loras = {i: one.lora for i, one in enumerate(linears) if one.lora is not None}
    if not loras:
        return outputs
    if drop is not None and (isinstance(drop.rate, jax.Array) or drop.rate > 0.0):
        x_BTD = dropout.apply(x_BTD, drop.key, drop.places, rate=drop.rate)
    updates = low_rank(x_BTD, list(loras.values()))
    for i, update_BTF in zip(loras, updates, strict=True):
        outputs[i] = outputs[i] + update_BTF
    return outputs


@jax.custom_vjp
def low_rank(x_BTD: jax.Array, loras: list[Lora]) -> list[jax.Array]:
    """scaling * (x A) B of each adapter in the dtype of `x_BTD`, [B, T, F].

    The A matrices stand side by side, so that the input is read once for all of them,
    its gradient written once, and that of the A matrices is one product.

    The backward pass is written out so that sums over tokens run in float32 and that
    of each product the small operand is the one laid out anew: differentiated by JAX,
    the gradient of B asks for the [B, T, F] cotangent transposed, which on CPUs costs
    more than the product.
    """
    return [
        down_BTR @ lora.b_RF.astype(x_BTD.dtype)
        for down_BTR, lora in zip(_down(x_BTD, loras), loras, strict=True)
    ]


class _Residuals(NamedTuple):
    x_BTD: jax.Array
    loras: list[Lora]


def _low_rank_fwd(
    x_BTD: jax.Array, loras: list[Lora]
) -> tuple[list[jax.Array], _Residuals]:
    return low_rank(x_BTD, loras), _Residuals(x_BTD, loras)


def _low_rank_bwd(
    residuals: _Residuals, dys: list[jax.Array]
) -> tuple[jax.Array, list[Lora]]:
    x_BTD, loras = residuals
    dtype, wide = x_BTD.dtype, loras[0].a_DR.dtype
    ds_BTS = jnp.concatenate(
        [
            jnp.einsum("btf,rf->btr", dy_BTF, lora.b_RF.astype(dtype))
            * lora.scaling.astype(dtype)
            for dy_BTF, lora in zip(dys, loras, strict=True)
        ],
        axis=-1,
    )
    dx_BTD = jnp.einsum("bts,ds->btd", ds_BTS, _a(loras, dtype))
    da_SD = jnp.einsum("bts,btd->sd", ds_BTS, x_BTD, preferred_element_type=wide)
    db_RFs = [
        jnp.einsum("btr,btf->rf", down_BTR, dy_BTF, preferred_element_type=wide)
        for down_BTR, dy_BTF in zip(_down(x_BTD, loras), dys, strict=True)
    ]
    return dx_BTD, [
        Lora(da_RD.T, db_RF, jnp.zeros_like(lora.scaling))
        for da_RD, db_RF, lora in zip(
            _cut(da_SD, loras, axis=0), db_RFs, loras, strict=True
        )
    ]


low_rank.defvjp(_low_rank_fwd, _low_rank_bwd)


def _down(x_BTD: jax.Array, loras: list[Lora]) -> list[jax.Array]:
    """scaling * x A of each adapter, [B, T, R]."""
    dtype = x_BTD.dtype
    parts = _cut(x_BTD @ _a(loras, dtype), loras, axis=-1)
    return [
        part_BTR * lora.scaling.astype(dtype)
        for part_BTR, lora in zip(parts, loras, strict=True)
    ]


def _a(loras: list[Lora], dtype: jnp.dtype) -> jax.Array:
    """The A matrices side by side, [D, S]."""
    return jnp.concatenate([lora.a_DR.astype(dtype) for lora in loras], axis=-1)


def _cut(array: jax.Array, loras: list[Lora], *, axis: int) -> list[jax.Array]:
    """Each adapter's part along S."""
    ends = itertools.accumulate(lora.a_DR.shape[-1] for lora in loras)
    return jnp.split(array, list(ends)[:-1], axis=axis)

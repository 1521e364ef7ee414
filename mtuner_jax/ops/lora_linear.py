"""A frozen linear with a low-rank update: y = x W + b + s * drop(x) A B."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.ops import dropout


class Lora(NamedTuple):
    """One linear's adapter.

    Attributes:
      a_DR: [D, R], float32.
      b_RF: [R, F], float32.
      scaling: Scalar, float32.
    """

    a_DR: jax.Array
    b_RF: jax.Array
    scaling: jax.Array


class Dropout(NamedTuple):
    """Randomness of an adapter's input; rate 0 is no dropout."""

    key: dropout.Key
    places: dropout.Places
    rate: float


class LayerAdapters(NamedTuple):
    """The adapters of one layer, by module name, and their randomness.

    Attributes:
      loras: Only the modules that have an adapter.
      drop: Keyed by layer and step; each module derives its own key. None is no
        dropout.
    """

    loras: Mapping[str, Lora]
    drop: Dropout | None = None

    def of(self, module: str) -> tuple[Lora | None, Dropout | None]:
        """The adapter and the randomness of one linear."""
        lora = self.loras.get(module)
        if lora is None or self.drop is None:
            return lora, None
        key = dropout.fold_in(self.drop.key, dropout.stable_hash(module))
        return lora, self.drop._replace(key=key)


def apply(
    x_BTD: jax.Array,
    kernel_DF: jax.Array,
    bias_F: jax.Array | None = None,
    *,
    lora: Lora | None = None,
    drop: Dropout | None = None,
) -> jax.Array:
    """Applies the linear in the dtype of `x_BTD`; the adapter is cast to it.

    Returns:
      [B, T, F].
    """
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


def _low_rank_fwd(x_BTD, lora):
    return low_rank(x_BTD, lora), (x_BTD, lora)


def _low_rank_bwd(residuals, dy_BTF):
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


def _down(x_BTD, lora):
    dtype = x_BTD.dtype
    return (x_BTD @ lora.a_DR.astype(dtype)) * lora.scaling.astype(dtype)


def merged(kernel_DF: jax.Array, lora: Lora) -> jax.Array:
    """The frozen kernel with its update added, in float32 [D, F]."""
    delta_DF = (lora.a_DR * lora.scaling) @ lora.b_RF
    return kernel_DF.astype(jnp.float32) + delta_DF

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
    dtype = x_BTD.dtype
    if drop is not None and drop.rate > 0.0:
        x_BTD = dropout.apply(x_BTD, drop.key, drop.places, rate=drop.rate)
    s_BTR = (x_BTD @ lora.a_DR.astype(dtype)) * lora.scaling.astype(dtype)
    return y_BTF + s_BTR @ lora.b_RF.astype(dtype)


def merged(kernel_DF: jax.Array, lora: Lora) -> jax.Array:
    """The frozen kernel with its update added, in float32 [D, F]."""
    delta_DF = (lora.a_DR * lora.scaling) @ lora.b_RF
    return kernel_DF.astype(jnp.float32) + delta_DF

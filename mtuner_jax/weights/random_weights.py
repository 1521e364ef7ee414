"""Random frozen weights, the same ones for every plan and mesh of a model."""

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtuner_jax.protocols.states import Params
from mtuner_jax.weights.layouts import FrozenArray


def draw(table: Params, mesh: Mesh, key: jax.Array, *, scale: float = 0.02) -> Params:
    """Random weights: norms 1, biases 0, the rest normal(scale), padding 0.

    A layer's weights depend on the key, its number and the leaf's name only.

    Args:
      table: What `layouts.table` returned.
      mesh: The devices it was made for.
      key: A PRNG key.
      scale: Standard deviation of kernels and vocabulary tables.
    """
    return jax.tree.map(lambda row: _draw(row, mesh, key, scale=scale), table)


def _draw(row: FrozenArray, mesh: Mesh, key: jax.Array, *, scale: float) -> jax.Array:
    layers = None
    if row.layers is not None:
        layers = jnp.arange(row.layers.start, row.layers.stop, dtype=jnp.int32)
    path = row.path if layers is None else ("segments", *row.path[1:])
    number = zlib.crc32("/".join(path).encode()) & 0x7FFFFFFF
    target = row.abstract(mesh)
    make: Any = jax.jit(
        functools.partial(_array, row=row, dtype=target.dtype, scale=scale),
        out_shardings=target.sharding,
    )
    return make(jax.random.fold_in(key, number), layers)


def _array(
    key: jax.Array,
    layers: jax.Array | None,
    *,
    row: FrozenArray,
    dtype: Any,
    scale: float,
) -> jax.Array:
    """One array as stored; `layers` are the model's layers along its first dim."""
    if row.path[-1] == "scale":
        return jnp.ones(row.stored_shape, dtype)
    if row.path[-1] == "bias":
        return jnp.zeros(row.stored_shape, dtype)

    def one(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return scale * jax.random.normal(key, shape, dtype)

    if layers is None:
        array = one(key, row.shape)
    else:
        # Drawn in true rows and padded afterwards: the values of a draw depend on its
        # shape, and so would the model on the mesh.
        array = jax.vmap(
            lambda layer: one(jax.random.fold_in(key, layer), row.shape[1:])
        )(layers)
    padding = [
        (0, stored - size)
        for size, stored in zip(row.shape, row.stored_shape, strict=True)
    ]
    return jnp.pad(array, padding)

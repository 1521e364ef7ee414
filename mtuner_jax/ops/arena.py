"""Memory that the loops over layers carry along: layer inputs, saved in place.

One buffer goes through the forward loop, which fills it, and the backward loop,
which empties it. It is carried rather than stacked by `lax.scan`, so that later its
rows can hold something else while no layer input needs them.
"""

import jax
import jax.numpy as jnp


def empty(num_layers: int, like: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Room for one value shaped as `like` per layer, [L, *like.shape].

    Args:
      num_layers: Layers (L).
      like: A layer's input.
      axes: Mesh axes over which the content will differ between devices.
    """
    room = jnp.zeros((num_layers, *like.shape), like.dtype)
    return jax.lax.pcast(room, axes, to="varying")


def write(arena: jax.Array, layer: jax.Array, value: jax.Array) -> jax.Array:
    """Stores a layer's input."""
    return jax.lax.dynamic_update_index_in_dim(arena, value, layer, 0)


def read(arena: jax.Array, layer: jax.Array) -> jax.Array:
    """Returns a layer's input."""
    return jax.lax.dynamic_index_in_dim(arena, layer, 0, keepdims=False)

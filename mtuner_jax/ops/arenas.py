"""The arena: one buffer that layer inputs and kept weight copies take turns in.

It is carried through the loops over layers (`lax.scan` would allocate stacked inputs
and outputs for the whole loop) and donated from step to step. `arena_layouts` says
which rows hold what. Reads that free rows are ordered before the write that reuses
them by `take`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.ops import ordering


def empty(
    shape: tuple[int, int], dtype: np.dtype, *, axes: tuple[str, ...]
) -> jax.Array:
    """An arena of zeros, [rows, width], different on each device of mesh `axes`."""
    # Without the cast, the loop that carries it has no fixed type: zeros are equal on
    # all devices, what is written is not.
    return jax.lax.pcast(jnp.zeros(shape, dtype), axes, to="varying")


def write(
    arena: jax.Array, start: jax.Array | int, values: Sequence[jax.Array]
) -> jax.Array:
    """Puts arrays, one behind the other, into the rows from `start` on.

    Args:
      arena: [rows, width].
      start: The first row.
      values: Arrays of any shape, in the arena's dtype.

    Returns:
      The arena, [rows, width].

    Raises:
      TypeError: An array of another dtype; it is not cast.
    """
    width = arena.shape[1]
    for value in values:
        if value.dtype != arena.dtype:
            raise TypeError(
                f"an array of {value.dtype} {value.shape} can't be put into an arena "
                f"of {arena.dtype}; convert it, or use an arena of its dtype"
            )
    flat = jnp.concatenate([value.ravel() for value in values])
    rows = -(-flat.size // width)
    flat = jnp.pad(flat, (0, rows * width - flat.size))
    block = flat.reshape(rows, width)
    return jax.lax.dynamic_update_slice_in_dim(arena, block, start, 0)


def take(
    arena: jax.Array, start: jax.Array | int, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[jax.Array], jax.Array]:
    """Reads arrays of `shapes` from the rows from `start` on.

    Returns:
      (arrays, arena). Writes to the returned arena come after the read.
    """
    width = arena.shape[1]
    sizes = [math.prod(shape) for shape in shapes]
    rows = -(-sum(sizes) // width)
    block = jax.lax.dynamic_slice_in_dim(arena, start, rows, 0)
    # The rows are about to be written again. XLA would be free to read after that
    # write, and would then copy the whole arena to keep the old rows.
    block, arena = ordering.after(block, arena)
    flat, values, begin = block.ravel(), [], 0
    for size, shape in zip(sizes, shapes, strict=True):
        part = jax.lax.slice_in_dim(flat, begin, begin + size)
        values.append(part.reshape(shape))
        begin += size
    return values, arena

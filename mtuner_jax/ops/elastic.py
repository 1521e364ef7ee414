"""Elastic tensors: a weight's local share rises by a gather, falls by a slice.

Call these inside `jax.shard_map`. A weight held over the `held` slowest mesh axes is,
on one device, a block of its rows (dim 0); with the slowest axis minor in the stored
order, gathering over the next axis joins neighbouring blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax


class Raised(NamedTuple):
    """A weight on its way up.

    Attributes:
      whole: [D, ...].
      part: What one device keeps of it when it is held over fewer axes.
    """

    whole: jax.Array
    part: jax.Array


def gather(shard: jax.Array, *, axes: Sequence[str]) -> jax.Array:
    """Raises the local share of a row-sharded weight over mesh `axes`.

    Args:
      shard: [D / size(axes), ...], any dtype.
      axes: Mesh axes to gather over, slowest link first; none returns `shard`.

    Returns:
      [D, ...]. One all-gather that receives D * (1 - 1 / size(axes)) rows.
    """
    if not axes:
        return shard
    return jax.lax.all_gather(shard, tuple(reversed(axes)), axis=0, tiled=True)


def discard(block: jax.Array, *, axes: Sequence[str]) -> jax.Array:
    """Lowers the local share: the inverse of `gather`, without communication.

    Args:
      block: [D, ...].
      axes: Mesh axes whose part is given up, slowest link first.

    Returns:
      This device's [D / size(axes), ...].
    """
    if not axes:
        return block
    order = tuple(reversed(axes))
    rows = block.shape[0] // jax.lax.axis_size(order)
    start = jax.lax.axis_index(order) * rows
    return jax.lax.dynamic_slice_in_dim(block, start, rows, axis=0)


def change(block: jax.Array, *, axes: Sequence[str], held: int, want: int) -> jax.Array:
    """Brings a weight from being held over `held` to over `want` of mesh `axes`.

    One gather if it rises, no communication if it falls.
    """
    if want >= held:
        return gather(block, axes=axes[held:want])
    return discard(block, axes=axes[want:held])


def through(block: jax.Array, *, axes: Sequence[str], held: int, stop: int) -> Raised:
    """The whole weight, and on the way the part held over `stop` axes.

    Every byte is received once: a gather up to `stop` and another from there, or one
    gather and a slice if `stop` is below `held`.
    """
    part = change(block, axes=axes, held=held, want=stop)
    begin, level = (part, stop) if stop > held else (block, held)
    return Raised(change(begin, axes=axes, held=level, want=len(axes)), part)

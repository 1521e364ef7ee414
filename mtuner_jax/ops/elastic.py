"""Elastic tensors: a weight's local share rises by a gather, falls by a slice.

Call these inside `jax.shard_map`. `shard` is one device's part of a weight whose
rows (dim 0) are split over mesh axes with the slowest axis minor, so that gathering
over the slowest axes first joins neighbouring rows.
"""

from collections.abc import Sequence

import jax


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

"""Logical dims of arrays -> mesh axes, checked; never silently replicated.

A weight's rows are stored with the slowest mesh axis minor, so that gathering over
the slowest link first joins neighbouring rows and what remains to be gathered stays
on faster links.
"""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.configs import ConfigError

# Logical dims of a parameter by the name of its leaf, without the layers' dim.
LOGICAL_DIMS: dict[str, tuple[str | None, ...]] = {
    "kernel": ("weight_rows", None),
    "table": ("vocab_rows", None),
    "bias": (None,),
    "scale": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisRules:
    """Mesh axes for each logical dim, slowest link last; () means replicated."""

    batch: tuple[str, ...] = ()
    weight_rows: tuple[str, ...] = ()
    vocab_rows: tuple[str, ...] = ()

    def spec(self, *dims: str | None) -> P:
        """The PartitionSpec of an array with these logical dims.

        Raises:
          ValueError: Two dims that map to one mesh axis.
        """
        axes = [getattr(self, dim) if dim else () for dim in dims]
        used = [axis for group in axes for axis in group]
        if len(set(used)) != len(used):
            raise ValueError(
                f"dims {dims} map to {axes}: a mesh axis may shard only one dim"
            )
        return P(*(group or None for group in axes))


def rules(axes: Sequence[str], *, rest_axes: int) -> AxisRules:
    """Rules for weights held over the `rest_axes` slowest data axes.

    Args:
      axes: The mesh's data axes, slowest link first.
      rest_axes: How many of them, from the slowest, a weight is not split over.
    """
    split = tuple(reversed(axes[rest_axes:]))
    every = tuple(reversed(axes))
    return AxisRules(batch=tuple(axes), weight_rows=split, vocab_rows=every)


def dims(leaf: str, *, stacked: bool) -> tuple[str | None, ...]:
    """Logical dims of a parameter by its name; stacked ones lead with the layers'."""
    return (None, *LOGICAL_DIMS[leaf]) if stacked else LOGICAL_DIMS[leaf]


def check_divides(
    name: str, shape: Sequence[int], sharding: NamedSharding, *, remedy: str
) -> None:
    """Refuses a size that its mesh axes do not divide, where padding is not exact.

    Args:
      name: The array, for the error.
      shape: Its sizes.
      sharding: Where it is to lie.
      remedy: What to change, as the end of "use ...".

    Raises:
      ConfigError: It names array, dim, size and axes.
    """
    for dim, (size, group) in enumerate(zip(shape, sharding.spec, strict=False)):
        names = (group,) if isinstance(group, str) else tuple(group or ())
        devices = math.prod(sharding.mesh.shape[axis] for axis in names)
        if size % devices:
            raise ConfigError(
                f"{name}: dim {dim} of size {size} can't be split over the {devices} "
                f"devices of mesh axes {', '.join(names)}; use a mesh whose size "
                f"divides {size}, or {remedy}"
            )

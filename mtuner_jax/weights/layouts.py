"""The table of frozen weights: one row an array, what it is and where it lies.

The model's tree {"embed", "layers", "head"} becomes {"embed", "segments", "head"},
where "segments" maps "0", "1", ... to stacks of that segment's layers. Loading, random
weights, `shard_map` specs, raising, arenas and byte counts read this table.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.devices import meshes, shardings
from mtuner_jax.numbers import chunking
from mtuner_jax.planning.plans import Plan, Table
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Params


class NamedTensor(Protocol):
    """A checkpoint's tensor: where in the model's tree it belongs."""

    @property
    def path(self) -> tuple[str, ...]:
        """Keys down the model's tree."""
        ...

    @property
    def layer(self) -> int | None:
        """Index into the layers' dim, if there is one."""
        ...


Tensor = TypeVar("Tensor", bound=NamedTensor)


class MemoryTier(enum.StrEnum):
    """The memory that an array lies in."""

    DEVICE = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenArray:
    """A row of the table: one array of the engine's tree.

    Attributes:
      path: Keys down the model's tree, such as ("layers", "mlp.up_proj", "kernel").
      layers: The model's layers that it stacks along dim 0; None for one array.
      dims: Logical dims; a dim with a name is split over devices.
      shape: Sizes that mean something.
      stored_shape: Sizes as stored: split rows are padded with zeros to a multiple of
        the devices.
      storage: Name of the dtype it is stored in.
      tier: The memory it lies in.
      spec: The mesh axes that split it.
    """

    path: tuple[str, ...]
    layers: range | None
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    storage: str
    tier: MemoryTier
    spec: P

    @property
    def is_split(self) -> bool:
        """Whether its rows belong to devices at all."""
        return any(self.dims)

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Stored shape, dtype and sharding, without allocating any."""
        return jax.ShapeDtypeStruct(
            self.stored_shape,
            np.dtype(self.storage),
            sharding=NamedSharding(mesh, self.spec),
        )

    def usable(self, whole: jax.Array, dtype: np.dtype) -> jax.Array:
        """One layer's whole array as products take it.

        Args:
          whole: [rows as stored, ...], the layers' dim taken away.
          dtype: What to compute in.

        Returns:
          [rows, ...] without those of padding; `whole` itself where nothing differs.
        """
        rows = self.shape[self.layers is not None]
        return whole[:rows].astype(dtype)


def table(model: Decoder, plan: Plan, mesh: Mesh, *, dtype: Any) -> Params:
    """The frozen weights of a model under a plan.

    Rows that the devices do not divide are padded with zeros, which is exact: they are
    cut off, or masked, before use.

    Args:
      model: The decoder.
      plan: What is held where.
      mesh: The devices.
      dtype: What the weights are stored in.

    Returns:
      The engine's tree of `FrozenArray`.
    """
    shapes, axes = model.shapes(), meshes.roles(mesh).data
    build = _Builder(
        num_devices=math.prod(mesh.shape[axis] for axis in axes),
        storage=np.dtype(dtype).name,
    )
    tree: Params = {"segments": {}}
    for part, kind in (("embed", plan.embedding), ("head", plan.head)):
        rules = shardings.rules(axes, rest_axes=0)
        if kind is Table.RESIDENT:
            rules = dataclasses.replace(rules, vocab_rows=())
        tree[part] = build.rows(shapes[part], (part,), rules=rules)
    for index, (start, segment) in enumerate(
        zip(plan.starts, plan.segments, strict=True)
    ):
        tree["segments"][str(index)] = build.rows(
            shapes["layers"],
            ("layers",),
            rules=shardings.rules(axes, rest_axes=segment.rest_axes),
            layers=range(start, start + segment.num_layers),
        )
    return tree


def layout(model: Decoder, plan: Plan, mesh: Mesh, *, dtype: Any) -> Params:
    """The table as the engine's tree of `jax.ShapeDtypeStruct`, with shardings.

    Every leaf is created in its sharding; no device and no host ever holds more.
    """
    rows = table(model, plan, mesh, dtype=dtype)
    return jax.tree.map(lambda row: row.abstract(mesh), rows)


def locate(tensors: Sequence[Tensor], plan: Plan) -> tuple[Tensor, ...]:
    """Rewrites a checkpoint's name table from the model's tree to the engine's."""
    return tuple(_locate(tensor, plan) for tensor in tensors)


def num_bytes(abstract: Params) -> int:
    """Bytes of the weights that one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract)
    )


def _locate(tensor: Any, plan: Plan) -> Any:
    if tensor.layer is None:
        return tensor
    for index, start in reversed(tuple(enumerate(plan.starts))):
        if tensor.layer >= start:
            path = ("segments", str(index), *tensor.path[1:])
            return dataclasses.replace(tensor, path=path, layer=tensor.layer - start)
    raise AssertionError(tensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Builder:
    """Makes rows of the table; what all of them share."""

    num_devices: int
    storage: str

    def rows(
        self,
        node: Any,
        path: tuple[str, ...],
        *,
        rules: shardings.AxisRules,
        layers: range | None = None,
    ) -> Any:
        """The rows of a part of the model's tree of shapes."""
        if isinstance(node, dict):
            return {
                key: self.rows(child, (*path, key), rules=rules, layers=layers)
                for key, child in node.items()
            }
        shape = node if layers is None else (len(layers), *node[1:])
        dims = shardings.dims(path[-1], stacked=layers is not None)
        return FrozenArray(
            path=path,
            layers=layers,
            dims=dims,
            shape=shape,
            stored_shape=tuple(
                chunking.padded(size, self.num_devices) if dim else size
                for size, dim in zip(shape, dims, strict=True)
            ),
            storage=self.storage,
            tier=MemoryTier.DEVICE,
            spec=rules.spec(*dims),
        )

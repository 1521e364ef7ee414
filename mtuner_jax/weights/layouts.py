"""The frozen weights as the engine holds them: one stack of layers per segment.

The model's tree {"embed", "layers", "head"} becomes {"embed", "segments", "head"},
where "segments" maps "0", "1", ... to stacks of that segment's layers. Every leaf
is created in its sharding; no device and no host ever holds more.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtuner_jax.devices import shardings
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


def layout(model: Decoder, plan: Plan, mesh: Mesh, *, dtype: Any) -> Params:
    """Shapes, dtype and shardings of the frozen weights under a plan.

    Vocabulary tables are padded with rows to a multiple of the devices.

    Returns:
      The engine's tree of `jax.ShapeDtypeStruct`, each with its sharding.

    Raises:
      ConfigError: A size that the mesh does not divide.
    """
    shapes, axes = model.shapes(), mesh.axis_names
    tree: Params = {"segments": {}}
    for part, table in (("embed", plan.embedding), ("head", plan.head)):
        rules = shardings.rules(axes, rest_axes=0)
        if table is Table.RESIDENT:
            rules = dataclasses.replace(rules, vocab_rows=())
        tree[part] = _abstract(shapes[part], part, axis_rules=rules, mesh=mesh)
    for index, segment in enumerate(plan.segments):
        stack = jax.tree.map(
            lambda shape, n=segment.num_layers: (n, *shape[1:]),
            shapes["layers"],
            is_leaf=lambda node: isinstance(node, tuple),
        )
        rules = shardings.rules(axes, rest_axes=segment.rest_axes)
        tree["segments"][str(index)] = _abstract(
            stack, "layers", axis_rules=rules, mesh=mesh
        )
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding),
        tree,
    )


def locate(tensors: Sequence[Tensor], plan: Plan) -> tuple[Tensor, ...]:
    """Rewrites a checkpoint's name table from the model's tree to the engine's."""
    return tuple(_locate(tensor, plan) for tensor in tensors)


def random(
    abstract: Params, plan: Plan, key: jax.Array, *, scale: float = 0.02
) -> Params:
    """Random weights: norms 1, biases 0, the rest normal(scale).

    A layer's weights depend on the key, its number and the leaf's name only, so every
    plan and mesh of a model gets the same ones.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = []
    for path, leaf in flat:
        names = [str(part.key) for part in path]
        layers = None
        if names[0] == "segments":
            start = plan.starts[int(names.pop(1))]
            layers = jnp.arange(start, start + leaf.shape[0], dtype=jnp.int32)
        make = jax.jit(
            functools.partial(_random_leaf, leaf=leaf, kind=names[-1], scale=scale),
            out_shardings=leaf.sharding,
        )
        number = zlib.crc32("/".join(names).encode()) & 0x7FFFFFFF
        leaves.append(make(jax.random.fold_in(key, number), layers))
    return jax.tree.unflatten(tree, leaves)


def num_bytes(abstract: Params) -> int:
    """Bytes of the weights that one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract)
    )


def _locate(tensor, plan):
    if tensor.layer is None:
        return tensor
    for index, start in reversed(tuple(enumerate(plan.starts))):
        if tensor.layer >= start:
            path = ("segments", str(index), *tensor.path[1:])
            return dataclasses.replace(tensor, path=path, layer=tensor.layer - start)
    raise AssertionError(tensor)


def _abstract(node, name, *, axis_rules, mesh):
    if isinstance(node, dict):
        return {
            key: _abstract(child, f"{name}/{key}", axis_rules=axis_rules, mesh=mesh)
            for key, child in node.items()
        }
    leaf = name.rpartition("/")[2]
    sharding = shardings.parameter(
        leaf, axis_rules=axis_rules, stacked=name.startswith("layers"), mesh=mesh
    )
    if leaf == "table":
        node = (-(-node[0] // mesh.size) * mesh.size, *node[1:])
    shardings.check_divides(name, node, sharding)
    return jax.ShapeDtypeStruct(node, jnp.float32, sharding=sharding)


def _random_leaf(key, layers, *, leaf, kind, scale):
    """One leaf; `layers` are the numbers along its first dim, None without layers."""
    if kind == "scale":
        return jnp.ones(leaf.shape, leaf.dtype)
    if kind == "bias":
        return jnp.zeros(leaf.shape, leaf.dtype)
    if layers is None:
        return scale * jax.random.normal(key, leaf.shape, leaf.dtype)

    def one(layer):
        own = jax.random.fold_in(key, layer)
        return scale * jax.random.normal(own, leaf.shape[1:], leaf.dtype)

    return jax.vmap(one)(layers)

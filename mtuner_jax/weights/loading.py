"""One array of our tree, filled on its devices from the tensors of a checkpoint."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.weights import sources


def load_leaf(
    source: sources.TensorSource,
    group: Sequence[sources.HfName],
    target: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Reads one array; layers are written one by one into the stacked array.

    Args:
      source: The checkpoint.
      group: The tensors that make up the array: one, or one for each layer.
      target: Shape, dtype and NamedSharding of the array.
    """
    stored = target.sharding
    on_device = _device_memory(target)
    if group[0].layer is None:
        array = _convert(on_device)(_read(source, group[0], on_device))
    else:
        array = _zeros(on_device)
        write = _layer_writer(on_device, transposed=group[0].transposed)
        for name in group:
            assert name.layer is not None, name
            array = write(array, _read(source, name, on_device), np.int32(name.layer))
            array.block_until_ready()  # frees the host copy before the next one
    return array if on_device.sharding == stored else jax.device_put(array, stored)


def _read(
    source: sources.TensorSource, name: sources.HfName, target: jax.ShapeDtypeStruct
) -> jax.Array:
    """Puts one tensor, in Hugging Face layout and file dtype, to its devices."""
    shape, sharding = hf_placement(name, target)
    indices = sharding.addressable_devices_indices_map(shape).values()
    box = _bounding_box([index for index in indices if index is not None], shape)
    stored = tuple(  # at least one row, where this process holds padding only
        slice(min(side.start, size - 1), min(side.stop, size))
        for side, size in zip(box, name.shape, strict=True)
    )
    part = source.read(name.name, stored)

    def shard(index: sources.Box | None) -> np.ndarray:
        assert index is not None
        return _padded_part(part, stored, _explicit(index, shape))

    return jax.make_array_from_callback(shape, sharding, shard)


def _padded_part(
    part: np.ndarray, stored: sources.Box, sides: sources.Box
) -> np.ndarray:
    """Cuts `sides` out of the part `stored`, zero where the file had no rows."""
    starts = [
        side.start - outer.start for side, outer in zip(sides, stored, strict=True)
    ]
    sizes = [side.stop - side.start for side in sides]
    cut = part[tuple(slice(a, a + size) for a, size in zip(starts, sizes, strict=True))]
    if cut.shape == tuple(sizes):
        return np.asarray(cut, order="C")
    padded = np.zeros(sizes, cut.dtype)
    padded[tuple(slice(0, size) for size in cut.shape)] = cut
    return padded


def hf_placement(
    name: sources.HfName, target: jax.ShapeDtypeStruct
) -> tuple[tuple[int, ...], jax.NamedSharding]:
    """Shape and sharding of one tensor in Hugging Face layout, as its target wants."""
    assert isinstance(target.sharding, jax.NamedSharding)
    spec = list(target.sharding.spec) + [None] * len(target.shape)
    pairs = list(zip(target.shape, spec[: len(target.shape)], strict=True))
    if name.layer is not None:
        pairs = pairs[1:]
    if name.transposed:
        pairs = pairs[::-1]
    placed = jax.NamedSharding(
        target.sharding.mesh,
        jax.P(*(axes for _, axes in pairs)),
        memory_kind=target.sharding.memory_kind,
    )
    return tuple(size for size, _ in pairs), placed


def _bounding_box(
    indices: Sequence[sources.Box], shape: tuple[int, ...]
) -> sources.Box:
    sides = [_explicit(index, shape) for index in indices]
    return tuple(
        slice(min(s.start for s in column), max(s.stop for s in column))
        for column in zip(*sides, strict=True)
    )


def _explicit(index: sources.Box, shape: tuple[int, ...]) -> sources.Box:
    return tuple(
        slice(*side.indices(size)[:2]) for side, size in zip(index, shape, strict=True)
    )


def _device_memory(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = target.sharding
    assert isinstance(sharding, jax.NamedSharding), target
    kind = sharding.mesh.devices.flat[0].default_memory().kind
    if sharding.memory_kind in (None, kind):
        return target
    return target.update(sharding=sharding.with_memory_kind(kind))


def _zeros(target: jax.ShapeDtypeStruct) -> jax.Array:
    make = jax.jit(
        lambda: jnp.zeros(target.shape, target.dtype), out_shardings=target.sharding
    )
    return make()


def _convert(target: jax.ShapeDtypeStruct) -> Any:
    return jax.jit(lambda x: x.astype(target.dtype), out_shardings=target.sharding)


def _layer_writer(target: jax.ShapeDtypeStruct, *, transposed: bool) -> Any:
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=target.sharding)
    def write(stacked: jax.Array, tensor: jax.Array, layer: jax.Array) -> jax.Array:
        value = (tensor.T if transposed else tensor).astype(stacked.dtype)
        return jax.lax.dynamic_update_index_in_dim(stacked, value, layer, axis=0)

    return write

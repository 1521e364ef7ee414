"""Dropout whose mask depends on the sample and place, never on shape or device.

An element's fate is a hash of (seed, adapter, module, layer, step) as the key and
(sample id, position, feature) as the counter, so every plan, packing, batch cut and
mesh draws the same mask. The hash is Threefry-2x32 (Salmon et al., SC'11), the
one JAX uses, written with array operations that fuse with their surroundings.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
# Features that share a hash, 16 bits each. They are neighbours: XLA's kernels compute
# four in a thread and LLVM sees that their hash is one, where halves of a row, joined,
# were hashed again for each element.
_LANES, _LANE_BITS = 4, 16
# The fewest that pass BigCrush (Salmon et al.).
_MASK_ROUNDS = 13


class Key(NamedTuple):
    """Two uint32 words: scalars, or [B, T] where each token has a key of its own."""

    high: jax.Array
    low: jax.Array


class Places(NamedTuple):
    """Where each token comes from, both int32 [B, T]."""

    sample_ids: jax.Array
    positions: jax.Array


def key(seed: int) -> Key:
    """The root key of a run."""
    value = seed % 2**64
    return Key(jnp.uint32(value >> 32), jnp.uint32(value & 0xFFFFFFFF))


def fold_in(parent: Key, data: jax.Array | int) -> Key:
    """Derives a key; `data` is an integer or a scalar array."""
    word = jnp.asarray(data, jnp.uint32)
    return Key(*threefry_2x32(parent, jnp.uint32(0x6D74756E), word))


def stable_hash(text: str) -> int:
    """FNV-1a, 32 bits: a name as a number, the same in every process."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def threefry_2x32(
    keys: Key, count_0: jax.Array, count_1: jax.Array, *, rounds: int = 20
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, elementwise over two uint32 counters.

    Args:
      keys: The key, scalars.
      count_0: The counter's first words, uint32 of any shape.
      count_1: Its second words, of a shape that broadcasts with the first.
      rounds: Of mixing.

    Returns:
      Two random uint32 arrays of the counters' shape.
    """
    ks = (keys.high, keys.low, keys.high ^ keys.low ^ jnp.uint32(0x1BD11BDA))
    x_0, x_1 = count_0 + ks[0], count_1 + ks[1]
    for number in range(rounds):
        rotation = _ROTATIONS[number % len(_ROTATIONS)]
        x_0 = x_0 + x_1
        x_1 = (x_1 << rotation) | (x_1 >> (32 - rotation))
        x_1 = x_1 ^ x_0
        block, place = divmod(number, 4)
        if place == 3:
            x_0 = x_0 + ks[(block + 1) % 3]
            x_1 = x_1 + ks[(block + 2) % 3] + jnp.uint32(block + 1)
    return x_0, x_1


def keep_mask(
    keys: Key, places: Places, *, num_features: int, rate: float | jax.Array
) -> jax.Array:
    """Which elements survive; the same ones whatever shares their batch.

    Args:
      keys: The key of adapter, module, layer and step.
      places: Where each token comes from, [B, T].
      num_features: Elements of a token.
      rate: Share that does not survive, at a resolution of 2^-16; a number, or [B, T].

    Returns:
      bool [B, T, num_features], True with probability 1 - rate.
    """
    groups = -(-num_features // _LANES)
    features = jnp.arange(num_features, dtype=jnp.uint32)[None, None, :]
    positions = places.positions.astype(jnp.uint32)[:, :, None]
    count_0 = places.sample_ids.astype(jnp.uint32)[:, :, None]
    count_1 = positions * jnp.uint32(groups) + features // _LANES
    words = Key(*(word[..., None] if word.ndim else word for word in keys))
    first, second = threefry_2x32(words, count_0, count_1, rounds=_MASK_ROUNDS)
    lane = features % _LANES
    word = jnp.where(lane < _LANES // 2, first, second)
    bits = word >> (lane % 2 * _LANE_BITS) & jnp.uint32(2**_LANE_BITS - 1)
    return bits >= _threshold(rate)


def apply(
    x_BTD: jax.Array, keys: Key, places: Places, *, rate: float | jax.Array
) -> jax.Array:
    """Zeroes elements of [B, T, D] at `rate` and scales the rest by 1 / (1 - rate).

    Args:
      keys: The key of adapter, module, layer and step; of all tokens or of each.
      places: Where each token comes from, [B, T].
      rate: A number, or [B, T] in at least float32.
    """
    keep = keep_mask(keys, places, num_features=x_BTD.shape[-1], rate=rate)
    kept = 1.0 - rate
    if isinstance(kept, jax.Array):
        kept = kept.astype(x_BTD.dtype)[:, :, None]
    return jnp.where(keep, x_BTD / kept, jnp.zeros_like(x_BTD))


def _threshold(rate: float | jax.Array) -> jax.Array:
    """Bits below this do not survive, uint32, a scalar or [B, T, 1]."""
    most = 2**_LANE_BITS - 1
    if isinstance(rate, jax.Array):
        wanted = jnp.round(rate * 2**_LANE_BITS).astype(jnp.uint32)
        return jnp.minimum(wanted, jnp.uint32(most))[:, :, None]
    return jnp.uint32(min(round(rate * 2**_LANE_BITS), most))

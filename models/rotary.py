"""Rotary positions: frequencies, the ways in which models stretch them, and angles.

Each scaling is what transformers' `modeling_rope_utils` computes for its `rope_type`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.configs import UserError


class RopeError(UserError):
    """Rotary settings that are not implemented, or not whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are slowed down, short ones left as they are."""

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, inverse_H: jax.Array, theta: float) -> jax.Array:
        """Stretched frequencies, float32 [H / 2]."""
        del theta
        old_length = self.original_max_position_embeddings
        wavelengths = 2.0 * math.pi / inverse_H
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (old_length / wavelengths - low) / (high - low)
        blended = (1.0 - smooth) * inverse_H / self.factor + smooth * inverse_H
        slowed = jnp.where(
            wavelengths > old_length / low, inverse_H / self.factor, inverse_H
        )
        between = (wavelengths <= old_length / low) & (wavelengths >= old_length / high)
        return jnp.where(between, blended, slowed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All positions closer together (Chen et al., 2023)."""

    kind: ClassVar[str] = "linear"
    factor: float

    def frequencies(self, inverse_H: jax.Array, theta: float) -> jax.Array:
        """Stretched frequencies, float32 [H / 2]."""
        del theta
        return inverse_H / jnp.float32(self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK-aware: the longer a document beyond the model's length, the higher the base.

    transformers takes the longest row of a batch for the length; here each document of
    a packed row has the frequencies that it has alone.
    """

    kind: ClassVar[str] = "dynamic"
    factor: float
    max_position_embeddings: int

    def stretch(self, lengths_BT: jax.Array) -> jax.Array:
        """What the base is multiplied by, for documents of these lengths, [B, T]."""
        most = self.max_position_embeddings
        lengths = jnp.maximum(lengths_BT, most).astype(jnp.float32)
        return self.factor * lengths / most - (self.factor - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: as Llama 3's with a linear ramp, and larger scores (Peng et al., 2023).

    Attributes:
      attention_factor: Cosines and sines are multiplied by it.
      truncate: Whether the ramp begins and ends at whole dims.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, inverse_H: jax.Array, theta: float) -> jax.Array:
        """Stretched frequencies, float32 [H / 2]."""
        dims, length = inverse_H.shape[0], self.original_max_position_embeddings
        # The dims whose frequencies turn so many times within the old length.
        low, high = (
            dims * math.log(length / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * dims - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(dims, dtype=np.float32) - low) / (high - low), 0, 1)
        slowed = inverse_H / jnp.float32(self.factor)
        return slowed * np.float32(ramp) + inverse_H * np.float32(1 - ramp)


RopeScaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling


class Angles(NamedTuple):
    """Cosines and sines of a batch's positions, [B, T, H / 2], at least float32."""

    cos_BTH: jax.Array
    sin_BTH: jax.Array


def angles(
    batch: Any, *, head_dim: int, theta: float, scaling: RopeScaling | None
) -> Angles:
    """The angles by which a batch's queries and keys are turned.

    Args:
      batch: `positions` and `segment_ids`, int32 [B, T].
      head_dim: Features of a head (H).
      theta: Base of the frequencies.
      scaling: How they are stretched.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    if isinstance(scaling, DynamicScaling):
        stretch_BT1 = scaling.stretch(_lengths(batch))[:, :, None]
        base = theta * stretch_BT1 ** (head_dim / (head_dim - 2))
        inverse_H = 1.0 / base ** exponents[None, None, :]
    else:
        inverse_H = 1.0 / (jnp.float32(theta) ** exponents)
        if scaling is not None:
            inverse_H = scaling.frequencies(inverse_H, theta)
        inverse_H = inverse_H[None, None, :]
    turned = batch.positions[:, :, None].astype(jnp.float32) * inverse_H
    found = Angles(jnp.cos(turned), jnp.sin(turned))
    if isinstance(scaling, YarnScaling):
        return Angles(*(part * scaling.attention_factor for part in found))
    return found


def _lengths(batch: Any) -> jax.Array:
    """Tokens of the document that each token is in, [B, T]."""

    def of_row(positions_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        most = jax.ops.segment_max(
            positions_T, segments_T, num_segments=len(segments_T) + 1
        )
        return most[segments_T] + 1

    return jax.vmap(of_row)(batch.positions, batch.segment_ids)


def parse(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of a Hugging Face config.

    Both spellings are taken: `rope_theta` + `rope_scaling` (files on the hub) and
    `rope_parameters` (written by transformers 5).

    Raises:
      RopeError: A type that is not implemented, or a figure that is missing.
    """
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise RopeError(f"rope_scaling={given!r} must be an object with rope_type")
    given = dict(given)
    theta = float(given.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in _PARSERS:
        raise RopeError(
            f"rope_type={kind!r} is not implemented; supported: default, "
            f"{', '.join(_PARSERS)}"
        )
    if float(given.get("partial_rotary_factor") or 1.0) != 1.0:
        raise RopeError("partial_rotary_factor other than 1 is not implemented")
    return theta, _PARSERS[kind](given, hf)


def to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """A scaling as `rope_scaling` of a Hugging Face config."""
    fields = dataclasses.asdict(scaling)
    fields.pop("max_position_embeddings", None)  # the config's own
    return {"rope_type": scaling.kind, **fields}


def _llama3(given: dict[str, Any], hf: Mapping[str, Any]) -> Llama3Scaling:
    del hf
    names = [field.name for field in dataclasses.fields(Llama3Scaling)]
    return Llama3Scaling(**_needed(given, "llama3", names))


def _linear(given: dict[str, Any], hf: Mapping[str, Any]) -> LinearScaling:
    del hf
    return LinearScaling(**_needed(given, "linear", ["factor"]))


def _dynamic(given: dict[str, Any], hf: Mapping[str, Any]) -> DynamicScaling:
    return DynamicScaling(
        **_needed(given, "dynamic", ["factor"]),
        max_position_embeddings=hf["max_position_embeddings"],
    )


def _yarn(given: dict[str, Any], hf: Mapping[str, Any]) -> YarnScaling:
    longest = hf["max_position_embeddings"]
    old = given.get("original_max_position_embeddings") or longest
    factor = float(given.get("factor") or longest / old)
    attention = given.get("attention_factor")
    if attention is None:
        both = given.get("mscale"), given.get("mscale_all_dim")
        if all(both):
            attention = _mscale(factor, both[0]) / _mscale(factor, both[1])
        else:
            attention = _mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=old,
        attention_factor=float(attention),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
    )


def _mscale(factor: float, scale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(scale) * math.log(factor) + 1.0


def _needed(given: dict[str, Any], kind: str, names: list[str]) -> dict[str, Any]:
    missing = [name for name in names if given.get(name) is None]
    if missing:
        raise RopeError(f"rope_type {kind!r} lacks {', '.join(missing)}")
    return {name: given[name] for name in names}


_PARSERS: dict[str, Callable[[dict[str, Any], Mapping[str, Any]], RopeScaling]] = {
    "llama3": _llama3,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
}

"""Devices -> mesh: presets, axis names, and which links an axis stands for.

A mesh factorises its devices into axes ordered from the slowest link (`tier0`) to
the fastest. What an axis is for, `Roles` says.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import jax
import numpy as np

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware import boxes

MAX_DEVICES = 1024
AXES = ("tier0", "tier1", "tier2", "tier3", "tier4", "tier5", "tier6", "tier7")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The shape of a mesh before any device is touched.

    Attributes:
      name: Preset or the sizes as the user wrote them.
      sizes: Devices along each axis, slowest link first; no axis of size 1.
      link_names: What connects the devices along each axis.
      hardware: The machine that the preset stands for.
    """

    name: str
    sizes: tuple[int, ...]
    link_names: tuple[str, ...]
    hardware: str

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, slowest link first."""
        return AXES[: len(self.sizes)]

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.sizes)

    def describe(self) -> str:
        """One line for the log."""
        parts = [
            f"{axis}={size} ({link})"
            for axis, size, link in zip(
                self.axes, self.sizes, self.link_names, strict=True
            )
        ]
        return f"mesh {self.name}: {' x '.join(parts) or '1 device'}, {self.hardware}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """What the axes of a mesh are for.

    Attributes:
      data: Axes that split the batch and the frozen weights' rows, and that gradients
        are summed over, slowest link first.
      tensor: Axes that split one layer's product; none so far.
    """

    data: tuple[str, ...]
    tensor: tuple[str, ...] = ()


def roles(mesh: jax.sharding.Mesh) -> Roles:
    """The roles of a mesh's axes: each one splits data."""
    return Roles(data=mesh.axis_names)


PRESETS = {
    name: MeshSpec(
        name=name,
        sizes=box.mesh_sizes,
        link_names=tuple(tier.link for tier in box.tiers),
        hardware=box.title,
    )
    for name, box in boxes.BOXES.items()
    if not box.p2p_disabled
}


def parse(text: str, *, num_devices: int | None = None) -> MeshSpec:
    """Turns `--mesh` into a spec.

    Args:
      text: A preset's name, `auto`, or sizes such as `2x2x2`, slowest link first.
      num_devices: Accelerators found, for `auto`; None or 0 means there are none.

    Raises:
      ConfigError: A name that is no preset and no product of sizes.
    """
    if text == "auto":
        if not num_devices:
            return PRESETS[boxes.WITHOUT_ACCELERATOR]
        sizes = _factors(num_devices)
        return _by_hand(f"auto ({num_devices} devices)", sizes)
    if text in PRESETS:
        return PRESETS[text]
    if re.fullmatch(r"\d+(x\d+)*", text):
        sizes = tuple(int(size) for size in text.split("x"))
        if 0 in sizes or len(sizes) > len(AXES):
            raise ConfigError(f"mesh={text!r}: 1 to {len(AXES)} sizes, each at least 1")
        if math.prod(sizes) > MAX_DEVICES:
            raise ConfigError(
                f"mesh={text!r}: {math.prod(sizes):,} devices; up to {MAX_DEVICES:,} "
                "can be planned for"
            )
        return _by_hand(text, tuple(size for size in sizes if size > 1))
    raise ConfigError(
        f"mesh={text!r} is unknown; use auto, {', '.join(PRESETS)}, or sizes such as "
        "2x2x2 (slowest link first)"
    )


def make(spec: MeshSpec, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Arranges devices, already ordered by closeness, into the mesh.

    One device makes a mesh with a single axis of size 1, so that the same programs
    run on it.

    Raises:
      ConfigError: Fewer devices than the mesh needs.
    """
    if len(devices) < spec.num_devices:
        raise ConfigError(
            f"mesh {spec.name} needs {spec.num_devices} devices, "
            f"{len(devices)} found; choose a smaller mesh or `--mesh auto`"
        )
    sizes, axes = spec.sizes or (1,), spec.axes or AXES[:1]
    grid = np.asarray(devices[: spec.num_devices], dtype=object).reshape(sizes)
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(grid, axes, axis_types=auto)


def _by_hand(name: str, sizes: tuple[int, ...]) -> MeshSpec:
    return MeshSpec(
        name=name,
        sizes=sizes,
        link_names=("given by hand",) * len(sizes),
        hardware="devices as found",
    )


def _factors(number: int) -> tuple[int, ...]:
    sizes, factor = [], 2
    while number > 1:
        while number % factor == 0:
            sizes.append(factor)
            number //= factor
        factor += 1
    return tuple(sorted(sizes, reverse=True))

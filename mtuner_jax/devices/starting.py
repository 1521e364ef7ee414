"""Starts JAX on the devices that a mesh asks for: what every program does first."""

import dataclasses
from typing import Any

import jax

from mtuner_jax.configs import Platform
from mtuner_jax.devices import detection, meshes, platforms


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartedDevices:
    """Devices that JAX has been started on.

    Attributes:
      mesh: The devices, arranged.
      spec: The mesh as it was asked for.
      on_gpu: Whether they are GPUs.
      memory_fraction: Share of a card's memory in XLA's pool; 0 on CPUs.
      lines: What to tell the user: which devices were found, and how they are arranged.
    """

    mesh: jax.sharding.Mesh
    spec: meshes.MeshSpec
    on_gpu: bool
    memory_fraction: float
    lines: tuple[str, str]

    @property
    def device_kind(self) -> str:
        """What JAX calls a device, such as `NVIDIA H200`; `cpu` for virtual ones."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def capability(self) -> float:
        """The GPUs' compute capability, such as 9.0; 0 for virtual devices."""
        device: Any = self.mesh.devices.flat[0]
        return float(device.compute_capability) if self.on_gpu else 0.0

    @property
    def gpu_kind(self) -> str:
        """What JAX calls the GPUs; empty if there are none."""
        return self.device_kind if self.on_gpu else ""


def start(
    mesh: str, platform: Platform, *, deterministic: bool = False
) -> StartedDevices:
    """Prepares the platform, starts JAX and arranges the devices.

    Args:
      mesh: Preset, `auto`, or sizes such as `2x2x2`.
      platform: Where to run; `auto` finds out.
      deterministic: On GPUs, slower kernels that repeat bit for bit.

    Raises:
      ConfigError: An unknown mesh, or devices that are not there.
    """
    found = detection.look()
    on_cpu = bool(platforms.why_cpu(platform, found))
    spec = mesh_spec(mesh, platform, found=found)
    prepared = platforms.prepare(
        platform, spec.num_devices, mesh=spec.name, deterministic=deterministic
    )
    devices = platforms.start(prepared)
    if not on_cpu:
        by_ordinal = sorted(
            devices[: spec.num_devices],
            key=lambda device: device.local_hardware_id or 0,
        )
        detection.require_one_kind([device.device_kind for device in by_ordinal])
    return StartedDevices(
        mesh=meshes.make(spec, devices),
        spec=spec,
        on_gpu=not on_cpu,
        memory_fraction=prepared.memory_fraction,
        lines=(prepared.line, spec.describe()),
    )


def mesh_spec(
    mesh: str, platform: Platform, *, found: detection.Gpus
) -> meshes.MeshSpec:
    """The mesh that `start` would make of what was found; JAX is not started.

    Raises:
      ConfigError: An unknown mesh.
    """
    on_cpu = bool(platforms.why_cpu(platform, found))
    return meshes.parse(mesh, num_devices=0 if on_cpu else found.num_visible)

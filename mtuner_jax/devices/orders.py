"""Devices in an order in which neighbours share the fastest links.

A mesh takes its devices row by row, its last axis along the fastest link. So devices
of one PCIe switch have to stand together, then those of one NUMA node. Where a device
sits is read from NVML (PCI address) and sysfs (NUMA node, path through the bridges).
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Sequence

import jax
import pynvml

SYSFS = pathlib.Path("/sys")
_BRIDGE = re.compile(
    r"pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a device sits.

    Attributes:
      address: PCI address, `0000:65:00.0`.
      numa_node: Node of the CPU its root complex belongs to, -1 if unknown.
      bridges: Root complex and bridges on the way to it, from the CPU outwards.
    """

    address: str
    numa_node: int
    bridges: tuple[str, ...]

    @property
    def switch(self) -> str:
        """The PCIe switch (or root port) shared with neighbours; empty if unknown.

        A switch shows as one bridge up and one bridge down for each device, so the
        last bridge is the device's own and the one before it is the switch.
        """
        return self.bridges[-2] if len(self.bridges) > 2 else "".join(self.bridges[-1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOrder:
    """A permutation of devices and how it came about.

    Attributes:
      permutation: Indices into the devices that were asked about.
      lines: What to log, a line for each device.
    """

    permutation: tuple[int, ...]
    lines: tuple[str, ...]


def device_order(
    devices: Sequence[jax.Device], *, sysfs: pathlib.Path = SYSFS
) -> DeviceOrder:
    """Order of a host's devices by NUMA node, then PCIe switch; CPUs as they are.

    Several hosts: as they are, too. JAX sorts by process, and each host's GPUs are
    in PCI order.
    """
    identity = tuple(range(len(devices)))
    if devices[0].platform != "gpu":
        return DeviceOrder(permutation=identity, lines=())
    if jax.process_count() > 1:
        line = "device order: as JAX counts them, hosts one after the other"
        return DeviceOrder(permutation=identity, lines=(line,))
    try:
        addresses = pci_addresses(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError as error:
        line = f"device order: as CUDA counts them, NVML cannot be asked ({error})"
        return DeviceOrder(permutation=identity, lines=(line,))
    ordinals = [device.local_hardware_id for device in devices]
    if max(ordinals) >= len(addresses):
        line = f"device order: as CUDA counts them, NVML knows {len(addresses)} devices"
        return DeviceOrder(permutation=identity, lines=(line,))
    return order_by_place([place(addresses[i], sysfs=sysfs) for i in ordinals])


def order_by_place(places: Sequence[Place]) -> DeviceOrder:
    """Sorts by NUMA node and path of bridges, which keeps every subtree together."""
    permutation = sorted(
        range(len(places)),
        key=lambda i: (places[i].numa_node, places[i].bridges, places[i].address),
    )
    lines = tuple(
        f"mesh device {position}: CUDA device {index}, {places[index].address}, "
        f"NUMA node {places[index].numa_node}, below {places[index].switch or '?'}"
        for position, index in enumerate(permutation)
    )
    return DeviceOrder(permutation=tuple(permutation), lines=lines)


def place(address: str, *, sysfs: pathlib.Path = SYSFS) -> Place:
    """Reads where the device of a PCI address sits.

    Args:
      address: As NVML writes it (`00000000:65:00.0`) or as sysfs does.
      sysfs: Where sysfs is mounted.
    """
    address = sysfs_address(address)
    folder = sysfs / "bus/pci/devices" / address
    node = folder / "numa_node"
    numa_node = int(node.read_text()) if node.is_file() else -1
    bridges = [part for part in folder.resolve().parts[:-1] if _BRIDGE.fullmatch(part)]
    return Place(address=address, numa_node=numa_node, bridges=tuple(bridges))


def sysfs_address(address: str) -> str:
    """`0000:65:00.0` for NVML's `00000000:65:00.0`."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def pci_addresses(visible: str | None) -> list[str]:
    """PCI addresses by CUDA ordinal, with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
      visible: CUDA_VISIBLE_DEVICES: numbers, or the beginnings of UUIDs; None for all.

    Raises:
      pynvml.NVMLError: The driver cannot be asked.
    """
    pynvml.nvmlInit()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index)
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        buses = [_text(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    return [buses[index] for index in visible_indices(visible, uuids)]


def visible_indices(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Indices of the devices that CUDA_VISIBLE_DEVICES names, in its order.

    As in CUDA, the first name that fits no device ends the list.
    """
    if visible is None:
        return list(range(len(uuids)))
    indices = []
    for name in (name.strip() for name in visible.split(",")):
        if name.isdigit() and int(name) < len(uuids):
            indices.append(int(name))
            continue
        matches = [i for i, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(matches) != 1:
            break
        indices.append(matches[0])
    return indices


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

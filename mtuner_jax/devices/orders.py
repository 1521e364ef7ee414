"""Devices in an order in which neighbours share the fastest links.

A mesh takes its devices row by row, its last axis along the fastest link. So devices
of one PCIe switch have to stand together, then those of one NUMA node. Where a device
sits is read from NVML (PCI address) and sysfs (NUMA node, path through the bridges).
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Sequence

import jax
import pynvml

SYSFS = pathlib.Path("/sys")
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class PciPlace:
    """Where a device sits; the order of places keeps every subtree together.

    Attributes:
      numa_node: Node of the CPU that its root complex belongs to, -1 if unknown.
      bridges: Root complex and bridges on the way to it, from the CPU outwards.
      address: PCI address, `0000:65:00.0`.
    """

    numa_node: int
    bridges: tuple[str, ...]
    address: str

    @property
    def switch(self) -> str:
        """The PCIe switch (or root port) shared with neighbours; empty if unknown.

        A switch shows as one bridge up and one bridge down for each device, so the
        last bridge is the device's own and the one before it is the switch.
        """
        return self.bridges[-2] if len(self.bridges) > 2 else "".join(self.bridges[-1:])


def neighbours_together(
    devices: Sequence[jax.Device], *, sysfs: pathlib.Path = SYSFS
) -> list[jax.Device]:
    """Sorts a host's GPUs by NUMA node, then PCIe switch; logs where each one sits.

    CPUs stay as they are, and so do the devices of several hosts: JAX sorts them by
    process, and each host's GPUs are in PCI order.
    """
    found = list(devices)
    if found[0].platform != "gpu":
        return found
    if jax.process_count() > 1:
        _logger.info("device order: as JAX counts them, hosts one after the other")
        return found
    try:
        addresses = pci_addresses(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError as error:
        _logger.info("device order: as CUDA counts, NVML cannot be asked (%s)", error)
        return found
    ordinals = [device.local_hardware_id for device in found]
    if max(ordinals) >= len(addresses):
        known = len(addresses)
        _logger.info("device order: as CUDA counts, NVML knows %d devices", known)
        return found
    places = [pci_place(addresses[ordinal], sysfs=sysfs) for ordinal in ordinals]
    order = sorted(range(len(places)), key=places.__getitem__)
    for line in lines(places, order):
        _logger.info("%s", line)
    return [found[index] for index in order]


def lines(places: Sequence[PciPlace], order: Sequence[int]) -> list[str]:
    """What to log of devices in an order of theirs, a line for each."""
    return [
        f"mesh device {position}: CUDA device {index}, {places[index].address}, "
        f"NUMA node {places[index].numa_node}, below {places[index].switch or '?'}"
        for position, index in enumerate(order)
    ]


def pci_place(address: str, *, sysfs: pathlib.Path = SYSFS) -> PciPlace:
    """Reads where the device of a PCI address sits.

    Args:
      address: As NVML writes it (`00000000:65:00.0`) or as sysfs does.
      sysfs: Where sysfs is mounted.
    """
    domain, _, rest = address.lower().partition(":")
    address = f"{int(domain, 16):04x}:{rest}"
    folder = sysfs / "bus/pci/devices" / address
    node = folder / "numa_node"
    return PciPlace(
        address=address,
        numa_node=int(node.read_text()) if node.is_file() else -1,
        # /sys/devices/pci0000:00/0000:00:05.0/0000:01:00.0: bridges have colons.
        bridges=tuple(part for part in folder.resolve().parts[:-1] if ":" in part),
    )


def pci_addresses(visible: str | None) -> list[str]:
    """PCI addresses by CUDA ordinal, with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
      visible: CUDA_VISIBLE_DEVICES: numbers, or the beginnings of UUIDs; None for all.

    Raises:
      pynvml.NVMLError: The driver cannot be asked.
    """
    pynvml.nvmlInit()
    try:
        numbers = range(pynvml.nvmlDeviceGetCount())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        buses = [pynvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
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

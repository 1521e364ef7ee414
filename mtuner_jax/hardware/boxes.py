"""Boxes known by name: equal cards and the links between them, a row a box.

A row is a preset of `--hardware` and, under the same name, of `--mesh`.
"""

import dataclasses
from typing import NamedTuple

from mtuner_jax.hardware import cards
from mtuner_jax.hardware.cards import GB, Card, Figure

DEVICES_PER_HOST = 8
# Without an accelerator a run stands in for this box.
WITHOUT_ACCELERATOR = "pcie8"


class LinkTier(NamedTuple):
    """A mesh axis of a box: two devices along it, and what links them.

    Attributes:
      link: What connects the devices.
      bytes_per_s: That a device receives in a gather over this axis and all faster
        ones.
      latency_s: Seconds of a small collective.
    """

    link: str
    bytes_per_s: float
    latency_s: float


# Between two H200 in one JAX program: 64 MiB at 150 GiB/s and 1 GiB at 241 GiB/s are
# 168 us and 276 GB/s; that includes the host's share of a call.
_NVLINK = LinkTier("NVLink", 276 * GB, 100e-6)
_NVLINK_SOURCE = "64 MiB and 1 GiB between two H200, from 417 us and 4.15 ms"
_EIGHT_NVLINK = (
    f"assumed: as measured by JAX between two H200 ({_NVLINK_SOURCE}); NCCL's own "
    "benchmark reaches 360 GB/s over eight H100 (NVIDIA/nccl-tests issue 326)"
)
_THROUGH_HOST = LinkTier("PCIe through the host", 25 * GB, 150e-6)


@dataclasses.dataclass(frozen=True)
class Box:
    """Equal cards and what links them.

    Attributes:
      card: Which card.
      tiers: Mesh axes of two devices each, slowest link first.
      source: Where the links' figures come from.
      p2p_disabled: Whether these are figures under NCCL_P2P_DISABLE=1, of a box that
        has a row without it too; such a row is no mesh preset.
    """

    card: Card
    tiers: tuple[LinkTier, ...] = ()
    source: str = "one card: no link"
    p2p_disabled: bool = False

    @property
    def mesh_sizes(self) -> tuple[int, ...]:
        """Devices along each axis, slowest link first."""
        return (2,) * len(self.tiers)

    @property
    def num_devices(self) -> int:
        """Cards of the box."""
        return 2 ** len(self.tiers)

    @property
    def overlap_slowdown(self) -> Figure[float]:
        """How many times longer computation takes beside a collective."""
        if not self.tiers:
            return Figure(1.0, "one card: no collective")
        return Figure(
            1.1 if _NVLINK in self.tiers else 1.05,
            "assumed: NCCL's kernels take some multiprocessors and memory bandwidth",
        )

    @property
    def title(self) -> str:
        """`8 x L40S-48GB`, for the log."""
        hosts = -(-self.num_devices // DEVICES_PER_HOST)
        cards_of_host = f"{self.num_devices // hosts} x {self.card.title}"
        return f"{hosts} hosts of {cards_of_host}" if hosts > 1 else cards_of_host


def _eight_over_pcie(card: Card, source: str, *links: tuple[float, float]) -> Box:
    """Eight cards below two CPUs with two switches each.

    Args:
      card: Which card.
      source: Where the links' figures come from.
      *links: (GB/s received, latency in us), slowest first.
    """
    names = ("between NUMA domains", "between PCIe switches", "within a PCIe switch")
    tiers = (
        LinkTier(name, rate * GB, latency_us / 1e6)
        for name, (rate, latency_us) in zip(names, links, strict=True)
    )
    return Box(card, tuple(tiers), source)


BOXES: dict[str, Box] = {
    "pcie8": _eight_over_pcie(
        cards.A100_PCIE,
        "reported by the mTuner paper: gathers at ratios 1/8, 1/4, 1/2 reach 16, 26, "
        "40 GB/s; assumed: of output, so that 14, 19.5, 20 GB/s are received (40 "
        "received would exceed PCIe 4.0 x16); assumed: the latencies",
        (14.0, 60),
        (19.5, 50),
        (20.0, 40),
    ),
    "nvlink8": Box(cards.H100_SXM, 3 * (_NVLINK,), _EIGHT_NVLINK),
    "nvlink32": Box(
        cards.H100_SXM,
        (
            LinkTier("between hosts", 160 * GB, 150e-6),
            LinkTier("between hosts", 160 * GB, 130e-6),
            *3 * (_NVLINK,),
        ),
        "between hosts assumed: 8 x 400 Gb/s a host at 46 GB/s each "
        "(NVIDIA/nccl-tests issue 290), of whose sum a gather over all devices "
        f"reaches under a half; within a host {_EIGHT_NVLINK}",
    ),
    "h200x1": Box(cards.H200),
    "h200x2": Box(
        cards.H200,
        (_NVLINK,),
        f"measured on two H200: {_NVLINK_SOURCE}; assumed: 100 us of the 168 us that "
        "both imply are the gather's own",
    ),
    "h200x2-pcie": Box(
        cards.H200,
        (_THROUGH_HOST,),
        "measured on two H200 with NCCL_P2P_DISABLE=1: 25 GB/s from 64 MiB on; 4 and "
        "16 MiB at 10 and 21 GiB/s imply 220 and 70 us, their mean is taken",
        p2p_disabled=True,
    ),
    "h200x8": Box(cards.H200, 3 * (_NVLINK,), _EIGHT_NVLINK),
    "h200x8-pcie": Box(
        cards.H200,
        3 * (_THROUGH_HOST,),
        "assumed: over each axis as measured between two H200 with NCCL_P2P_DISABLE=1 "
        "(h200x2-pcie); eight cards share the host's memory and the link between its "
        "CPUs, so the slower axes may reach less",
        p2p_disabled=True,
    ),
    "l40sx8": _eight_over_pcie(
        cards.L40S,
        "assumed: PCIe 4.0 x16 with peer-to-peer, as in pcie8",
        (14, 60),
        (19, 50),
        (20, 40),
    ),
    "rtx4090x8": _eight_over_pcie(
        cards.RTX_4090,
        "assumed: no peer-to-peer, every byte goes through host memory and, over the "
        "first axis, between two CPUs; all-reduces of 8 bytes took 40 us over eight "
        "cards (NVIDIA/nccl issue 1530)",
        (8, 80),
        (11, 60),
        (16, 40),
    ),
}


def with_axes(least: int, *, device: str = "") -> list[str]:
    """Names of the boxes with so many mesh axes or more, of a card if it is named."""
    return [
        name
        for name, box in BOXES.items()
        if len(box.tiers) >= least and device in ("", box.card.device)
    ]

"""Figures of known cards and boxes, each with its source; data for `hardware`.

Nobody has measured what a source beginning with `assumed:` says; a calibration of the
machine itself (`scripts/calibrate.py`) replaces all of a preset's figures.
"""

import dataclasses

GB = 10**9
GIB = 2**30
RESERVE_BYTES = GIB // 2
_RESERVE = (
    "assumed: XLA's sizes and the allocator's peak agreed to 0.1 GiB in every run on "
    "H200 (docs/benchmarks); the rest is margin"
)
_POOL = "the share that train.py leaves XLA's allocator by default"
_KERNEL = "assumed: the order of a launch on any recent card"
_CURVE = "assumed: fewer tokens reach less, by tiles left idle"
_ELEMENTWISE = "assumed: 85 % of the data sheet's"
_TWO_THIRDS = "assumed: two thirds of the matmul rate"
_GEN4 = "assumed: PCIe 4.0 x16 carries 31.5 GB/s, copies usually reach 22"
_BESIDE = "assumed: NCCL's kernels take some multiprocessors and memory bandwidth"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of one card; fields as in `hardware.Hardware`.

    Attributes:
      device: As JAX names its `device_kind`.
      memory_bytes: Of the card.
      matmul_flops_per_s: ((tokens, rate), ...).
      attention_flops_per_s: Causal, forward and backward.
      memory_bytes_per_s: Reached by elementwise kernels.
      host_bytes_per_s: Each way, pinned.
      sources: By field of `hardware.Hardware`.
    """

    device: str
    memory_bytes: int
    matmul_flops_per_s: tuple[tuple[int, float], ...]
    attention_flops_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    sources: dict[str, str]
    kernel_s: float = 3e-6
    reserve_bytes: int = RESERVE_BYTES
    pool_fraction: float = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """Equal cards and what links them: two devices along each axis.

    Attributes:
      card: Which card.
      links: (received bytes/s, latency in s) by axis, slowest first.
      source: Of the links' figures.
      overlap_slowdown: Of computation beside a collective.
    """

    card: Card
    links: tuple[tuple[float, float], ...] = ()
    source: str = "one card: no link"
    overlap_slowdown: float = 1.0

    @property
    def mesh_sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return (2,) * len(self.links)

    @property
    def overlap_source(self) -> str:
        """Of `overlap_slowdown`."""
        return _BESIDE if self.links else "one card: no collective"


def _matmul(large: float, shares: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    """Rates at 512, 1024, ... tokens as shares of that of large products."""
    return tuple((512 * 2**i, share * large) for i, share in enumerate(shares))


# Few large multiprocessors' worth of tiles at 512 tokens; wide tiles on Hopper.
_HOPPER_CURVE = (0.55, 0.75, 0.88, 0.95, 1.0)
_CURVE_OF_128 = (0.70, 0.85, 0.94, 0.98, 1.0)

A100_PCIE = Card(
    device="NVIDIA A100-PCIE-40GB",
    memory_bytes=42_331_013_120,
    matmul_flops_per_s=_matmul(225e12, _CURVE_OF_128),
    attention_flops_per_s=150e12,
    memory_bytes_per_s=1.32e12,
    host_bytes_per_s=22e9,
    sources={
        "memory_bytes": "XLA's description of the card (inspection/compile_only.py)",
        "matmul_flops_per_s": (
            "assumed: 72 % of the data sheet's 312 TFLOP/s (the PCIe card is held to "
            f"250 W) from 8192 tokens on; {_CURVE}"
        ),
        "attention_flops_per_s": _TWO_THIRDS,
        "memory_bytes_per_s": f"{_ELEMENTWISE} 1,555 GB/s",
        "host_bytes_per_s": _GEN4,
    },
)
H100_SXM = Card(
    device="NVIDIA H100 80GB HBM3",
    memory_bytes=84_942_979_072,
    matmul_flops_per_s=_matmul(740e12, _HOPPER_CURVE),
    attention_flops_per_s=450e12,
    memory_bytes_per_s=2.85e12,
    host_bytes_per_s=48e9,
    sources={
        "memory_bytes": "XLA's description of the card (inspection/compile_only.py)",
        "matmul_flops_per_s": (
            "assumed: 75 % of the data sheet's 989 TFLOP/s from 8192 tokens on (the "
            f"H200, with the same units, was measured at 79 %); {_CURVE}"
        ),
        "attention_flops_per_s": "assumed: 5 % below the H200's measured 472 TFLOP/s",
        "memory_bytes_per_s": f"{_ELEMENTWISE} 3,350 GB/s",
        "host_bytes_per_s": "assumed: as measured on H200, PCIe 5.0 x16 too",
    },
)
H200 = Card(
    device="NVIDIA H200",
    memory_bytes=139 * GIB,
    matmul_flops_per_s=_matmul(786e12, _HOPPER_CURVE),
    attention_flops_per_s=472e12,
    memory_bytes_per_s=4.1e12,
    host_bytes_per_s=48e9,
    sources={
        "memory_bytes": "measured on H200: 139 GiB, rounded down",
        "matmul_flops_per_s": (
            "measured on H200 with jax 0.11.2: 786 TFLOP/s at 8192^3, 772 to 804 on "
            f"layer-like products of 8192 and 32768 tokens; below that {_CURVE}"
        ),
        "attention_flops_per_s": (
            "measured on H200: cuDNN, forward and backward, 4 x 4096 tokens, 32 heads "
            "of 128: 4.08 ms"
        ),
        "memory_bytes_per_s": f"{_ELEMENTWISE} 4,800 GB/s",
        "host_bytes_per_s": "measured on H200: 48 to 50 GB/s each way, reused buffers",
    },
)
L40S = Card(
    device="NVIDIA L40S",
    memory_bytes=44 * GIB,
    matmul_flops_per_s=_matmul(235e12, _CURVE_OF_128),
    attention_flops_per_s=150e12,
    memory_bytes_per_s=0.73e12,
    host_bytes_per_s=22e9,
    sources={
        "memory_bytes": "assumed: 48 GB of the data sheet less error correction",
        "matmul_flops_per_s": (
            "assumed: 65 % of the data sheet's 362 TFLOP/s (held to 350 W) from 8192 "
            f"tokens on; {_CURVE}"
        ),
        "attention_flops_per_s": _TWO_THIRDS,
        "memory_bytes_per_s": f"{_ELEMENTWISE} 864 GB/s",
        "host_bytes_per_s": _GEN4,
    },
)
RTX_4090 = Card(
    device="NVIDIA GeForce RTX 4090",
    memory_bytes=23 * GIB + GIB // 2,
    matmul_flops_per_s=_matmul(150e12, _CURVE_OF_128),
    attention_flops_per_s=110e12,
    memory_bytes_per_s=0.86e12,
    host_bytes_per_s=22e9,
    sources={
        "memory_bytes": "assumed: 24 GiB of the data sheet less the driver's part",
        "matmul_flops_per_s": (
            "assumed: 90 % of the Ada paper's 165 TFLOP/s with float32 sums, from 8192 "
            f"tokens on; {_CURVE}"
        ),
        "attention_flops_per_s": "assumed: three quarters of the matmul rate",
        "memory_bytes_per_s": f"{_ELEMENTWISE} 1,008 GB/s",
        "host_bytes_per_s": _GEN4,
    },
)
# What every card has in common.
SHARED_SOURCES = {
    "pool_fraction": _POOL,
    "reserve_bytes": _RESERVE,
    "kernel_s": _KERNEL,
    "host_memory_bytes": "unknown: boxes differ; nothing is limited by it",
}

# Between two H200 in one JAX program: 64 MiB at 150 GiB/s and 1 GiB at 241 GiB/s are
# 168 us and 276 GB/s; that includes the host's share of a call.
_NVLINK = (276 * GB, 100e-6)
_NVLINK_SOURCE = "64 MiB and 1 GiB between two H200, from 417 us and 4.15 ms"
_EIGHT_NVLINK = (
    f"assumed: as measured by JAX between two H200 ({_NVLINK_SOURCE}); NCCL's own "
    "benchmark reaches 360 GB/s over eight H100 (NVIDIA/nccl-tests issue 326)"
)

_BESIDE_PCIE, _BESIDE_NVLINK = 1.05, 1.1


def _eight_over_nvlink(card: Card) -> Box:
    return Box(
        card=card,
        links=3 * (_NVLINK,),
        source=_EIGHT_NVLINK,
        overlap_slowdown=_BESIDE_NVLINK,
    )


BOXES: dict[str, Box] = {
    "pcie8": Box(
        card=A100_PCIE,
        links=((14.0 * GB, 60e-6), (19.5 * GB, 50e-6), (20.0 * GB, 40e-6)),
        source=(
            "reported by the mTuner paper: gathers at ratios 1/8, 1/4, 1/2 reach 16, "
            "26, 40 GB/s; assumed: of output, so that 14, 19.5, 20 GB/s are received "
            "(40 received would exceed PCIe 4.0 x16); assumed: the latencies"
        ),
        overlap_slowdown=_BESIDE_PCIE,
    ),
    "nvlink8": _eight_over_nvlink(H100_SXM),
    "nvlink32": Box(
        card=H100_SXM,
        links=((160 * GB, 150e-6), (160 * GB, 130e-6), _NVLINK, _NVLINK, _NVLINK),
        source=(
            "between hosts assumed: 8 x 400 Gb/s a host at 46 GB/s each "
            "(NVIDIA/nccl-tests issue 290), of whose sum a gather over all devices "
            f"reaches under a half; within a host {_EIGHT_NVLINK}"
        ),
        overlap_slowdown=_BESIDE_NVLINK,
    ),
    "h200x1": Box(card=H200),
    "h200x2": Box(
        card=H200,
        links=(_NVLINK,),
        source=(
            f"measured on two H200: {_NVLINK_SOURCE}; assumed: 100 us of the "
            "168 us that both imply are the gather's own"
        ),
        overlap_slowdown=_BESIDE_NVLINK,
    ),
    "h200x2-pcie": Box(
        card=H200,
        links=((25 * GB, 150e-6),),
        source=(
            "measured on two H200 with NCCL_P2P_DISABLE=1: 25 GB/s from 64 MiB on; "
            "4 and 16 MiB at 10 and 21 GiB/s imply 220 and 70 us, their mean is taken"
        ),
        overlap_slowdown=_BESIDE_PCIE,
    ),
    "h200x8": _eight_over_nvlink(H200),
    "h200x8-pcie": Box(
        card=H200,
        links=3 * ((25 * GB, 150e-6),),
        source=(
            "assumed: over each axis as measured between two H200 with "
            "NCCL_P2P_DISABLE=1 (h200x2-pcie); eight cards share the host's memory "
            "and the link between its CPUs, so the slower axes may reach less"
        ),
        overlap_slowdown=_BESIDE_PCIE,
    ),
    "l40sx8": Box(
        card=L40S,
        links=((14 * GB, 60e-6), (19 * GB, 50e-6), (20 * GB, 40e-6)),
        source="assumed: PCIe 4.0 x16 with peer-to-peer, as in pcie8",
        overlap_slowdown=_BESIDE_PCIE,
    ),
    "rtx4090x8": Box(
        card=RTX_4090,
        links=((8 * GB, 80e-6), (11 * GB, 60e-6), (16 * GB, 40e-6)),
        source=(
            "assumed: no peer-to-peer, every byte goes through host memory and, over "
            "the first axis, between two CPUs; all-reduces of 8 bytes took 40 us over "
            "eight cards (NVIDIA/nccl issue 1530)"
        ),
        overlap_slowdown=_BESIDE_PCIE,
    ),
}

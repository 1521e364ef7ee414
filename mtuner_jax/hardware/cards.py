"""What is known of each GPU: a row a card, and the source of each figure.

Nobody has measured what a source beginning with `assumed:` says; a calibration of the
machine itself (`scripts/calibrate.py`) replaces the figures of its cards.
"""

import dataclasses
import re
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
GB = 10**9
GIB = 2**30
_CURVE = "assumed: fewer tokens reach less, by tiles left idle"
_ELEMENTWISE = "assumed: 85 % of the data sheet's"
_TWO_THIRDS = "assumed: two thirds of the matmul rate"
_GEN4 = "assumed: PCIe 4.0 x16 carries 31.5 GB/s, copies usually reach 22"
_XLAS_MEMORY = "XLA's description of the card"


class Figure(NamedTuple, Generic[T]):
    """A value, and where it comes from."""

    value: T
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaTarget:
    """What XLA is told to compile for a card that is not there, beside its memory.

    Attributes:
      compute_capability: The major and the minor number.
      num_cores: Streaming multiprocessors.
      fpus_per_core: Float32 units of each.
      threads_per_core: Threads that one holds.
      shared_bytes_per_core: Shared memory of each; a block may ask for all but 1 KiB.
      l2_bytes: Second-level cache.
      clock_ghz: Clock rate.
      memory_bytes_per_s: The data sheet's bandwidth.
      num_nvlinks: Active NVLink links; 0 is PCIe.
    """

    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    threads_per_core: int = 2048
    shared_bytes_per_core: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes_per_s: int
    num_nvlinks: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU that the planner can price; figures as in `machines.Hardware`.

    Attributes:
      pattern: Regular expression found in the names that JAX and NVML give such GPUs.
      peak_flops_per_s: Dense bfloat16 with float32 sums, at the data sheet's boost
        clock. NVIDIA's tables show twice as much, "with sparsity", for most GPUs.
      device: The name that JAX (`device_kind`) and NVML give it.
      title: The name that people give it, with its nominal memory.
      memory_bytes: Device memory.
      matmul_flops_per_s: ((tokens, rate), ...), ascending.
      attention_flops_per_s: Causal attention, forward and backward.
      memory_bytes_per_s: Bandwidth that elementwise kernels reach.
      host_bytes_per_s: Between the card and pinned host memory, each way.
      xla: What XLA is told; None where no step can be compiled without the card.
    """

    pattern: str
    peak_flops_per_s: float
    device: str
    title: str
    memory_bytes: Figure[int]
    matmul_flops_per_s: Figure[tuple[tuple[int, float], ...]]
    attention_flops_per_s: Figure[float]
    memory_bytes_per_s: Figure[float]
    host_bytes_per_s: Figure[float]
    xla: XlaTarget | None = None

    @property
    def figures(self) -> dict[str, Figure[Any]]:
        """All that is known, by field of `machines.Hardware`."""
        own = {k: v for k, v in vars(self).items() if isinstance(v, Figure)}
        return {**COMMON, **own}


# What all cards have in common.
COMMON: dict[str, Figure[Any]] = {
    "pool_fraction": Figure(
        0.75, "the share that train.py leaves XLA's allocator by default"
    ),
    "reserve_bytes": Figure(
        GIB // 2,
        "assumed: XLA's sizes and the allocator's peak agreed to 0.1 GiB in every run "
        "on H200 (docs/benchmarks); the rest is margin",
    ),
    "kernel_s": Figure(3e-6, "assumed: the order of a launch on any recent card"),
    "host_memory_bytes": Figure(0, "unknown: boxes differ; nothing is limited by it"),
}


def _matmul(large: float, shares: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    """Rates at 512, 1024, ... tokens as shares of that of large products."""
    return tuple((512 * 2**i, share * large) for i, share in enumerate(shares))


# Few large multiprocessors' worth of tiles at 512 tokens; wide tiles on Hopper.
_HOPPER_CURVE = (0.55, 0.75, 0.88, 0.95, 1.0)
_CURVE_OF_128 = (0.70, 0.85, 0.94, 0.98, 1.0)

# A100 and Hopper: the specifications that XLA's sources hold. Ada: the architecture
# paper, and XLA's specification of the A6000 for what a multiprocessor has.
_A100 = XlaTarget(
    compute_capability=(8, 0),
    num_cores=108,
    fpus_per_core=64,
    shared_bytes_per_core=167_936,
    l2_bytes=41_943_040,
    clock_ghz=1.41,
    memory_bytes_per_s=1_555_200_000_000,
)
_HOPPER = XlaTarget(
    compute_capability=(9, 0),
    num_cores=132,
    fpus_per_core=128,
    shared_bytes_per_core=233_472,
    l2_bytes=52_428_800,
    clock_ghz=1.98,
    memory_bytes_per_s=3_352_320_000_000,
    num_nvlinks=18,
)
_ADA = XlaTarget(
    compute_capability=(8, 9),
    num_cores=142,
    fpus_per_core=128,
    threads_per_core=1536,
    shared_bytes_per_core=102_400,
    l2_bytes=96 * 2**20,
    clock_ghz=2.52,
    memory_bytes_per_s=864_000_000_000,
)

A100_PCIE = Card(
    pattern=r"\bA100\b",
    peak_flops_per_s=312e12,  # A100 data sheet (2021), PCIe and SXM alike
    device="NVIDIA A100-PCIE-40GB",
    title="A100-PCIe-40GB",
    memory_bytes=Figure(42_331_013_120, _XLAS_MEMORY),
    matmul_flops_per_s=Figure(
        _matmul(225e12, _CURVE_OF_128),
        "assumed: 72 % of the data sheet's 312 TFLOP/s (the PCIe card is held to "
        f"250 W) from 8192 tokens on; {_CURVE}",
    ),
    attention_flops_per_s=Figure(150e12, _TWO_THIRDS),
    memory_bytes_per_s=Figure(1.32e12, f"{_ELEMENTWISE} 1,555 GB/s"),
    host_bytes_per_s=Figure(22e9, _GEN4),
    xla=_A100,
)
H100_SXM = Card(
    pattern=r"\bH100\b",
    peak_flops_per_s=989.4e12,  # H100 data sheet (2023): 1,979 with sparsity
    device="NVIDIA H100 80GB HBM3",
    title="H100-SXM-80GB",
    memory_bytes=Figure(84_942_979_072, _XLAS_MEMORY),
    matmul_flops_per_s=Figure(
        _matmul(740e12, _HOPPER_CURVE),
        "assumed: 75 % of the data sheet's 989 TFLOP/s from 8192 tokens on (the "
        f"H200, with the same units, was measured at 79 %); {_CURVE}",
    ),
    attention_flops_per_s=Figure(
        450e12, "assumed: 5 % below the H200's measured 472 TFLOP/s"
    ),
    memory_bytes_per_s=Figure(2.85e12, f"{_ELEMENTWISE} 3,350 GB/s"),
    host_bytes_per_s=Figure(48e9, "assumed: as measured on H200, PCIe 5.0 x16 too"),
    xla=_HOPPER,
)
H200 = Card(
    pattern=r"\bH200\b",
    peak_flops_per_s=989.4e12,  # H200 data sheet (2024): 1,979 with sparsity
    device="NVIDIA H200",
    title="H200-141GB",
    memory_bytes=Figure(139 * GIB, "measured on H200: 139 GiB, rounded down"),
    matmul_flops_per_s=Figure(
        _matmul(786e12, _HOPPER_CURVE),
        "measured on H200 with jax 0.11.2: 786 TFLOP/s at 8192^3, 772 to 804 on "
        f"layer-like products of 8192 and 32768 tokens; below that {_CURVE}",
    ),
    attention_flops_per_s=Figure(
        472e12,
        "measured on H200: cuDNN, forward and backward, 4 x 4096 tokens, 32 heads "
        "of 128: 4.08 ms",
    ),
    memory_bytes_per_s=Figure(4.1e12, f"{_ELEMENTWISE} 4,800 GB/s"),
    host_bytes_per_s=Figure(
        48e9, "measured on H200: 48 to 50 GB/s each way, reused buffers"
    ),
    xla=dataclasses.replace(_HOPPER, memory_bytes_per_s=4_800_000_000_000),
)
L40S = Card(
    pattern=r"\bL40S\b",
    peak_flops_per_s=362.05e12,  # L40S data sheet (2023)
    device="NVIDIA L40S",
    title="L40S-48GB",
    memory_bytes=Figure(
        44 * GIB, "assumed: 48 GB of the data sheet less error correction"
    ),
    matmul_flops_per_s=Figure(
        _matmul(235e12, _CURVE_OF_128),
        "assumed: 65 % of the data sheet's 362 TFLOP/s (held to 350 W) from 8192 "
        f"tokens on; {_CURVE}",
    ),
    attention_flops_per_s=Figure(150e12, _TWO_THIRDS),
    memory_bytes_per_s=Figure(0.73e12, f"{_ELEMENTWISE} 864 GB/s"),
    host_bytes_per_s=Figure(22e9, _GEN4),
    xla=_ADA,
)
RTX_4090 = Card(
    pattern=r"\bRTX 4090\b(?! (D|Laptop))",
    # Ada GPU architecture paper, appendix A: with float32 accumulation.
    peak_flops_per_s=165.2e12,
    device="NVIDIA GeForce RTX 4090",
    title="RTX 4090-24GB",
    memory_bytes=Figure(
        23 * GIB + GIB // 2, "assumed: 24 GiB of the data sheet less the driver's part"
    ),
    matmul_flops_per_s=Figure(
        _matmul(150e12, _CURVE_OF_128),
        "assumed: 90 % of the Ada paper's 165 TFLOP/s with float32 sums, from 8192 "
        f"tokens on; {_CURVE}",
    ),
    attention_flops_per_s=Figure(110e12, "assumed: three quarters of the matmul rate"),
    memory_bytes_per_s=Figure(0.86e12, f"{_ELEMENTWISE} 1,008 GB/s"),
    host_bytes_per_s=Figure(22e9, _GEN4),
    xla=dataclasses.replace(
        _ADA, num_cores=128, l2_bytes=72 * 2**20, memory_bytes_per_s=1_008_000_000_000
    ),
)
CARDS = (A100_PCIE, H100_SXM, H200, L40S, RTX_4090)
# The first whose pattern is found is meant: variants stand before the plain name.
_PEAKS_FLOPS_PER_S = {
    r"\bH100 NVL\b": 835.5e12,  # 1,671 with sparsity
    r"\bH100 PCIe\b": 756.5e12,  # 1,513 with sparsity
    r"\bH200 NVL\b": 835.5e12,  # 1,671 with sparsity
    **{card.pattern: card.peak_flops_per_s for card in CARDS},
}


def peak_flops_per_s(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device, for MFU.

    Args:
      device_kind: `jax.Device.device_kind`, such as `NVIDIA H100 80GB HBM3`.

    Returns:
      None for a CPU, or a GPU of which no peak is known.
    """
    known = _PEAKS_FLOPS_PER_S.items()
    return next((peak for name, peak in known if re.search(name, device_kind)), None)


def capability(device: str) -> float:
    """A card's compute capability, such as 9.0; 0 for one that is not known.

    Args:
      device: The name that JAX and NVML give it.
    """
    targets = [card.xla for card in CARDS if re.search(card.pattern, device)]
    known = [xla.compute_capability for xla in targets if xla]
    return known[0][0] + known[0][1] / 10 if known else 0.0

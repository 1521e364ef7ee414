"""Peak bfloat16 FLOP/s of GPUs by the name JAX gives them, for MFU.

Dense figures (NVIDIA's tables show twice as much, "with sparsity", for most of them),
float32 accumulation, at the boost clock of the data sheet.
"""

import re

# First match wins. Source: NVIDIA's data sheet or architecture paper of each card.
_PEAKS = (
    # A100 Tensor Core GPU data sheet (2021): 312 TFLOPS, PCIe and SXM alike.
    (re.compile(r"\bA100\b"), 312e12),
    # H100 data sheet (2023): NVL 1,671, PCIe 1,513, SXM 1,979 with sparsity.
    (re.compile(r"\bH100 NVL\b"), 835.5e12),
    (re.compile(r"\bH100 PCIe\b"), 756.5e12),
    (re.compile(r"\bH100\b"), 989.4e12),
    # H200 data sheet (2024): NVL 1,671, SXM 1,979 with sparsity.
    (re.compile(r"\bH200 NVL\b"), 835.5e12),
    (re.compile(r"\bH200\b"), 989.4e12),
    # L40S data sheet (2023): 362.05.
    (re.compile(r"\bL40S\b"), 362.05e12),
    # Ada GPU architecture paper, appendix A: 165.2 with float32 accumulation.
    (re.compile(r"\bRTX 4090\b(?! (D|Laptop))"), 165.2e12),
)


def peak_flops_per_s(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device.

    Args:
      device_kind: `jax.Device.device_kind`, such as `NVIDIA H100 80GB HBM3`.

    Returns:
      None for a CPU, or a card that is not in the table.
    """
    for pattern, peak in _PEAKS:
        if pattern.search(device_kind):
            return peak
    return None

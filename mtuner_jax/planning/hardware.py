"""What a machine can do, in bytes and seconds: presets, and files of measurements."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What a collective costs whose slowest mesh axis is this one.

    Attributes:
      bytes_per_s: That a device receives in a gather: output x (1 - 1 / group) over
        its seconds, for large messages.
      latency_s: Of a small collective.
    """

    bytes_per_s: float
    latency_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine: equal cards and what links them.

    Attributes:
      name: Of the preset or file.
      device: The card, as JAX names its `device_kind`.
      mesh_sizes: Devices along each mesh axis, slowest link first; () is one device.
      links: One per mesh axis.
      memory_bytes: Of a card.
      pool_fraction: Share of it that XLA's allocator takes at start.
      reserve_bytes: Of that pool, left to what XLA does not count: cuDNN's
        workspaces and fragmentation.
      matmul_flops_per_s: ((tokens, rate), ...) of a layer's products by rows of the
        left operand, ascending; interpolated between, constant outside.
      attention_flops_per_s: Of causal attention, counting half of the scores.
      memory_bytes_per_s: Of the card's memory, as elementwise kernels reach it.
      kernel_s: Seconds that each kernel costs beside its work.
      host_bytes_per_s: Between a card and pinned host memory, each way.
      overlap_slowdown: How many times longer computation takes while a collective
        runs beside it.
      sources: {field: where its figure comes from}; `assumed: ...` where nobody
        measured it.
    """

    name: str
    device: str
    mesh_sizes: tuple[int, ...]
    links: tuple[Link, ...]
    memory_bytes: int
    pool_fraction: float
    reserve_bytes: int
    matmul_flops_per_s: tuple[tuple[int, float], ...]
    attention_flops_per_s: float
    memory_bytes_per_s: float
    kernel_s: float
    host_bytes_per_s: float
    overlap_slowdown: float
    sources: dict[str, str]

    @property
    def budget_bytes(self) -> int:
        """Bytes that a compiled step may take on a device."""
        return int(self.memory_bytes * self.pool_fraction) - self.reserve_bytes

"""Where and how calibration measures: sizes, devices, and how a time is taken.

Loops run inside one jitted program where calls would cost as much as the work; the
first calls warm up, the median of the others counts.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtuner_jax.planning.workloads import Workload
from mtuner_jax.protocols.decoders import Decoder

_WARM_UP = 3
# What the sections before found, by field of `machines.Hardware`.
Figures = Mapping[str, Any]


class MeasurementError(RuntimeError):
    """A measurement that cannot be made, or that cannot be true."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large what is timed is.

    Attributes:
      tokens: Rows of the left operand of products, ascending.
      hidden, intermediate: Model width (D) and feed-forward width (F).
      num_heads, head_dim: Attention heads, and the width of each.
      rows: Rows of the attention's batch.
      row_tokens: Tokens in a row, of attention and of the layer.
      gather_bytes: Sizes of the gathers' outputs, ascending.
      host_bytes: Moved to and from the host by each device.
      run_s, repeats: Seconds that a timed run should last, about, and how many runs
        are timed, of which the median is taken.
      expected_flops_per_s, expected_bytes_per_s: About what products and the memory
        reach, to choose the length of loops.
    """

    tokens: tuple[int, ...]
    hidden: int
    intermediate: int
    num_heads: int
    head_dim: int
    rows: int
    row_tokens: int
    gather_bytes: tuple[int, ...]
    host_bytes: int
    run_s: float
    repeats: int
    expected_flops_per_s: float
    expected_bytes_per_s: float


FULL = Sizes(
    tokens=(512, 1024, 2048, 4096, 8192, 16384),
    hidden=4096,
    intermediate=11008,
    num_heads=32,
    head_dim=128,
    rows=2,
    row_tokens=4096,
    gather_bytes=tuple(2**20 * size for size in (1, 4, 16, 64, 256, 1024)),
    host_bytes=256 * 2**20,
    run_s=0.03,
    repeats=5,
    expected_flops_per_s=400e12,
    expected_bytes_per_s=2e12,
)
SMALL = Sizes(
    tokens=(32, 128),
    hidden=64,
    intermediate=128,
    num_heads=4,
    head_dim=16,
    rows=1,
    row_tokens=128,
    gather_bytes=tuple(2**14 * size for size in (1, 16)),
    host_bytes=2**20,
    run_s=0.002,
    repeats=3,
    expected_flops_per_s=2e10,
    expected_bytes_per_s=2e9,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and how it is measured.

    Attributes:
      mesh: All devices, slowest axis first.
      sizes: How large what is timed is.
      model: One decoder layer of the same sizes, on one device.
      workload: That layer and one row, as the planner is told of a model.
      memory_fraction: Share of a GPU's memory in JAX's pool; 0 on CPUs.
    """

    mesh: Mesh
    sizes: Sizes
    model: Decoder
    workload: Workload
    memory_fraction: float = 0.0

    @property
    def device_kind(self) -> str:
        """What JAX calls a device."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def on_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return self.mesh.devices.flat[0].platform == "gpu"

    @property
    def dtype(self) -> Any:
        """bfloat16 on GPUs, float32 on CPUs, as in training."""
        return jnp.bfloat16 if self.on_gpu else jnp.float32

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes with more than one device, slowest first."""
        return tuple(axis for axis, size in self.mesh.shape.items() if size > 1)

    def num_steps(self, expected_s: float) -> int:
        """Length of a loop whose steps are expected to take so long."""
        return min(max(int(self.sizes.run_s / expected_s), 4), 1000)

    def random(
        self, key: int, shape: tuple[int, ...], *, scale: float = 1.0
    ) -> jax.Array:
        """Normal numbers times `scale`; zeros would flatter a card's clock."""
        return _draw(jnp.uint32(key), scale, shape, self.dtype)

    def weights(self, *shapes: tuple[int, int]) -> list[jax.Array]:
        """Random weights whose products are as large as their operands."""
        return [
            self.random(key, shape, scale=shape[0] ** -0.5)
            for key, shape in enumerate(shapes)
        ]

    def call_s(self, function: Callable[..., Any], *args: Any) -> float:
        """Median seconds of a call, results waited for, after three to warm up."""
        times, result = [], None
        for _ in range(_WARM_UP + self.sizes.repeats):
            start = time.perf_counter()
            # Bound to a name: freed only once the next result has its buffer, so that
            # two buffers take turns and none is touched for the first time when timed.
            result = jax.block_until_ready(function(*args))
            times.append(time.perf_counter() - start)
        del result
        return statistics.median(times[_WARM_UP:])

    def looped_s(
        self, step: Callable[[Any, Any], Any], state: Any, constants: Any, *, num: int
    ) -> float:
        """Seconds of `step(state, constants) -> state` in a loop of `num` steps."""

        @jax.jit
        def run(state: Any, constants: Any) -> Any:
            return jax.lax.fori_loop(0, num, lambda _, s: step(s, constants), state)

        return self.call_s(run, state, constants) / num


@dataclasses.dataclass(frozen=True)
class Section:
    """What one section found.

    Attributes:
      figures: What it found, by field of `machines.Hardware`.
      details: Single measurements, for the record.
      error: Why there are no figures; empty if it worked.
      name: The section's name.
      seconds: How long it took.
    """

    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""
    name: str = ""
    seconds: float = 0.0


@functools.partial(jax.jit, static_argnums=(2, 3))
def _draw(
    key: jax.Array, scale: float, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(key), shape)).astype(dtype)

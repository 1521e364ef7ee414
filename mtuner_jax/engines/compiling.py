"""Compiles a step once and says what XLA allocated for it."""

import dataclasses
from typing import Any

import jax

from mtuner_jax.numbers import sizes

_MERGE_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledBytes:
    """XLA's buffer assignment for one device.

    Attributes:
      arguments: Inputs: weights, state, batch.
      outputs: Results that do not reuse a donated input.
      temporaries: Everything that lives within the step, fragmentation included.
    """

    arguments: int
    outputs: int
    temporaries: int

    @property
    def total(self) -> int:
        """Bytes a device needs to run the step."""
        return self.arguments + self.outputs + self.temporaries

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"compiled step: {sizes.gib(self.total)} per device "
            f"({sizes.gib(self.arguments)} inputs, {sizes.gib(self.temporaries)} "
            "temporaries)"
        )


def options(
    *, on_gpu: bool, num_devices: int, merge_gathers: bool = False
) -> dict[str, Any]:
    """XLA options of a training step.

    On GPUs gathers overlap with computation (the latency-hiding scheduler is off by
    default on A100), and XLA does not rematerialise on its own: what is recomputed
    is the plan's decision. The fusion of slices into calls is off: it runs a foreign
    attention kernel a second time to write its result into the saved stack. On one
    GPU so are XLA's own Triton kernels for products, which make an adapter's small
    product a pass of its own where cuBLASLt adds it to the linear's output in place
    (both measured in docs/benchmarks/packed-rows.md). On several that was not
    measured, and it moves the memory of some plans by up to 6 % from what the memory
    model says.

    Args:
      on_gpu: CPUs take none of these options.
      num_devices: Devices of the step.
      merge_gathers: Join the gathers of a layer into one.
    """
    if not on_gpu:
        return {}
    chosen: dict[str, Any] = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_enable_dynamic_slice_fusion": False,
    }
    if num_devices == 1:
        chosen["xla_gpu_enable_triton_gemm"] = False
    if merge_gathers:
        chosen["xla_gpu_all_gather_combine_threshold_bytes"] = _MERGE_BYTES
    return chosen


def compiled_bytes(compiled: jax.stages.Compiled) -> CompiledBytes:
    """Reads XLA's buffer assignment; on CPUs it is 1.1 to 1.7 times too high."""
    stats = compiled.memory_analysis()
    assert stats is not None  # XLA reports it for CPUs and GPUs
    return CompiledBytes(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )

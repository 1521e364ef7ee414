"""Compiles a step for GPUs that are not there, and says what XLA would allocate.

Needs the wheels `jax-cuda12-plugin` and `jax-cuda12-pjrt` of jax's own version
(without their dependencies), no driver and no GPU; cuDNN attention also asks for
`nvidia-cudnn-cu12`, `nvidia-cuda-runtime-cu12` and `nvidia-cuda-nvrtc-cu12`. Nothing
compiled here can run.
"""

import dataclasses
import importlib.util
import os
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh

from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.engines import compiling
from mtuner_jax.engines.elastic import steps
from mtuner_jax.engines.elastic.steps import StepSpec
from mtuner_jax.inspection import hlo_programs
from mtuner_jax.protocols.states import Batch, Params, TrainState
from mtuner_jax.weights import layouts

_DEVICES_PER_HOST = 8
_PLUGIN = "jax_plugins.xla_cuda12"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """What XLA is told about a card.

    Attributes:
      device: The card's name as the driver gives it.
      compute_capability: Its major number.
      num_cores: Streaming multiprocessors.
      fpus_per_core: Float32 units of each.
      shared_bytes_per_core: Shared memory of each.
      shared_bytes_per_block: What one block may ask for.
      l2_bytes: Second-level cache.
      clock_ghz: Clock rate.
      memory_bytes: Device memory.
      memory_bytes_per_s: Its bandwidth.
      num_nvlinks: Active NVLink links; 0 is PCIe.
    """

    device: str
    compute_capability: int
    num_cores: int
    fpus_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    num_nvlinks: int


_A100_40GB = GpuTarget(
    device="NVIDIA A100-PCIE-40GB",
    compute_capability=8,
    num_cores=108,
    fpus_per_core=64,
    shared_bytes_per_core=167_936,
    shared_bytes_per_block=166_912,
    l2_bytes=41_943_040,
    clock_ghz=1.41,
    memory_bytes=42_331_013_120,
    memory_bytes_per_s=1_555_200_000_000,
    num_nvlinks=0,
)
_H100_80GB = GpuTarget(
    device="NVIDIA H100 80GB HBM3",
    compute_capability=9,
    num_cores=132,
    fpus_per_core=128,
    shared_bytes_per_core=233_472,
    shared_bytes_per_block=232_448,
    l2_bytes=52_428_800,
    clock_ghz=1.98,
    memory_bytes=84_942_979_072,
    memory_bytes_per_s=3_352_320_000_000,
    num_nvlinks=18,
)
TARGETS: dict[str, GpuTarget] = {
    "a100-40gb": _A100_40GB,
    "h100-80gb": _H100_80GB,
    "h200": dataclasses.replace(
        _H100_80GB,
        device="NVIDIA H200",
        memory_bytes=151_397_597_184,
        memory_bytes_per_s=4_800_000_000_000,
    ),
}


class StepArguments(NamedTuple):
    """A step's inputs as `jax.ShapeDtypeStruct` with shardings."""

    state: TrainState
    weights: Params
    batch: Batch
    arenas: steps.Arenas


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOnly:
    """A step compiled for a target.

    Attributes:
      allocated: XLA's buffer assignment.
      cudnn_workspace_bytes: To be added to it: what cuDNN attention will ask for when
        a device is present (estimated by `hlo_programs.cudnn_workspace_bytes`).
      hlo: The optimised program in the order it runs.
      compile_s: Seconds that tracing and compilation took.
    """

    allocated: compiling.CompiledBytes
    cudnn_workspace_bytes: int
    hlo: str
    compile_s: float


def target_of(device_kind: str) -> GpuTarget:
    """The target for a card, by the name that JAX gives it.

    Raises:
      ConfigError: Nothing is known of it; names the cards that can be compiled for.
    """
    targets = {target.device.lower(): target for target in TARGETS.values()}
    if device_kind.lower() in targets:
        return targets[device_kind.lower()]
    known = ", ".join(target.device for target in targets.values())
    raise ConfigError(
        f"there is no compile-only target for {device_kind}; there are targets for "
        f"{known}. Choose such a --mesh or --hardware"
    )


def unavailable_reason() -> str:
    """Why this process cannot compile for absent GPUs; empty if it can."""
    if not _found(_PLUGIN):
        version = jax.__version__
        return (
            "the CUDA 12 plugin is not installed; pip install --no-deps "
            f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
        )
    skips = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    platforms = jax.config.jax_platforms or "cuda"  # pyrefly: ignore[missing-attribute]
    if "cuda" in platforms and not skips:
        return (
            "the plugin looks for a CUDA driver in this process; set "
            "JAX_PLATFORMS=cpu or JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"
        )
    return ""


def available() -> bool:
    """Whether this process can compile for absent GPUs."""
    return not unavailable_reason()


def has_cudnn() -> bool:
    """Whether cuDNN attention can be traced: it asks the library for its version."""
    return _found("nvidia.cudnn")


def topology_mesh(target: GpuTarget, sizes: tuple[int, ...]) -> Mesh:
    """A mesh of absent GPUs, arranged as `meshes.make` arranges present ones.

    Args:
      target: The card; hosts have 8 of them.
      sizes: Devices along each axis, slowest link first.

    Raises:
      ConfigError: This process cannot compile for absent GPUs.
    """
    reason = unavailable_reason()
    if reason:
        raise ConfigError(f"no compile-only target: {reason}")
    spec = meshes.parse("x".join(str(size) for size in sizes))
    hosts = -(-spec.num_devices // _DEVICES_PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x{hosts}x{spec.num_devices // hosts}",
        target_config=target_config(target),
    )
    devices = sorted(topology.devices, key=lambda device: device.id)
    return meshes.make(spec, devices)


def abstract_arguments(
    spec: StepSpec,
    optimizer: optax.GradientTransformation,
    *,
    max_length: int,
    dtype: Any,
) -> StepArguments:
    """The inputs of `steps.build_train`, without allocating any.

    Args:
      spec: The step.
      optimizer: Its optimizer.
      max_length: Tokens in a row (T).
      dtype: Of the frozen weights.
    """

    def init():
        adapters = lora.init(spec.adapters, jax.random.key(0))
        return TrainState(adapters, optimizer.init(adapters), jnp.int32(0))

    plan, mesh = spec.plan, spec.mesh

    def rows():
        shape = (plan.accumulation, plan.num_devices * plan.microbatch, max_length)
        fields = {name: jnp.zeros(shape, jnp.int32) for name in Batch._fields}
        return Batch(**{**fields, "weights": jnp.zeros(shape, jnp.float32)})

    arenas = steps.abstract_arenas(spec, max_length=max_length)
    return StepArguments(
        state=jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            jax.eval_shape(init),
            steps.state_shardings(spec, optimizer),
        ),
        weights=layouts.layout(spec.model, plan, mesh, dtype=dtype),
        batch=_placed(jax.eval_shape(rows), steps.rows_sharding(mesh)),
        arenas=arenas,
    )


def compile_train(
    spec: StepSpec,
    optimizer: optax.GradientTransformation,
    *,
    max_length: int,
    dtype: Any = jnp.bfloat16,
) -> CompileOnly:
    """Compiles a training step whose mesh is one of `topology_mesh`.

    Args:
      spec: The step.
      optimizer: Its optimizer.
      max_length: Tokens in a row (T).
      dtype: Of the frozen weights.
    """
    arguments = abstract_arguments(spec, optimizer, max_length=max_length, dtype=dtype)
    step = steps.build_train(
        spec,
        optimizer,
        compiler_options=compiling.options(
            on_gpu=True, merge_gathers=spec.plan.merge_gathers
        ),
    )
    start = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    compile_s = time.perf_counter() - start
    hlo = compiled.as_text()
    return CompileOnly(
        allocated=compiling.compiled_bytes(compiled),
        cudnn_workspace_bytes=hlo_programs.cudnn_workspace_bytes(hlo),
        hlo=hlo,
        compile_s=compile_s,
    )


def target_config(target: GpuTarget) -> str:
    """XLA's GpuTargetConfigProto as text."""
    links = f"device_interconnect_info {{ active_links: {target.num_nvlinks} }}"
    features = "ACCELERATED_FEATURES" if target.compute_capability >= 9 else "NONE"
    return f"""
platform_name: "CUDA"
device_description_str: "{target.device}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{target.device}"
  device_vendor: "NVIDIA Corporation"
  core_count: {target.num_cores}
  fpus_per_core: {target.fpus_per_core}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_bytes_per_core}
  shared_memory_per_block_optin: {target.shared_bytes_per_block}
  l2_cache_size: {target.l2_bytes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {target.memory_bytes}
  memory_bandwidth: {target.memory_bytes_per_s}
  pcie_bandwidth: 34359738368
  device_address_bits: 64
  cuda_compute_capability {{
    major: {target.compute_capability} feature_extension: {features}
  }}
  {links if target.num_nvlinks else ""}
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
"""


def _found(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _placed(tree, sharding):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
    )

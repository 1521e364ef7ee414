"""Compiles a step for GPUs that are not there, and says what XLA would allocate.

Needs the wheels `jax-cuda12-plugin` and `jax-cuda12-pjrt` of jax's own version
(without their dependencies), no driver and no GPU; cuDNN attention also asks for
`nvidia-cudnn-cu12`, `nvidia-cuda-runtime-cu12` and `nvidia-cuda-nvrtc-cu12`. Nothing
compiled here can run.
"""

import contextlib
import dataclasses
import importlib.util
import os
import time
from collections.abc import Iterator

import jax
import optax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.engines import compiling
from mtuner_jax.engines.elastic.engine import ElasticEngine
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.hardware import boxes, cards
from mtuner_jax.hardware.cards import Card
from mtuner_jax.inspection import hlo_programs

_PLUGIN = "jax_plugins.xla_cuda12"


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


def target_of(device_kind: str) -> Card:
    """The card to compile for, by the name that JAX gives it.

    Raises:
      ConfigError: Nothing is known of it; names the cards that can be compiled for.
    """
    targets = {card.device.lower(): card for card in cards.CARDS if card.xla}
    if device_kind.lower() in targets:
        return targets[device_kind.lower()]
    known = ", ".join(card.device for card in targets.values())
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


def topology_mesh(card: Card, sizes: tuple[int, ...]) -> Mesh:
    """A mesh of absent GPUs, arranged as `meshes.make` arranges present ones.

    Args:
      card: One that `target_of` gives.
      sizes: Devices along each axis, slowest link first.

    Raises:
      ConfigError: This process cannot compile for absent GPUs.
    """
    reason = unavailable_reason()
    if reason:
        raise ConfigError(f"no compile-only target: {reason}")
    spec = meshes.parse("x".join(str(size) for size in sizes))
    hosts = -(-spec.num_devices // boxes.DEVICES_PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x{hosts}x{spec.num_devices // hosts}",
        target_config=target_config(card),
    )
    devices = sorted(topology.devices, key=lambda device: device.id)
    return meshes.make(spec, devices)


def compile_train(
    spec: StepSpec, optimizer: optax.GradientTransformation, *, max_length: int
) -> CompileOnly:
    """Compiles a training step whose mesh is one of `topology_mesh`.

    Args:
      spec: The step.
      optimizer: Its optimizer.
      max_length: Tokens in a row (T).
    """
    return compile_engine(
        ElasticEngine(
            spec=spec, optimizer=optimizer, max_length=max_length, load_weights=dict
        )
    )


def compile_engine(engine: ElasticEngine) -> CompileOnly:
    """Compiles the training step of an engine whose mesh is one of `topology_mesh`."""
    start = time.perf_counter()
    with _uncached():
        compiled = engine.compile()
    compile_s = time.perf_counter() - start
    hlo = compiled.as_text() or ""
    return CompileOnly(
        allocated=compiling.compiled_bytes(compiled),
        cudnn_workspace_bytes=hlo_programs.cudnn_workspace_bytes(hlo),
        hlo=hlo,
        compile_s=compile_s,
    )


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Keeps JAX's cache of compiled programs out of it.

    What is compiled for an absent device is written to the cache but can't be read
    back: that needs a client of the device.
    """
    enabled = jax.config.jax_enable_compilation_cache  # pyrefly: ignore
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it asks for the option only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def target_config(card: Card) -> str:
    """XLA's GpuTargetConfigProto as text."""
    xla = card.xla
    assert xla is not None  # `target_of` gives no card without it
    major, minor = xla.compute_capability
    links = f"device_interconnect_info {{ active_links: {xla.num_nvlinks} }}"
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
platform_name: "CUDA"
device_description_str: "{card.device}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{card.device}"
  device_vendor: "NVIDIA Corporation"
  core_count: {xla.num_cores}
  fpus_per_core: {xla.fpus_per_core}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {xla.threads_per_core}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {xla.shared_bytes_per_core}
  shared_memory_per_block_optin: {xla.shared_bytes_per_core - 1024}
  l2_cache_size: {xla.l2_bytes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  clock_rate_ghz: {xla.clock_ghz}
  device_memory_size: {card.memory_bytes.value}
  memory_bandwidth: {xla.memory_bytes_per_s}
  pcie_bandwidth: 34359738368
  device_address_bits: 64
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {features}
  }}
  {links if xla.num_nvlinks else ""}
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
"""


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False

"""Decides where a run executes, before JAX starts.

Once JAX has started, the number of virtual CPU devices, the share of GPU memory and
XLA's flags are fixed; so the GPUs are counted from /dev, /proc and
CUDA_VISIBLE_DEVICES, without JAX. Order of calls: `prepare`, `start`.
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping

import jax

from mtuner_jax import configs
from mtuner_jax.devices import detection, orders
from mtuner_jax.hardware import cards, machines

# The name JAX documents, and the one that newer versions read as well.
_FRACTION_NAMES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# Each one is a thread that computes and memory that only GPUs would have.
MAX_VIRTUAL_DEVICES = 64
_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Where the run executes.

    Attributes:
      platform: CPU or GPU.
      num_devices: Devices that the mesh needs.
      line: What to log.
      memory_fraction: Share of each GPU's memory in JAX's pool, 0 on CPUs.
    """

    platform: configs.Platform
    num_devices: int
    line: str
    memory_fraction: float = 0.0


def why_cpu(platform: configs.Platform, found: detection.Gpus) -> str:
    """Why the run goes to virtual CPU devices; empty if it goes to GPUs.

    `--mesh auto` needs to know this, and `found.num_visible`, to choose its size.
    """
    if platform is configs.Platform.CPU:
        return "platform cpu was asked for"
    if platform is configs.Platform.GPU:
        return ""
    if found.jax_platforms == "cpu":
        return "JAX_PLATFORMS=cpu"
    if not found.num_present:
        return "no accelerator found"
    visible = found.cuda_visible_devices
    if visible is None or found.num_visible:
        return ""
    return detection.hidden_by(visible, found.present)


def decide(
    platform: configs.Platform,
    num_devices: int,
    *,
    found: detection.Gpus,
    mesh: str = "auto",
) -> Prepared:
    """Chooses CPU or GPU; never a silent replacement of one by the other.

    Args:
      platform: What the user asks for.
      num_devices: Devices of the whole mesh.
      found: What `look` returned.
      mesh: The mesh's name, for the line.

    Raises:
      ConfigError: GPUs that JAX cannot use, or too few of them.
    """
    why = why_cpu(platform, found)
    problem = _why_no_gpu(found, num_devices, mesh)
    if why:
        problem = _too_many_virtual(num_devices, mesh)
    if problem:
        raise configs.ConfigError(problem)
    needed = detection.counted(num_devices, "virtual CPU" if why else "NVIDIA")
    line = f"mesh {mesh} runs on {needed}"
    return Prepared(
        platform=configs.Platform.CPU if why else configs.Platform.GPU,
        num_devices=num_devices,
        line=f"{why}: {line}" if why else line,
    )


def prepare(
    platform: configs.Platform,
    num_devices: int,
    *,
    mesh: str = "auto",
    deterministic: bool = False,
) -> Prepared:
    """Decides, and sets JAX and XLA up accordingly; JAX must not have started.

    Args:
      platform: What the user asks for.
      num_devices: Devices of the whole mesh.
      mesh: The mesh's name, for the line.
      deterministic: On GPUs, kernels that repeat bit for bit.

    Raises:
      ConfigError: GPUs that JAX cannot use, too few of them, or JAX has started with
        fewer CPU devices.
    """
    prepared = decide(platform, num_devices, found=detection.look(), mesh=mesh)
    on_gpu = prepared.platform is configs.Platform.GPU
    if on_gpu:
        fraction = prepare_gpu(deterministic=deterministic)
        prepared = dataclasses.replace(prepared, memory_fraction=fraction)
    else:
        prepare_cpu(num_devices)
    if not detection.jax_option("jax_compilation_cache_dir"):
        directory = cache_directory(on_gpu=on_gpu)
        jax.config.update("jax_compilation_cache_dir", str(directory))
    return prepared


def start(prepared: Prepared) -> list[jax.Device]:
    """Starts JAX and returns its devices, neighbours on the links side by side.

    Raises:
      ConfigError: JAX cannot use the GPUs, or finds too few of them.
    """
    on_gpu = prepared.platform is configs.Platform.GPU
    try:
        devices = jax.devices("cuda" if on_gpu else "cpu")
    except RuntimeError as error:
        raise configs.ConfigError(
            f"{detection.unusable(detection.look())}. JAX says: {error}"
        ) from error
    if len(devices) < prepared.num_devices:
        raise configs.ConfigError(
            f"{prepared.num_devices} devices are needed, JAX has {len(devices)}: "
            f"{devices}; choose a smaller --mesh"
        )
    return orders.neighbours_together(devices)


def prepare_gpu(*, deterministic: bool) -> float:
    """Sets up JAX and XLA for GPUs and returns the pool's share of a card's memory.

    What the user's environment sets already stays as it is.
    """
    # CUDA's own order is by speed; NVML and sysfs count in PCI order.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    flags = os.environ.get("XLA_FLAGS", "")
    if deterministic and "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DETERMINISTIC_FLAG}".strip()
    if not detection.jax_option("jax_platforms"):
        # Named explicitly, a CUDA that does not start is an error and not a warning.
        jax.config.update("jax_platforms", "cuda,cpu")
    return _memory_fraction()


def prepare_cpu(num_devices: int) -> None:
    """Makes JAX start with at least as many virtual CPU devices."""
    jax.config.update("jax_platforms", "cpu")
    if detection.jax_option("jax_num_cpu_devices") >= num_devices:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        have = jax.local_device_count()
        if have < num_devices:
            raise configs.ConfigError(
                f"{num_devices} virtual CPU devices are needed, but JAX has already "
                f"started with {have}; set jax_num_cpu_devices={num_devices} before"
            ) from error


def cache_directory(
    *,
    on_gpu: bool,
    environ: Mapping[str, str] = os.environ,
    cpu_info: pathlib.Path = pathlib.Path("/proc/cpuinfo"),
) -> pathlib.Path:
    """Where compiled programs are kept between runs.

    `$MTUNER_CACHE_DIR`, else ~/.cache/mtuner-jax/xla. Programs for CPUs use the
    instructions of the machine that compiled them, so machines that share a home
    folder but not these have a folder each.
    """
    base = machines.user_directory("xla", "MTUNER_CACHE_DIR", environ=environ)
    if on_gpu:
        return base / "gpu"
    flags = ""
    if cpu_info.is_file():
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.startswith("flags")), "")
    return base / f"cpu-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def _why_no_gpu(found: detection.Gpus, num_devices: int, mesh: str) -> str:
    """Why JAX cannot use so many GPUs, which were asked for; empty if it can."""
    visible = found.cuda_visible_devices
    if not found.num_present:
        return (
            "platform=gpu: no NVIDIA device in /dev or /proc/driver/nvidia/gpus; "
            "install the driver, or use --platform cpu"
        )
    if found.jax_platforms == "cpu":
        return (
            "platform=gpu, but JAX_PLATFORMS=cpu in the environment: unset one of them"
        )
    if not found.num_visible:
        where = "this process can open none of them in /dev"
        if visible is not None:
            where = detection.hidden_by(visible, "them")
        return (
            f"{found.present} on this machine, but {where}; start a container "
            "with `--gpus all`, or use --platform cpu"
        )
    if not found.cuda_plugins:
        return detection.unusable(found)
    if found.num_visible < num_devices:
        by = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        return (
            f"mesh {mesh} needs {detection.counted(num_devices, 'NVIDIA')}, "
            f"{found.num_visible} found{by}; choose a smaller --mesh (auto takes all), "
            "or --platform cpu"
        )
    return ""


def _too_many_virtual(num_devices: int, mesh: str) -> str:
    """Why so many virtual devices cannot stand in for GPUs; empty if they can."""
    if num_devices <= MAX_VIRTUAL_DEVICES:
        return ""
    return (
        f"mesh {mesh} needs {num_devices:,} devices, and no more than "
        f"{MAX_VIRTUAL_DEVICES} virtual CPU devices stand in for GPUs; choose a "
        "smaller --mesh, or plan for it with scripts/plan.py"
    )


def _memory_fraction() -> float:
    """Sets the pool's share of the card; the user's value wins."""
    given = [name for name in _FRACTION_NAMES if name in os.environ]
    name = given[0] if given else _FRACTION_NAMES[0]
    text = os.environ.setdefault(name, str(cards.COMMON["pool_fraction"].value))
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction <= 1.0:
        raise configs.ConfigError(f"{name}={text!r} must be a number in (0, 1]")
    return fraction

"""NVIDIA devices and what JAX needs for them, found without starting JAX."""

import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import pynvml

from mtuner_jax.configs import ConfigError

ROOT = pathlib.Path("/")
# What Slurm writes into CUDA_VISIBLE_DEVICES of a job without GPUs.
NO_DEVICE_FILES = "NoDevFiles"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpus:
    """NVIDIA devices of the machine, and what the user's environment asks for.

    Attributes:
      num_present: NVIDIA devices of the machine.
      num_visible: Those that this process can open and CUDA_VISIBLE_DEVICES leaves.
      cuda_plugins: JAX's CUDA plugins that are installed, such as `xla_cuda13`.
      driver_cuda: CUDA version that the driver supports (`13.0`), empty if unknown.
      jax_platforms: JAX_PLATFORMS, empty if not set.
      cuda_visible_devices: CUDA_VISIBLE_DEVICES, None if not set.
    """

    num_present: int = 0
    num_visible: int = 0
    cuda_plugins: tuple[str, ...] = ()
    driver_cuda: str = ""
    jax_platforms: str = ""
    cuda_visible_devices: str | None = None

    @property
    def present(self) -> str:
        """`8 NVIDIA devices`."""
        return counted(self.num_present, "NVIDIA")


def look(*, root: pathlib.Path = ROOT, environ: Mapping[str, str] = os.environ) -> Gpus:
    """Counts NVIDIA devices and reads the environment; JAX is not started.

    Args:
      root: Where dev/ and proc/ are.
      environ: The process's environment.
    """
    in_dev = len(list(root.glob("dev/nvidia[0-9]*")))
    in_proc = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    num_present = max(in_dev, in_proc)
    plugins = importlib.metadata.entry_points(group="jax_plugins").names
    return Gpus(
        num_present=num_present,
        num_visible=_num_visible(in_dev, visible),
        cuda_plugins=tuple(sorted(name for name in plugins if "cuda" in name)),
        driver_cuda=_driver_cuda() if num_present else "",
        jax_platforms=jax_option("jax_platforms") or "",
        cuda_visible_devices=visible,
    )


def jax_option(name: str) -> Any:
    """Value of an option of `jax.config`, which declares none of them statically."""
    return getattr(jax.config, name)


def unusable(found: Gpus) -> str:
    """Why JAX cannot use the GPUs, and what to install."""
    have = ", ".join(found.cuda_plugins) or "no CUDA plugin"
    command = "`pip install 'mtuner-jax[{}]'`".format
    driver = found.driver_cuda
    if driver:
        extra = "cuda13" if float(driver) >= 13 else "cuda12"
        install = f"{command(extra)} (the driver supports CUDA {driver})"
    else:
        both = f"{command('cuda12')} or {command('cuda13')}"
        install = f"{both}, whichever CUDA version nvidia-smi shows"
    return (
        f"{found.present} found, but JAX cannot use them; installed is {have}. "
        f"Install with {install}, or use --platform cpu"
    )


def require_one_kind(kinds: Sequence[str]) -> None:
    """Refuses a mesh of unlike cards: plans and steps are those of equal ones.

    Args:
      kinds: What JAX calls each device of the mesh, by CUDA ordinal.

    Raises:
      ConfigError: More than one kind; says which ordinals are of which.
    """
    by_kind: dict[str, list[str]] = {}
    for ordinal, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(str(ordinal))
    if len(by_kind) > 1:
        found = ", ".join(f"{len(these)} x {kind}" for kind, these in by_kind.items())
        choices = " or ".join(
            f"CUDA_VISIBLE_DEVICES={','.join(these)} ({kind})"
            for kind, these in by_kind.items()
        )
        raise ConfigError(f"the mesh has unlike cards: {found}; choose with {choices}")


def hidden_by(visible: str, present: str) -> str:
    """What a CUDA_VISIBLE_DEVICES that leaves no device does; Slurm's is explained."""
    text = f"CUDA_VISIBLE_DEVICES={visible!r} hides {present}"
    if visible == NO_DEVICE_FILES:
        return f"{text} (Slurm gave this job no GPU; ask for them with --gres=gpu:N)"
    names = [name.strip() for name in visible.split(",")]
    twice = next((name for name in names if name and names.count(name) > 1), "")
    return f"{text} (it names {twice} twice)" if twice else text


def counted(number: int, kind: str) -> str:
    """`8 NVIDIA devices`."""
    return f"{number} {kind} device{'' if number == 1 else 's'}"


def _num_visible(num_in_dev: int, visible: str | None) -> int:
    """How CUDA counts: names up to the first that is no device, none if one repeats.

    Of the parts of a split card (MIG), a process sees one.
    """
    if visible is None:
        return num_in_dev

    def names_one(name: str) -> bool:
        is_uuid = name.startswith(("GPU-", "MIG-"))
        return is_uuid or (name.isdigit() and int(name) < num_in_dev)

    names = (name.strip() for name in visible.split(","))
    devices = list(itertools.takewhile(names_one, names))
    if len(set(devices)) < len(devices):
        return 0
    whole = [name for name in devices if not name.startswith("MIG-")]
    return min(len(whole) or min(len(devices), 1), num_in_dev)


def _driver_cuda() -> str:
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""
    return f"{version // 1000}.{version % 1000 // 10}"

"""NVIDIA devices and what JAX needs for them, found without starting JAX."""

import dataclasses
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import pynvml

ROOT = pathlib.Path("/")


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
        return f"{self.num_present} NVIDIA {devices(self.num_present)}"


def look(*, root: pathlib.Path = ROOT, environ: Mapping[str, str] = os.environ) -> Gpus:
    """Counts NVIDIA devices and reads the environment; JAX is not started.

    Args:
      root: Where dev/ and proc/ are.
      environ: The process's environment.
    """
    in_dev = [
        path
        for path in root.glob("dev/nvidia*")
        if re.fullmatch(r"nvidia\d+", path.name)
    ]
    in_proc = list(root.glob("proc/driver/nvidia/gpus/*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    num_present = max(len(in_dev), len(in_proc))
    return Gpus(
        num_present=num_present,
        num_visible=_num_visible(len(in_dev), visible),
        cuda_plugins=_cuda_plugins(),
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
    driver = f"the driver supports CUDA {found.driver_cuda}"
    major = int(found.driver_cuda.partition(".")[0] or 0)
    extra = "cuda13" if major >= 13 else "cuda12"
    install = f"`pip install 'mtuner-jax[{extra}]'` ({driver})"
    if not found.driver_cuda:
        install = (
            "`pip install 'mtuner-jax[cuda12]'` or `pip install 'mtuner-jax[cuda13]'`, "
            "whichever CUDA version nvidia-smi shows"
        )
    return (
        f"{found.present} found, but JAX "
        f"cannot use them; installed is {have}. Install with {install}, or use "
        "--platform cpu"
    )


def devices(number: int) -> str:
    """`device` or `devices`."""
    return "device" if number == 1 else "devices"


def _num_visible(num_in_dev: int, visible: str | None) -> int:
    """How CUDA counts: names up to the first that is no device."""
    if visible is None:
        return num_in_dev
    count = 0
    for name in visible.split(","):
        name = name.strip()
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < num_in_dev):
            break
        count += 1
    return min(count, num_in_dev)


def _cuda_plugins() -> tuple[str, ...]:
    points = importlib.metadata.entry_points(group="jax_plugins")
    return tuple(sorted({point.name for point in points if "cuda" in point.name}))


def _driver_cuda() -> str:
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""
    return f"{version // 1000}.{version % 1000 // 10}"

"""What a machine can do, in bytes and seconds: presets, and files of measurements."""

import dataclasses
import difflib
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware import boxes, checks

VERSION = 1
DIRECTORY_VARIABLE = "MTUNER_HARDWARE_DIR"
# Without an accelerator a run stands in for this machine, as `--mesh auto` does.
WITHOUT_ACCELERATOR = "pcie8"
_CPU = "cpu"
_DEVICES_PER_HOST = 8
_PINNED_SHARE = 0.8  # the rest is for the processes and the system
_POSITIVE = (
    "memory_bytes",
    "pool_fraction",
    "attention_flops_per_s",
    "memory_bytes_per_s",
    "host_bytes_per_s",
    "overlap_slowdown",
)
_logger = logging.getLogger(__name__)


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

    def __post_init__(self):
        checks.number("link", "bytes_per_s", self.bytes_per_s, least=None)
        checks.number("link", "latency_s", self.latency_s, least=0.0)


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
      attention_flops_per_s: Of causal attention, counting half of the scores, two
        products forward and five backward (cuDNN redoes one).
      memory_bytes_per_s: Of the card's memory, as elementwise kernels reach it.
      kernel_s: Seconds that each kernel costs beside its work.
      host_bytes_per_s: Between a card and pinned host memory, each way.
      overlap_slowdown: How many times longer computation takes while a collective
        runs beside it.
      sources: {field: where its figure comes from}; `assumed: ...` where nobody
        measured it.
      host_memory_bytes: Of a host of up to eight cards; 0 where nobody said, which
        limits nothing.
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
    host_memory_bytes: int = 0

    def __post_init__(self):
        for field in _POSITIVE:
            checks.number(self.name, field, getattr(self, field), least=None)
        for field in ("kernel_s", "reserve_bytes", "host_memory_bytes"):
            checks.number(self.name, field, getattr(self, field), least=0)
        checks.number(self.name, "overlap_slowdown", self.overlap_slowdown, least=1.0)
        checks.links(self.name, self.links, self.mesh_sizes)
        checks.matmul(self.name, self.matmul_flops_per_s)
        if self.pool_fraction > 1.0 or self.budget_bytes <= 0:
            raise ConfigError(
                f"hardware {self.name}: pool_fraction={self.pool_fraction} of "
                f"memory_bytes={self.memory_bytes:,} less "
                f"reserve_bytes={self.reserve_bytes:,} leaves {self.budget_bytes:,}; "
                "a fraction in (0, 1] and a smaller reserve"
            )

    @property
    def num_devices(self) -> int:
        """Cards of the machine."""
        return math.prod(self.mesh_sizes)

    @property
    def budget_bytes(self) -> int:
        """Bytes that a compiled step may take on a device."""
        return int(self.memory_bytes * self.pool_fraction) - self.reserve_bytes

    @property
    def devices_per_host(self) -> int:
        """Cards of the mesh that share a host's memory."""
        return min(self.num_devices, _DEVICES_PER_HOST)

    @property
    def host_budget_bytes(self) -> int:
        """Pinned host bytes that a device may take; 0 for any number."""
        return int(_PINNED_SHARE * self.host_memory_bytes) // self.devices_per_host


def preset(name: str) -> Hardware:
    """A machine that is known by name, without any calibration.

    Raises:
      ConfigError: No such preset; names the nearest and all.
    """
    box = boxes.BOXES.get(name)
    if box is None:
        raise ConfigError(_unknown(name, boxes.BOXES))
    figures: dict[str, Any] = {
        **vars(box.card),
        "links": tuple(
            Link(bytes_per_s=float(rate), latency_s=latency)
            for rate, latency in box.links
        ),
        "sources": {
            **boxes.SHARED_SOURCES,
            **box.card.sources,
            "links": box.source,
            "overlap_slowdown": box.overlap_source,
        },
    }
    return Hardware(
        name=name,
        mesh_sizes=box.mesh_sizes,
        overlap_slowdown=box.overlap_slowdown,
        **figures,
    )


def find(
    name: str = "auto",
    *,
    mesh_sizes: tuple[int, ...],
    mesh: str = "",
    device_kind: str = "",
    directory: pathlib.Path | None = None,
) -> Hardware:
    """Finds a machine's figures and brings them to a mesh.

    Args:
      name: A preset, a calibrated name in `directory`, a JSON file, or `auto`: by the
        GPUs that JAX found, else by the mesh's preset.
      mesh_sizes: Devices along each axis of the mesh, slowest link first.
      mesh: Name of the mesh, for `auto`.
      device_kind: What JAX calls the devices it found; empty if JAX was not asked.
      directory: Of calibrations; `default_directory()` if None.

    Raises:
      ConfigError: Nothing of that name, a file that does not fit, or more mesh axes
        than links are known.
    """
    directory = default_directory() if directory is None else directory
    if name == "auto":
        name = _automatic(mesh_sizes, mesh, device_kind, directory)
    is_file = name.endswith(".json")
    found = read(pathlib.Path(name)) if is_file else _named(name, directory)
    return fitted(found, mesh_sizes)


def fitted(hardware: Hardware, mesh_sizes: tuple[int, ...]) -> Hardware:
    """The same cards in another mesh; links are taken from the slowest on.

    A mesh with fewer axes is thus priced as if it spanned the slow links: right for a
    machine's devices in fewer, larger axes, careful for a part of them.

    Raises:
      ConfigError: The mesh has more axes than links are known.
    """
    sizes = tuple(size for size in mesh_sizes if size > 1)
    if len(sizes) > len(hardware.links):
        known = boxes.BOXES.items()
        enough = {name: box for name, box in known if len(box.links) >= len(sizes)}
        same = [n for n, box in enough.items() if box.card.device == hardware.device]
        text = "x".join(map(str, sizes))
        raise ConfigError(
            f"hardware {hardware.name} describes {len(hardware.links)} links, mesh "
            f"{text} has {len(sizes)} axes; choose another mesh or "
            f"--hardware {' or '.join(same or enough)}, or run scripts/calibrate.py"
        )
    links = hardware.links[: len(sizes)]
    return dataclasses.replace(hardware, mesh_sizes=sizes, links=links)


def name_for(
    device_kind: str, num_devices: int, *, environ: Mapping[str, str] = os.environ
) -> str:
    """What a machine is called: its preset's name, else made of card and count.

    Args:
      device_kind: As JAX names the card.
      num_devices: Cards.
      environ: NCCL_P2P_DISABLE=1 asks for the preset's variant without peer-to-peer.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    name = f"{slug}x{num_devices}"
    for known, box in boxes.BOXES.items():
        same = (box.card.device, math.prod(box.mesh_sizes))
        if same == (device_kind, num_devices) and not known.endswith("-pcie"):
            name = known
    if environ.get("NCCL_P2P_DISABLE") != "1":
        return name
    slow = f"{name}-pcie"
    return slow if slow in boxes.BOXES else name


def default_directory(*, environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Where calibrations are kept: $MTUNER_HARDWARE_DIR, else the user's cache."""
    if environ.get(DIRECTORY_VARIABLE):
        return pathlib.Path(environ[DIRECTORY_VARIABLE])
    cache = environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache, "mtuner-jax/hardware")


def to_json(hardware: Hardware) -> str:
    """Serialises, byte for byte the same for equal figures."""
    content = {"version": VERSION, **dataclasses.asdict(hardware)}
    return json.dumps(content, sort_keys=True, indent=1) + "\n"


def from_json(text: str) -> Hardware:
    """Reads what `to_json` wrote.

    Raises:
      ConfigError: No JSON, another version, fields missing or unknown, or figures
        that cannot be.
    """
    try:
        content: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"hardware: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"hardware: a JSON object, not {type(content).__name__}")
    version = content.pop("version", None)
    if version != VERSION:
        raise ConfigError(
            f"hardware version {version} is not {VERSION}; run scripts/calibrate.py"
        )
    names = {field.name for field in dataclasses.fields(Hardware)}
    optional = {"host_memory_bytes"}  # younger than the version
    for what, wrong in (
        ("misses", names - optional - set(content)),
        ("has", set(content) - names),
    ):
        if wrong:
            raise ConfigError(
                f"hardware: {what} the field {', '.join(sorted(wrong))}; its fields "
                f"are {', '.join(sorted(names))}"
            )
    try:
        figures: dict[str, Any] = {
            **content,
            "mesh_sizes": tuple(content["mesh_sizes"]),
            "links": tuple(Link(**link) for link in content["links"]),
            "matmul_flops_per_s": tuple(map(tuple, content["matmul_flops_per_s"])),
            "sources": {str(field): str(x) for field, x in content["sources"].items()},
        }
        return Hardware(**figures)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"hardware: {error}") from error


def read(path: pathlib.Path) -> Hardware:
    """Reads a file that `write` wrote.

    Raises:
      ConfigError: No such file, or not what `to_json` writes.
    """
    if not path.is_file():
        raise ConfigError(f"hardware={str(path)!r}: no such file")
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write(path: pathlib.Path, hardware: Hardware) -> None:
    """Writes a machine's figures, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(hardware), encoding="utf-8")


def _automatic(mesh_sizes, mesh, device_kind, directory):
    """The name that `auto` stands for; what is not obvious is logged."""
    presets = boxes.BOXES
    num_devices = math.prod(mesh_sizes)
    if device_kind in ("", _CPU):
        chosen = mesh if mesh in presets else WITHOUT_ACCELERATOR
        _logger.info("hardware %s: no GPU was asked for its figures", chosen)
        return chosen
    name = name_for(device_kind, num_devices)
    if name in presets or _file(directory, name).is_file():
        return name
    larger = [
        (math.prod(box.mesh_sizes), known)
        for known, box in presets.items()
        if box.card.device == device_kind and len(box.links) >= len(mesh_sizes)
    ]
    chosen = min(larger)[1] if larger else mesh
    if chosen not in presets:
        raise ConfigError(
            f"hardware=auto: nothing is known of {num_devices} x {device_kind}; run "
            f"scripts/calibrate.py, or give --hardware {', '.join(presets)} or a file"
        )
    _logger.warning(
        "hardware: %d x %s is not known, figures are those of %s; scripts/calibrate.py "
        "measures this machine",
        num_devices,
        device_kind,
        chosen,
    )
    return chosen


def _named(name, directory):
    """A calibration if there is one that may stand for the name, else the preset."""
    path = _file(directory, name)
    known = boxes.BOXES.get(name)
    if not path.is_file():
        if known is None:
            calibrated = (file.stem for file in directory.glob("*.json"))
            usable = (stem for stem in calibrated if not stem.endswith(".raw"))
            raise ConfigError(_unknown(name, [*boxes.BOXES, *usable]))
        return preset(name)
    measured = read(path)
    if known is None or measured.device == known.card.device:
        _logger.info("hardware %s: calibrated figures from %s", name, path)
        return measured
    _logger.warning(
        "hardware %s: %s is ignored, it describes %s and not %s",
        name,
        path,
        measured.device,
        known.card.device,
    )
    return preset(name)


def _file(directory, name):
    return directory / f"{name}.json"


def _unknown(name, known):
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return (
        f"hardware={name!r} is unknown{hint}; use auto, {', '.join(names)}, or a .json "
        "file of scripts/calibrate.py"
    )

"""What a machine can do, in bytes and seconds: presets, and files of measurements."""

import dataclasses
import difflib
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware import boxes
from mtuner_jax.hardware.cards import Figure
from mtuner_jax.numbers import records

FORMAT = records.Format(what="hardware", version=1, again="run scripts/calibrate.py")
DIRECTORY_VARIABLE = "MTUNER_HARDWARE_DIR"
_PINNED_SHARE = 0.8  # the rest is for the processes and the system
# Numbers have to be above 0, or from these on.
_LEAST = {
    "kernel_s": 0,
    "latency_s": 0,
    "reserve_bytes": 0,
    "host_memory_bytes": 0,
    "overlap_slowdown": 1,
}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What a collective costs whose slowest mesh axis is this one.

    Attributes:
      bytes_per_s: What a device receives in a gather, output x (1 - 1 / group), over
        the gather's seconds, for large messages.
      latency_s: Seconds of a small collective.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self):
        _check_numbers("link", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine: equal cards and what links them.

    Attributes:
      name: The preset's or the file's name.
      device: The card, as JAX names its `device_kind`.
      mesh_sizes: Devices along each mesh axis, slowest link first; () is one device.
      links: One link per mesh axis.
      memory_bytes: A card's memory.
      pool_fraction: Share of it that XLA's allocator takes at start.
      reserve_bytes: Part of that pool left to what XLA does not count: cuDNN's
        workspaces and fragmentation.
      matmul_flops_per_s: ((tokens, rate), ...) of a layer's products by rows of the
        left operand, ascending; interpolated between, constant outside.
      attention_flops_per_s: Rate of causal attention, counting half of the scores,
        two products forward and five backward (cuDNN redoes one).
      memory_bytes_per_s: Bandwidth of the card's memory that elementwise kernels reach.
      kernel_s: Seconds that each kernel costs beside its work.
      host_bytes_per_s: Bandwidth between a card and pinned host memory, each way.
      overlap_slowdown: How many times longer computation takes while a collective
        runs beside it.
      sources: {field: where its figure comes from}; `assumed: ...` where nobody
        measured it.
      host_memory_bytes: Memory of a host of up to eight cards; 0 where nobody said,
        which limits nothing.
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
        _check_numbers(self.name, self)
        if len(self.links) != len(self.mesh_sizes) or min((1, *self.mesh_sizes)) < 1:
            raise ConfigError(
                f"hardware {self.name}: {len(self.links)} links, "
                f"mesh_sizes={self.mesh_sizes}; one link per axis, sizes from 1 on"
            )
        tokens = [count for count, _ in self.matmul_flops_per_s]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ConfigError(
                f"hardware {self.name}: matmul_flops_per_s at tokens {tokens}; one "
                "pair or more, tokens ascending from 1 on"
            )
        for count, rate in self.matmul_flops_per_s:
            _check(self.name, f"rate at {count} tokens", rate)
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
        return min(self.num_devices, boxes.DEVICES_PER_HOST)

    @property
    def host_budget_bytes(self) -> int:
        """Pinned host bytes that a device may take; 0 for any number."""
        return int(_PINNED_SHARE * self.host_memory_bytes) // self.devices_per_host


FIGURES = tuple(
    field.name
    for field in dataclasses.fields(Hardware)
    if field.name not in ("name", "device", "mesh_sizes", "sources")
)


def preset(name: str, *, calibrated: Iterable[str] = ()) -> Hardware:
    """A machine that is known by name, without any calibration.

    Args:
      name: Its name.
      calibrated: Other names that the user could have meant.

    Raises:
      ConfigError: No such preset; names the nearest and all.
    """
    box = boxes.BOXES.get(name)
    if box is None:
        names = sorted([*boxes.BOXES, *calibrated])
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(
            f"hardware={name!r} is unknown{hint}; use auto, {', '.join(names)}, or a "
            ".json file of scripts/calibrate.py"
        )
    links = (
        Link(bytes_per_s=float(tier.bytes_per_s), latency_s=tier.latency_s)
        for tier in box.tiers
    )
    figures: dict[str, Figure[Any]] = {
        **box.card.figures,
        "links": Figure(tuple(links), box.source),
        "overlap_slowdown": box.overlap_slowdown,
    }
    return Hardware(
        name=name,
        device=box.card.device,
        mesh_sizes=box.mesh_sizes,
        sources={field: known.source for field, known in figures.items()},
        **{field: known.value for field, known in figures.items()},
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
      directory: Where calibrations lie; `default_directory()` if None.

    Raises:
      ConfigError: Nothing of that name, a file that does not fit, or more mesh axes
        than links are known.
    """
    directory = directory or default_directory()
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
        enough = boxes.with_axes(len(sizes))
        same = boxes.with_axes(len(sizes), device=hardware.device)
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
      num_devices: How many cards there are.
      environ: NCCL_P2P_DISABLE=1 asks for the preset's variant without peer-to-peer.
    """
    disabled = environ.get("NCCL_P2P_DISABLE") == "1"
    known = {
        (box.card.device, box.num_devices, box.p2p_disabled): name
        for name, box in boxes.BOXES.items()
    }
    for wanted in (disabled, False):
        if (device_kind, num_devices, wanted) in known:
            return known[device_kind, num_devices, wanted]
    slug = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return f"{slug}x{num_devices}"


def default_directory(*, environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Where calibrations are kept: $MTUNER_HARDWARE_DIR, else the user's cache."""
    return user_directory("hardware", DIRECTORY_VARIABLE, environ=environ)


def user_directory(
    part: str, variable: str, *, environ: Mapping[str, str] = os.environ
) -> pathlib.Path:
    """The folder that the environment's `variable` names, else `part` of our cache."""
    if environ.get(variable):
        return pathlib.Path(environ[variable])
    cache = environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache, "mtuner-jax", part)


def read(path: pathlib.Path) -> Hardware:
    """Reads a file that `write` wrote.

    Raises:
      ConfigError: No such file, no JSON, another version, fields missing or unknown,
        or figures that cannot be; it names the file.
    """
    if not path.is_file():
        raise ConfigError(f"hardware={str(path)!r}: no such file")
    try:
        return FORMAT.from_json(path.read_text(encoding="utf-8"), Hardware)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write(path: pathlib.Path, hardware: Hardware) -> None:
    """Writes a machine's figures, byte for byte the same for equal ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FORMAT.to_json(hardware), encoding="utf-8")


def _automatic(
    mesh_sizes: tuple[int, ...], mesh: str, device_kind: str, directory: pathlib.Path
) -> str:
    """The name that `auto` stands for; what is not obvious is logged."""
    num_devices = math.prod(mesh_sizes)
    if device_kind in ("", "cpu"):
        chosen = mesh if mesh in boxes.BOXES else boxes.WITHOUT_ACCELERATOR
        _logger.info("hardware %s: no GPU was asked for its figures", chosen)
        return chosen
    name = name_for(device_kind, num_devices)
    if name in boxes.BOXES or (directory / f"{name}.json").is_file():
        return name
    larger = boxes.with_axes(len(mesh_sizes), device=device_kind)
    chosen = min(
        larger,
        key=lambda known: (boxes.BOXES[known].num_devices, known),
        default=mesh,
    )
    if chosen not in boxes.BOXES:
        raise ConfigError(
            f"hardware=auto: nothing is known of {num_devices} x {device_kind}; run "
            f"scripts/calibrate.py, or give --hardware {', '.join(boxes.BOXES)} or a "
            "file"
        )
    text = (
        "hardware: %d x %s is not known, figures are those of %s; scripts/calibrate.py "
        "measures this machine"
    )
    _logger.warning(text, num_devices, device_kind, chosen)
    return chosen


def _named(name: str, directory: pathlib.Path) -> Hardware:
    """A calibration if there is one that may stand for the name, else the preset."""
    path = directory / f"{name}.json"
    if not path.is_file():
        stems = (file.stem for file in directory.glob("*.json"))
        usable = (stem for stem in stems if not stem.endswith(".raw"))
        return preset(name, calibrated=usable)
    measured = read(path)
    card = boxes.BOXES[name].card.device if name in boxes.BOXES else measured.device
    if measured.device == card:
        _logger.info("hardware %s: calibrated figures from %s", name, path)
        return measured
    text = "hardware %s: %s is ignored, it describes %s and not %s"
    _logger.warning(text, name, path, measured.device, card)
    return preset(name)


def _check(name: str, field: str, value: float) -> None:
    """Refuses what is not finite, or not above 0, or below the field's own least."""
    least = _LEAST.get(field)
    good = value > 0 if least is None else value >= least
    if not good or not math.isfinite(value):
        bound = "above 0" if least is None else f"at least {least:g}"
        raise ConfigError(f"hardware {name}: {field}={value!r} must be {bound}")


def _check_numbers(name: str, record: Link | Hardware) -> None:
    for field, value in vars(record).items():
        if isinstance(value, int | float):
            _check(name, field, value)

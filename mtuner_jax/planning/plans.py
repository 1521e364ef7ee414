"""The plan: what each layer holds when, and how the batch is cut. Data, no JAX.

A plan is what the engine executes. A *segment* is a run of consecutive layers with
the same treatment, one loop each.
"""

import dataclasses
import enum
import json
import math
import pathlib
from typing import Any

from mtuner_jax.configs import ConfigError

VERSION = 1


class Saved(enum.StrEnum):
    """What a layer keeps from its forward to its backward pass; the rest is redone."""

    LAYER_INPUT = "layer_input"
    ATTENTION_AND_GATES = "attention_and_gates"


SAVED_TENSORS: dict[Saved, tuple[str, ...]] = {
    Saved.LAYER_INPUT: (),
    Saved.ATTENTION_AND_GATES: (
        "query",
        "key",
        "value",
        "attention",
        "gate",
        "up",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """Consecutive layers with one treatment.

    Attributes:
      num_layers: Layers in the segment.
      rest_axes: Mesh axes, slowest first, over which a weight is always held: 0
        keeps one shard of all devices' shards, all axes keep the whole weight.
      saved: What is kept for the backward pass beside the layer's input.
    """

    num_layers: int
    rest_axes: int = 0
    saved: Saved = Saved.LAYER_INPUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One optimizer step, cut into pieces.

    Attributes:
      mesh_sizes: Devices along each mesh axis, slowest link first.
      segments: Layers from the first to the last.
      microbatch: Rows a device runs at once.
      accumulation: Microbatches a device runs in a step, one after the other.
    """

    mesh_sizes: tuple[int, ...]
    segments: tuple[SegmentPlan, ...]
    microbatch: int
    accumulation: int

    def __post_init__(self):
        if not self.segments:
            raise ConfigError("plan: no segments")
        for name in ("microbatch", "accumulation"):
            _require_integer(name, getattr(self, name))
        for size in self.mesh_sizes:
            _require_integer("mesh_sizes", size)
        for index, segment in enumerate(self.segments):
            _require_integer("num_layers", segment.num_layers)
            _require_integer("rest_axes", segment.rest_axes)
            if segment.num_layers < 1:
                raise ConfigError(
                    f"plan: segment {index} has num_layers={segment.num_layers}; "
                    "at least 1"
                )
            if not 0 <= segment.rest_axes <= len(self.mesh_sizes):
                raise ConfigError(
                    f"plan: segment {index} has rest_axes={segment.rest_axes}; the "
                    f"mesh has {len(self.mesh_sizes)} axes"
                )
        for name in ("microbatch", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"plan: {name}={getattr(self, name)}; at least 1")

    @property
    def num_layers(self) -> int:
        """Layers of all segments."""
        return sum(segment.num_layers for segment in self.segments)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh_sizes)

    @property
    def rows(self) -> int:
        """Rows a step can take; a smaller global batch is padded to it."""
        return self.num_devices * self.microbatch * self.accumulation

    @property
    def starts(self) -> tuple[int, ...]:
        """First layer of each segment."""
        counts = [segment.num_layers for segment in self.segments]
        return tuple(sum(counts[:index]) for index in range(len(counts)))


def static(
    *,
    name: str,
    num_layers: int,
    mesh_sizes: tuple[int, ...],
    rows: tuple[int, int],
    saved: Saved = Saved.LAYER_INPUT,
) -> Plan:
    """The plans that need no planner.

    Args:
      name: `fsdp` (weights sharded over all devices, nothing kept) or `replicated`.
      num_layers: Layers of the model.
      mesh_sizes: Devices along each mesh axis.
      rows: (microbatch, accumulation).
      saved: What every layer keeps for its backward pass.
    """
    if name not in ("fsdp", "replicated"):
        raise ConfigError(f"plan={name!r} is unknown; use fsdp, replicated or a file")
    rest = len(mesh_sizes) if name == "replicated" else 0
    segment = SegmentPlan(num_layers=num_layers, rest_axes=rest, saved=saved)
    return Plan(
        mesh_sizes=mesh_sizes,
        segments=(segment,),
        microbatch=rows[0],
        accumulation=rows[1],
    )


def to_json(plan: Plan) -> str:
    """Serialises a plan, byte for byte the same for equal plans."""
    content = {"version": VERSION, **dataclasses.asdict(plan)}
    return json.dumps(content, sort_keys=True, indent=1) + "\n"


def from_json(text: str) -> Plan:
    """Reads what `to_json` wrote.

    Raises:
      ConfigError: No JSON, another version, or a field that is missing, unknown or
        of another type.
    """
    try:
        content: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"plan: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"plan: a JSON object, not {type(content).__name__}")
    version = content.pop("version", None)
    if version != VERSION:
        raise ConfigError(f"plan version {version} is not {VERSION}; plan again")
    try:
        segments = tuple(_segment(**entry) for entry in content.pop("segments"))
        mesh_sizes = tuple(content.pop("mesh_sizes"))
        return Plan(segments=segments, mesh_sizes=mesh_sizes, **content)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"plan: {error}") from error


def read(path: pathlib.Path) -> Plan:
    """Reads a plan's file."""
    return from_json(path.read_text())


def _segment(*, saved: str, **sizes: int) -> SegmentPlan:
    if saved not in list(Saved):
        raise ConfigError(f"plan: saved={saved!r}; one of {', '.join(Saved)}")
    return SegmentPlan(saved=Saved(saved), **sizes)


def _require_integer(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"plan: {name}={value!r} is not an integer")

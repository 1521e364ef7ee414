"""The plan: what each layer holds when, and how the batch is cut. Data, no JAX.

A plan is what the engine executes. A *segment* is a run of consecutive layers with
the same treatment, one loop each. Ratios are numbers of mesh axes, slowest first: on
a mesh of 2 x 2 x 2, a weight held over 0, 1, 2, 3 axes is held to 1/8, 1/4, 1/2, 1.
"""

import dataclasses
import enum
import pathlib
from typing import Any

from mtuner_jax.configs import ConfigError
from mtuner_jax.numbers.records import Format
from mtuner_jax.planning.axes import Axes

FORMAT = Format(what="plan", version=2, again="plan again")


class Saved(enum.StrEnum):
    """What a layer keeps from its forward to its backward pass; the rest is redone.

    LINEARS keeps every input and output of a linear that the backward pass reads, so
    that no matrix product is done twice. ATTENTION_AND_GATES redoes one, o_proj;
    ATTENTION all but attention itself; LAYER_INPUT everything, also when the input
    waits in pinned host memory.
    """

    LINEARS = "linears"
    ATTENTION_AND_GATES = "attention_and_gates"
    ATTENTION = "attention"
    LAYER_INPUT = "layer_input"
    LAYER_INPUT_ON_HOST = "layer_input_on_host"


_ATTENTION_AND_GATES = ("query", "key", "value", "attention", "gate", "up")
SAVED_TENSORS: dict[Saved, tuple[str, ...]] = {
    Saved.LINEARS: (
        *_ATTENTION_AND_GATES,
        "attention_input",
        "residual",
        "mlp_input",
        "hidden",
    ),
    Saved.ATTENTION_AND_GATES: _ATTENTION_AND_GATES,
    Saved.ATTENTION: ("query", "key", "value", "attention"),
    Saved.LAYER_INPUT: (),
    Saved.LAYER_INPUT_ON_HOST: (),
}
# What of it waits in pinned host memory; the layer's input is kept in any case.
ON_HOST: dict[Saved, tuple[str, ...]] = {Saved.LAYER_INPUT_ON_HOST: ("layer_input",)}


class Table(enum.StrEnum):
    """How a vocabulary table is held and used.

    GATHERED is split over all devices and gathered where it is used. SPLIT is never
    gathered: rows are looked up, or logits computed, by the device that holds them.
    RESIDENT is whole on every device.
    """

    GATHERED = "gathered"
    SPLIT = "split"
    RESIDENT = "resident"


class AdapterState(enum.StrEnum):
    """Whether adapters and moments are whole on each device or split over all."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """Consecutive layers with one treatment.

    Attributes:
      num_layers: Layers in the segment.
      rest_axes: Mesh axes over which a weight is always held.
      fwd_keep_axes: Axes over which the copy is held that stays from a layer's
        forward to its backward pass; `rest_axes` keeps none.
      bwd_keep_axes: Axes over which the copy is held that stays from a layer's
        backward pass to the next forward pass, of the
        next microbatch or step.
      saved: What is kept for the backward pass beside the layer's input.
      prefetch: Gather the next layer's weights while a layer runs.
    """

    num_layers: int
    rest_axes: int = 0
    fwd_keep_axes: int = 0
    bwd_keep_axes: int = 0
    saved: Saved = Saved.LAYER_INPUT
    prefetch: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepChoices:
    """How a step is cut and what it holds beside its layers: a plan without segments.

    Attributes:
      mesh_sizes: Devices along each mesh axis, slowest link first.
      microbatch: Rows a device runs at once.
      accumulation: Microbatches a device runs in a step, one after the other.
      tail_chunks: Parts of a microbatch in the tail; 1 without a tail.
      embedding: The input table.
      head: The output table.
      adapters: Where adapters and moments are.
      merge_gathers: Let one collective gather all weights of a layer.
    """

    mesh_sizes: tuple[int, ...]
    microbatch: int
    accumulation: int
    tail_chunks: int = 1
    embedding: Table = Table.GATHERED
    head: Table = Table.GATHERED
    adapters: AdapterState = AdapterState.REPLICATED
    merge_gathers: bool = False

    @property
    def axes(self) -> Axes:
        """The mesh's axes by role."""
        return Axes(data=self.mesh_sizes)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.axes.num_devices

    @property
    def rows(self) -> int:
        """Rows a step can take; a smaller global batch is padded to it."""
        return self.num_devices * self.microbatch * self.accumulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(StepChoices):
    """One optimizer step, cut into pieces: the step's choices and its layers.

    Attributes:
      segments: Layers from the first to the last.
      tail_layers: Last layers that run forward, loss and backward on part of the
        microbatch at a time; whole segments.
      weight_dtype: Stored dtype of the frozen weights.
      model: Shape of the model it is for, as `workloads.Workload.shape_name` says it;
        empty fits any model of so many layers.
    """

    segments: tuple[SegmentPlan, ...]
    tail_layers: int = 0
    weight_dtype: str = "bfloat16"
    model: str = ""

    def __post_init__(self):
        if not self.segments:
            raise ConfigError("plan: no segments")
        for index, segment in enumerate(self.segments):
            _check_segment(segment, index, len(self.mesh_sizes))
        for name in ("microbatch", "accumulation", "tail_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"plan: {name}={getattr(self, name)}; at least 1")
        if self.microbatch % self.tail_chunks:
            raise ConfigError(
                f"plan: tail_chunks={self.tail_chunks} does not divide "
                f"microbatch={self.microbatch}"
            )
        if self.tail_layers == 0 and self.tail_chunks > 1:
            raise ConfigError(f"plan: tail_chunks={self.tail_chunks} without a tail")
        self.tail_start  # noqa: B018  (checks that the tail is whole segments)

    @property
    def choices(self) -> StepChoices:
        """The plan without its layers."""
        fields = dataclasses.fields(StepChoices)
        return StepChoices(
            **{field.name: getattr(self, field.name) for field in fields}
        )

    @property
    def num_layers(self) -> int:
        """Layers of all segments."""
        return sum(segment.num_layers for segment in self.segments)

    @property
    def starts(self) -> tuple[int, ...]:
        """First layer of each segment."""
        counts = [segment.num_layers for segment in self.segments]
        return tuple(sum(counts[:index]) for index in range(len(counts)))

    @property
    def tail_start(self) -> int:
        """Index of the first segment of the tail."""
        first_layer = self.num_layers - self.tail_layers
        ends = [*self.starts, self.num_layers]
        if first_layer not in ends:
            raise ConfigError(
                f"plan: tail_layers={self.tail_layers} begins at layer {first_layer}, "
                f"inside a segment; segments begin at {', '.join(map(str, ends))}"
            )
        return ends.index(first_layer)

    @property
    def keeps_copies(self) -> bool:
        """Whether any copy crosses the border of steps."""
        return any(s.bwd_keep_axes > s.rest_axes for s in self.segments)


def static(
    *,
    name: str,
    num_layers: int,
    mesh_sizes: tuple[int, ...],
    rows: tuple[int, int],
    **settings: Any,
) -> Plan:
    """The plans that need no planner.

    Args:
      name: `fsdp` (weights sharded over all devices, nothing kept) or `replicated`.
      num_layers: Layers of the model.
      mesh_sizes: Devices along each mesh axis.
      rows: (microbatch, accumulation).
      **settings: Fields of `SegmentPlan` and `Plan`.
    """
    if name not in ("fsdp", "replicated"):
        raise ConfigError(f"plan={name!r} is unknown; use fsdp, replicated or a file")
    axes = Axes(data=mesh_sizes)
    held = axes.whole if name == "replicated" else axes.lowest
    names = {field.name for field in dataclasses.fields(SegmentPlan)}
    segment = SegmentPlan(
        num_layers=num_layers,
        rest_axes=held,
        fwd_keep_axes=held,
        bwd_keep_axes=held,
        **{name: value for name, value in settings.items() if name in names},
    )
    return Plan(
        mesh_sizes=mesh_sizes,
        segments=(segment,),
        microbatch=rows[0],
        accumulation=rows[1],
        **{name: value for name, value in settings.items() if name not in names},
    )


def to_json(plan: Plan) -> str:
    """Serialises a plan, byte for byte the same for equal plans."""
    return FORMAT.to_json(plan)


def from_json(text: str) -> Plan:
    """Reads what `to_json` wrote.

    Raises:
      ConfigError: No JSON, another version, or a field that is missing, unknown, of
        another type or of a value that no plan has.
    """
    return FORMAT.from_json(text, Plan)


def read(path: pathlib.Path) -> Plan:
    """Reads a plan's file."""
    return from_json(path.read_text())


def table(plan: Plan) -> str:
    """The plan for people, one line a segment."""
    head = ("layers", "rest", "fwd keep", "bwd keep", "saved", "prefetch", "runs")
    rows: list[tuple[str, ...]] = [head]
    for index, (start, segment) in enumerate(
        zip(plan.starts, plan.segments, strict=True)
    ):
        in_tail = index >= plan.tail_start
        kept = (segment.rest_axes, segment.fwd_keep_axes, segment.bwd_keep_axes)
        rows.append(
            (
                f"{start}-{start + segment.num_layers - 1}",
                *(_ratio(plan.axes, held) for held in kept),
                segment.saved.value,
                "yes" if segment.prefetch else "no",
                f"in {plan.tail_chunks} parts" if in_tail else "whole microbatch",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.append(
        f"embedding {plan.embedding}, head {plan.head}, adapters {plan.adapters}, "
        f"weights {plan.weight_dtype}; {plan.accumulation} x {plan.num_devices} "
        f"devices x {plan.microbatch} rows"
    )
    return "\n".join(line.rstrip() for line in lines)


def _ratio(axes: Axes, held: int) -> str:
    devices = axes.sharing(held)
    return "1" if devices == 1 else f"1/{devices}"


def _check_segment(segment: SegmentPlan, index: int, num_axes: int) -> None:
    if segment.num_layers < 1:
        raise ConfigError(
            f"plan: segment {index} has num_layers={segment.num_layers}; at least 1"
        )
    if not 0 <= segment.rest_axes <= num_axes:
        raise ConfigError(
            f"plan: segment {index} has rest_axes={segment.rest_axes}; the mesh has "
            f"{num_axes} axes"
        )
    for name in ("fwd_keep_axes", "bwd_keep_axes"):
        value = getattr(segment, name)
        if not segment.rest_axes <= value <= num_axes:
            raise ConfigError(
                f"plan: segment {index} has {name}={value}; from "
                f"rest_axes={segment.rest_axes} to the mesh's {num_axes} axes"
            )

"""Bytes that XLA allocates on a device for a step, from the plan alone.

The compiled step's figure is arguments + outputs that reuse no donated input +
temporaries. Here it is put together from parts that do not depend on each other:

    static + sum over layers (rest + saved + fwd_copy) + arenas + largest transient

so that a search can add layers up. Stacks are counted as XLA allocates them: for the
whole loop, and the tail's beside those of the main part.

Letters: T tokens in a row, D model, F feed-forward, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence

from mtuner_jax.planning import arenas, transients
from mtuner_jax.planning.plans import (
    SAVED_TENSORS,
    AdapterState,
    Plan,
    Saved,
    SegmentPlan,
    Table,
)
from mtuner_jax.planning.workloads import Workload

_WIDE_BYTES = 4  # adapters, moments, gradients, statistics, ids: 32 bits
_POINTER_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What one layer of a segment takes on a device.

    Attributes:
      rest: Its weights between steps: the split ones at their ratio, the others whole.
      saved: Tensors stacked from its forward to its backward pass, without its input.
      layer_input: In the arena; 0 where it waits on the host.
      fwd_copy: Kept from forward to backward; 0 where nothing is.
      bwd_copy: Kept in the arena; 0 where nothing is.
      transient: Most that lives only while this layer runs, forward or backward.
    """

    rest: int
    saved: int
    layer_input: int
    fwd_copy: int
    bwd_copy: int
    transient: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepChoices:
    """A plan without its segments; see `plans.Plan` for the fields."""

    mesh_sizes: tuple[int, ...]
    microbatch: int
    accumulation: int
    tail_chunks: int = 1
    embedding: Table = Table.GATHERED
    head: Table = Table.GATHERED
    adapters: AdapterState = AdapterState.REPLICATED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """Bytes of a device that no segment changes.

    Attributes:
      tables: Vocabulary tables and the final norm, as they lie between steps.
      adapters: Adapters, two moments, counters.
      batch: The step's rows.
      outputs: Results that reuse no input.
      gradients: Sums of adapter gradients, and whole adapters where they are split.
      boundary: What crosses from the main part to the tail's chunks and back.
      loss_transient: Most that lives only while the loss is computed.
    """

    tables: int
    adapters: int
    batch: int
    outputs: int
    gradients: int
    boundary: int
    loss_transient: int

    @property
    def total_bytes(self) -> int:
        """All of it but the transient, which competes with those of the layers."""
        return (
            self.tables
            + self.adapters
            + self.batch
            + self.outputs
            + self.gradients
            + self.boundary
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes per device by kind.

    Attributes:
      weights: Layers at rest.
      tables: Vocabulary tables and the final norm, as they lie between steps.
      adapters: Adapters, two moments, counters.
      batch: The step's rows.
      kept_arenas: Arenas that hold copies across steps.
      outputs: Results that reuse no input.
      step_arenas: Arenas that live within the step.
      saved: Tensors saved for the backward pass.
      fwd_copies: Weights kept from forward to backward.
      gradients: Sums of adapter gradients, and whole adapters where they are split.
      boundary: What crosses from the main part to the tail's chunks and back.
      transient: The largest of what lives only while a layer or the loss runs.
    """

    weights: int
    tables: int
    adapters: int
    batch: int
    kept_arenas: int
    outputs: int
    step_arenas: int
    saved: int
    fwd_copies: int
    gradients: int
    boundary: int
    transient: int

    @property
    def arguments_bytes(self) -> int:
        """What the step is called with; exact."""
        return (
            self.weights + self.tables + self.adapters + self.batch + self.kept_arenas
        )

    @property
    def temporaries_bytes(self) -> int:
        """What lives within the step."""
        return (
            self.step_arenas
            + self.saved
            + self.fwd_copies
            + self.gradients
            + self.boundary
            + self.transient
        )

    @property
    def total_bytes(self) -> int:
        """What a device must have for the step."""
        return self.arguments_bytes + self.outputs + self.temporaries_bytes


def choices(plan: Plan) -> StepChoices:
    """What of a plan `static_bytes` depends on."""
    return StepChoices(
        mesh_sizes=plan.mesh_sizes,
        microbatch=plan.microbatch,
        accumulation=plan.accumulation,
        tail_chunks=plan.tail_chunks,
        embedding=plan.embedding,
        head=plan.head,
        adapters=plan.adapters,
    )


def layer_bytes(
    workload: Workload,
    segment: SegmentPlan,
    *,
    mesh_sizes: Sequence[int],
    rows: int,
    merge_gathers: bool,
) -> LayerBytes:
    """One layer of a segment.

    Args:
      workload: Sizes.
      segment: Its treatment.
      mesh_sizes: Devices along each mesh axis, slowest link first.
      rows: Rows of a device that run at once there: the microbatch, in the tail the
        microbatch over the chunks.
      merge_gathers: Whether one collective gathers a layer.
    """
    rest = held_bytes(workload, mesh_sizes, segment.rest_axes)
    copies = [
        held_bytes(workload, mesh_sizes, axes) if axes > segment.rest_axes else 0
        for axes in (segment.fwd_keep_axes, segment.bwd_keep_axes)
    ]
    on_host = segment.saved is Saved.LAYER_INPUT_ON_HOST
    stream = rows * workload.max_length * workload.hidden_size
    return LayerBytes(
        rest=rest + workload.replicated_layer_weights * workload.element_bytes,
        saved=saved_bytes(workload, segment.saved, rows=rows),
        layer_input=0 if on_host else stream * workload.element_bytes,
        fwd_copy=copies[0],
        bwd_copy=copies[1],
        transient=transients.layer(
            workload,
            segment,
            mesh_sizes=mesh_sizes,
            rows=rows,
            merge_gathers=merge_gathers,
        ),
    )


def held_bytes(workload: Workload, mesh_sizes: Sequence[int], axes: int) -> int:
    """Bytes of a layer's split weights when held over the `axes` slowest axes."""
    return -(-workload.layer_weight_bytes // math.prod(mesh_sizes[axes:]))


def saved_bytes(workload: Workload, saved: Saved, *, rows: int) -> int:
    """Bytes that a layer stacks for its backward pass, without its input."""
    query = workload.num_heads * workload.head_dim
    key = workload.num_kv_heads * workload.head_dim
    widths = {
        "query": query,
        "key": key,
        "value": key,
        "attention": query,
        "gate": workload.intermediate_size,
        "up": workload.intermediate_size,
        "hidden": workload.intermediate_size,
    }
    names = SAVED_TENSORS[saved]
    features = sum(widths.get(name, workload.hidden_size) for name in names)
    statistics = workload.num_heads * _WIDE_BYTES if "attention" in names else 0
    tokens = rows * workload.max_length
    return tokens * (features * workload.element_bytes + statistics)


def static_bytes(workload: Workload, step: StepChoices) -> Static:
    """What a step takes whatever its segments are."""
    devices = math.prod(step.mesh_sizes)
    rows = step.microbatch * step.accumulation
    adapters = workload.num_adapter_weights * _WIDE_BYTES
    sharded = step.adapters is AdapterState.SHARDED and devices > 1
    adapted = sum(linear.rank > 0 for linear in workload.linears)
    stream = step.microbatch * workload.max_length * workload.hidden_size
    results = 3 * (2 * adapted + 1) + 3  # adapters, moments, counters; metrics
    return Static(
        tables=_table_bytes(workload, step),
        adapters=3 * -(-adapters // (devices if sharded else 1)) + 3 * _WIDE_BYTES,
        batch=rows
        * workload.max_length
        * _WIDE_BYTES
        * (6 if workload.dropout else 5),  # jit drops fields that are not used
        outputs=results * _POINTER_BYTES + 3 * _WIDE_BYTES,
        gradients=(2 if sharded else 1) * adapters,
        boundary=stream * workload.element_bytes if step.tail_chunks > 1 else 0,
        loss_transient=transients.loss(
            workload,
            step.head,
            devices=devices,
            rows=step.microbatch // step.tail_chunks,
        ),
    )


def _table_bytes(workload, step):
    devices = math.prod(step.mesh_sizes)
    rows = -(-workload.vocab_size // devices) * devices
    row_bytes = workload.hidden_size * workload.element_bytes
    held = {
        table: row_bytes
        * (workload.vocab_size if table is Table.RESIDENT else rows // devices)
        for table in Table
    }
    tables = held[step.embedding]
    if not workload.tied_embeddings:
        tables += held[step.head]
    return tables + row_bytes


def forecast(plan: Plan, workload: Workload) -> Forecast:
    """What XLA will allocate for a plan's step."""
    static = static_bytes(workload, choices(plan))
    segments = [
        layer_bytes(
            workload,
            segment,
            mesh_sizes=plan.mesh_sizes,
            rows=plan.microbatch
            // (plan.tail_chunks if index >= plan.tail_start else 1),
            merge_gathers=plan.merge_gathers,
        )
        for index, segment in enumerate(plan.segments)
    ]
    counts = [segment.num_layers for segment in plan.segments]
    kept, within, pointers = _arena_bytes(plan, workload, segments)

    def over_layers(field: str) -> int:
        return sum(
            count * getattr(layer, field)
            for count, layer in zip(counts, segments, strict=True)
        )

    return Forecast(
        weights=over_layers("rest"),
        tables=static.tables,
        adapters=static.adapters,
        batch=static.batch,
        kept_arenas=kept,
        outputs=static.outputs + pointers,
        step_arenas=within,
        saved=over_layers("saved"),
        fwd_copies=over_layers("fwd_copy"),
        gradients=static.gradients,
        boundary=static.boundary,
        transient=max(static.loss_transient, *(layer.transient for layer in segments)),
    )


def _arena_bytes(plan, workload, segments):
    """Bytes of arenas that outlive the step, of the others, of pointers to results."""
    size = workload.element_bytes
    kept = within = pointers = 0
    for part in (range(plan.tail_start), range(plan.tail_start, len(segments))):
        inputs, copies = [], []
        for index in part:
            count, layer = plan.segments[index].num_layers, segments[index]
            inputs += count * [layer.layer_input // size]
            copies += count * [layer.bwd_copy // size]
        layout = arenas.layout(inputs, copies)
        bytes_of_part = layout.rows * layout.width * size
        if layout.has_copies:
            kept += bytes_of_part
            pointers += _POINTER_BYTES
        else:
            within += bytes_of_part
    return kept, within, pointers

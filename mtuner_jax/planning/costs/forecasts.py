"""Bytes that XLA allocates on a device for a step, from the plan alone.

The compiled step's figure is arguments + outputs that reuse no donated input +
temporaries. Here it is put together from parts that do not depend on each other:

    static + sum over layers (rest + saved + fwd_copy) + arenas + largest transient

so that a search can add layers up. Stacks are counted as XLA allocates them, for a
whole loop. Those of the tail are gone before the main part runs backward, so they
count as transient there: to leave them in the sum is an upper bound.
"""

import dataclasses
import math
from collections.abc import Sequence

from mtuner_jax.planning.costs import arena_layouts, transients
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
      boundary: What a tail in chunks holds beside its layers: the microbatch's
        stream, its gradient, and a gathered output table.
      loss_transient: Most that lives only while tokens are looked up, or while the
        loss is computed.
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
        """What is there at every instant: without boundary and transient."""
        return self.tables + self.adapters + self.batch + self.outputs + self.gradients


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
      saved: Tensors that the main part saves for its backward pass.
      fwd_copies: Weights that the main part keeps from forward to backward.
      gradients: Sums of adapter gradients, and whole adapters where they are split.
      segments: What every further segment costs, less what short ones save.
      transient: The largest of what lives only while a layer of the main part, the
        tail with what it saves, or the loss runs.
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
    segments: int
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
            + self.segments
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
    return LayerBytes(
        rest=rest + workload.replicated_layer_weights * workload.element_bytes,
        saved=saved_bytes(workload, segment.saved, rows=rows),
        layer_input=0 if on_host else stream_bytes(workload, rows=rows),
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


def host_bytes(plan: Plan, workload: Workload) -> int:
    """Pinned host memory of a device: layer inputs that wait there."""
    return sum(
        segment.num_layers * stream_bytes(workload, rows=_rows(plan, index))
        for index, segment in enumerate(plan.segments)
        if segment.saved is Saved.LAYER_INPUT_ON_HOST
    )


def stream_bytes(workload: Workload, *, rows: int) -> int:
    """Bytes of a layer's input."""
    return rows * workload.max_length * workload.hidden_size * workload.element_bytes


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
    adapters = workload.num_adapter_weights * _WIDE_BYTES
    sharded = step.adapters is AdapterState.SHARDED and devices > 1
    adapted = sum(linear.rank > 0 for linear in workload.linears)
    results = 3 * (2 * adapted + 1) + 3  # adapters, moments, counters; metrics
    tokens = step.microbatch * workload.max_length
    stream = stream_bytes(workload, rows=step.microbatch)
    gathered = transients.gathered_bytes(workload, step.head, devices=devices)
    boundary = 2 * stream + gathered if step.tail_chunks > 1 else 0
    return Static(
        tables=_table_bytes(workload, step),
        adapters=3 * -(-adapters // (devices if sharded else 1)) + 3 * _WIDE_BYTES,
        batch=step.accumulation
        * tokens
        * _WIDE_BYTES
        * (6 if workload.dropout else 5),  # jit drops fields that are not used
        outputs=results * _POINTER_BYTES + 3 * _WIDE_BYTES,
        gradients=(2 if sharded else 1) * adapters,
        boundary=boundary,
        loss_transient=_loss_transient(workload, step),
    )


def _loss_transient(workload, step):
    devices = math.prod(step.mesh_sizes)
    streams = 2 * stream_bytes(workload, rows=step.microbatch)
    embedding, head = (
        transients.gathered_bytes(workload, table, devices=devices)
        for table in (step.embedding, step.head)
    )
    rows = step.microbatch // step.tail_chunks
    loss = transients.loss(workload, step.head, devices=devices, rows=rows)
    if step.tail_chunks > 1:
        loss += streams
    if head:
        last = transients.last_layer(workload, rows=step.microbatch)
        loss = max(loss, head + last)
    return max(loss, embedding + streams)


def _table_bytes(workload, step):
    devices = math.prod(step.mesh_sizes)
    rows = -(-workload.vocab_size // devices) * devices
    row_bytes = workload.hidden_size * workload.element_bytes
    held = {
        table: row_bytes * (rows if table is Table.RESIDENT else rows // devices)
        for table in Table
    }
    tables = held[step.embedding]
    if not workload.tied_embeddings:
        tables += held[step.head]
    return tables + row_bytes


def forecast(plan: Plan, workload: Workload) -> Forecast:
    """What XLA will allocate for a plan's step."""
    static = static_bytes(workload, choices(plan))
    layers = _layers(plan, workload)
    kept, within, pointers = _arena_bytes(plan, workload, layers)
    main = range(plan.tail_start)

    def over(indices: Sequence[int], field: str) -> int:
        return sum(
            plan.segments[index].num_layers * getattr(layers[index], field)
            for index in indices
        )

    return Forecast(
        weights=over(range(len(layers)), "rest"),
        tables=static.tables,
        adapters=static.adapters,
        batch=static.batch,
        kept_arenas=kept,
        outputs=static.outputs + pointers,
        step_arenas=within,
        saved=over(main, "saved"),
        fwd_copies=over(main, "fwd_copy"),
        gradients=static.gradients,
        segments=_segment_bytes(plan, workload, layers),
        transient=max(
            static.loss_transient,
            _tail_bytes(plan, static, layers),
            *(layers[index].transient for index in main),
        ),
    )


def _segment_bytes(plan, workload, layers):
    total = 0
    for index, (segment, layer) in enumerate(zip(plan.segments, layers, strict=True)):
        if index:
            total += transients.segment(workload)
        if transients.is_unrolled(segment):
            total += transients.unrolled(workload, rows=_rows(plan, index))
            if segment.fwd_keep_axes == len(plan.mesh_sizes):
                # Outside of loops, the last layer's copy is what it was gathered to.
                total -= layer.fwd_copy
    return total


def _rows(plan, index):
    in_tail = index >= plan.tail_start
    return plan.microbatch // (plan.tail_chunks if in_tail else 1)


def _layers(plan, workload):
    return [
        layer_bytes(
            workload,
            segment,
            mesh_sizes=plan.mesh_sizes,
            rows=_rows(plan, index),
            merge_gathers=plan.merge_gathers,
        )
        for index, segment in enumerate(plan.segments)
    ]


def _tail_bytes(plan, static, layers):
    """What is there while the tail runs and is gone when the main part goes back."""
    start = plan.tail_start
    if start == len(layers):
        return 0
    stacks = sum(
        segment.num_layers * (layer.saved + layer.fwd_copy)
        for segment, layer in zip(plan.segments[start:], layers[start:], strict=True)
    )
    largest = max(layer.transient for layer in layers[start:])
    return static.boundary + stacks + largest


def _arena_bytes(plan, workload, layers):
    """Bytes of arenas that outlive the step, of the others, of pointers to results."""
    size = workload.element_bytes
    kept = within = pointers = 0
    for part in (range(plan.tail_start), range(plan.tail_start, len(layers))):
        inputs, copies = [], []
        for index in part:
            count, layer = plan.segments[index].num_layers, layers[index]
            inputs += count * [layer.layer_input // size]
            copies += count * [layer.bwd_copy // size]
        layout = arena_layouts.layout(inputs, copies)
        bytes_of_part = layout.rows * layout.width * size
        if layout.has_copies:
            kept += bytes_of_part
            pointers += _POINTER_BYTES
        else:
            within += bytes_of_part
    return kept, within, pointers

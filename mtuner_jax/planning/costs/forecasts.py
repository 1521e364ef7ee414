"""Bytes that XLA allocates on a device for a step, from the plan alone.

The compiled step's figure is arguments + outputs that reuse no donated input +
temporaries. Here it is put together from parts that do not depend on each other:

    static + sum over layers (rest + saved + fwd_copy) + arenas + largest transient

so that a search can add layers up. Stacks are counted as XLA allocates them, for a
whole loop. Those of the tail are gone before the main part runs backward, so they
count as transient there: to leave them in the sum is an upper bound.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mtuner_jax.numbers import chunking
from mtuner_jax.planning import sites
from mtuner_jax.planning.costs import arena_layouts, transients
from mtuner_jax.planning.costs.arena_layouts import SegmentRows
from mtuner_jax.planning.plans import (
    ON_HOST,
    SAVED_TENSORS,
    AdapterState,
    Plan,
    Saved,
    SegmentPlan,
    StepChoices,
    Table,
)
from mtuner_jax.planning.sites import Site
from mtuner_jax.planning.workloads import Workload

_WIDE_BYTES = 4  # adapters, moments, gradients, statistics, ids: 32 bits
POINTER_BYTES = 8  # of a result


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What one layer of a segment takes on a device.

    Attributes:
      rest: Its weights between steps: the split ones at their ratio, the others whole.
      saved: Tensors stacked from its forward to its backward pass, without its input.
      layer_input: In the arena; 0 where it waits on the host.
      host: In pinned host memory from its forward to its backward pass.
      fwd_copy: Kept from forward to backward; 0 where nothing is.
      bwd_copy: Kept in the arena; 0 where nothing is.
      transient: Most that lives only while this layer runs, forward or backward.
    """

    rest: int
    saved: int
    layer_input: int
    host: int
    fwd_copy: int
    bwd_copy: int
    transient: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticBytes:
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


def layer_bytes(site: Site, segment: SegmentPlan) -> LayerBytes:
    """What one layer of a segment takes at a site."""
    workload = site.workload
    fwd_copy, bwd_copy = (
        held_bytes(site, axes) if axes > segment.rest_axes else 0
        for axes in (segment.fwd_keep_axes, segment.bwd_keep_axes)
    )
    on_host = ON_HOST.get(segment.saved, ())
    replicated = workload.replicated_layer_weights * workload.weight_bytes
    return LayerBytes(
        rest=held_bytes(site, segment.rest_axes) + replicated,
        saved=saved_bytes(site, segment.saved),
        layer_input=0 if "layer_input" in on_host else stream_bytes(site),
        host=layer_host_bytes(site, segment.saved),
        fwd_copy=fwd_copy,
        bwd_copy=bwd_copy,
        transient=transients.layer(site, segment),
    )


def host_bytes(plan: Plan, workload: Workload) -> int:
    """Pinned host memory of a device: what of all layers waits there."""
    return sum(
        segment.num_layers * layer_host_bytes(site, segment.saved)
        for segment, site in zip(
            plan.segments, sites.of_segments(plan, workload), strict=True
        )
    )


def layer_host_bytes(site: Site, saved: Saved) -> int:
    """Bytes of a layer that wait in pinned host memory."""
    return _kept_bytes(site, ON_HOST.get(saved, ()))


def stream_bytes(site: Site) -> int:
    """Bytes of a layer's input."""
    workload = site.workload
    return site.tokens * workload.hidden_size * workload.activation_bytes


def held_bytes(site: Site, axes: int) -> int:
    """Bytes of a layer's split weights on a device when held over `axes` axes.

    A linear's input rows are padded to a multiple of all devices, so that it can be
    held at every ratio.
    """
    workload, devices = site.workload, site.axes.num_devices
    weights = sum(
        chunking.padded(linear.in_dim, devices) * linear.out_dim
        for linear in workload.linears
    )
    return weights * workload.weight_bytes // site.axes.sharing(axes)


def saved_bytes(site: Site, saved: Saved) -> int:
    """Bytes that a layer stacks for its backward pass, without its input."""
    on_host = ON_HOST.get(saved, ())
    return _kept_bytes(site, [n for n in SAVED_TENSORS[saved] if n not in on_host])


def _kept_bytes(site: Site, names: Sequence[str]) -> int:
    """Bytes of some tensors of a layer."""
    workload = site.workload
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
    features = sum(widths.get(name, workload.hidden_size) for name in names)
    statistics = workload.num_heads * _WIDE_BYTES if "attention" in names else 0
    return site.tokens * (features * workload.activation_bytes + statistics)


def static_bytes(workload: Workload, choices: StepChoices) -> StaticBytes:
    """What a step takes whatever its segments are."""
    devices = choices.num_devices
    adapters = workload.num_adapter_weights * _WIDE_BYTES
    sharded = choices.adapters is AdapterState.SHARDED and devices > 1
    copies, counters, metrics = _state(workload)
    results = copies * 2 * len(workload.adapted) + 3 + 3  # arrays, counters, metrics
    tokens = choices.microbatch * workload.max_length
    stream = stream_bytes(sites.main(choices, workload))
    gathered = transients.gathered_bytes(workload, choices.head, devices=devices)
    return StaticBytes(
        tables=_table_bytes(workload, choices),
        adapters=copies * -(-adapters // (devices if sharded else 1)) + counters,
        batch=choices.accumulation
        * tokens
        * _WIDE_BYTES
        # jit drops fields that are not used.
        * (5 + bool(workload.dropout) + bool(workload.stacked)),
        outputs=results * POINTER_BYTES + metrics,
        gradients=(2 if sharded else 1) * adapters,
        boundary=2 * stream + gathered if choices.tail_chunks > 1 else 0,
        loss_transient=_loss_transient(workload, choices),
    )


class _State(NamedTuple):
    """Float32 copies of the adapters, and bytes of counters and of metrics."""

    copies: int
    counters: int
    metrics: int


def _state(workload: Workload) -> _State:
    """Adapters and two moments; of a stack the sums of begun batches, too."""
    number = workload.stacked
    if not number:
        return _State(3, 3 * _WIDE_BYTES, 3 * _WIDE_BYTES)
    flags = number  # whose batches end
    each = 3 * number * _WIDE_BYTES
    return _State(4, each + _WIDE_BYTES + flags, each + 1)


def _loss_transient(workload: Workload, choices: StepChoices) -> int:
    main, chunk = sites.main(choices, workload), sites.tail(choices, workload)
    streams = 2 * stream_bytes(main)
    embedding, head = (
        transients.gathered_bytes(workload, table, devices=choices.num_devices)
        for table in (choices.embedding, choices.head)
    )
    loss = transients.loss(chunk, choices.head)
    if choices.tail_chunks > 1:
        loss += streams
    if head:
        loss = max(loss, head + transients.last_layer(main))
    return max(loss, embedding + streams)


def _table_bytes(workload: Workload, choices: StepChoices) -> int:
    devices = choices.num_devices
    rows = chunking.padded(workload.vocab_size, devices)
    row_bytes = workload.hidden_size * workload.weight_bytes
    held = {
        table: row_bytes * (rows if table is Table.RESIDENT else rows // devices)
        for table in Table
    }
    tables = held[choices.embedding]
    if not workload.tied_embeddings:
        tables += held[choices.head]
    return tables + row_bytes


def forecast(plan: Plan, workload: Workload) -> Forecast:
    """What XLA will allocate for a plan's step."""
    static = static_bytes(workload, plan)
    layers = [
        layer_bytes(site, segment)
        for site, segment in zip(
            sites.of_segments(plan, workload), plan.segments, strict=True
        )
    ]
    arenas = _arena_bytes(plan, workload, layers)
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
        kept_arenas=arenas.kept,
        outputs=static.outputs + arenas.pointers,
        step_arenas=arenas.within,
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


def short_bytes(site: Site, segment: SegmentPlan, layer: LayerBytes) -> int:
    """Bytes that a segment costs, or saves, whose loop XLA unrolls."""
    # Outside of loops, the last layer's copy is what it was gathered to.
    spared = layer.fwd_copy if segment.fwd_keep_axes == site.axes.whole else 0
    return transients.unrolled(site) - spared


def _segment_bytes(plan: Plan, workload: Workload, layers: Sequence[LayerBytes]) -> int:
    """What segments cost beside their layers."""
    total = (len(layers) - 1) * transients.segment(workload)
    for site, segment, layer in zip(
        sites.of_segments(plan, workload), plan.segments, layers, strict=True
    ):
        if segment.num_layers < transients.loop_layers(prefetch=segment.prefetch):
            total += short_bytes(site, segment, layer)
    return total


def _tail_bytes(plan: Plan, static: StaticBytes, layers: Sequence[LayerBytes]) -> int:
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


class _Arenas(NamedTuple):
    """Bytes of arenas that outlive the step, of the others, of pointers to results."""

    kept: int
    within: int
    pointers: int


def _arena_bytes(
    plan: Plan, workload: Workload, layers: Sequence[LayerBytes]
) -> _Arenas:
    size = workload.activation_bytes
    kept = within = pointers = 0
    border, counts = plan.tail_start, [one.num_layers for one in plan.segments]
    for part in (slice(border), slice(border, None)):
        elements = [
            SegmentRows(
                -(-layer.layer_input // size), -(-layer.bwd_copy // size), count
            )
            for layer, count in zip(layers[part], counts[part], strict=True)
        ]
        bytes_of_part = size * arena_layouts.num_elements(elements)
        if any(one.copy_rows for one in elements):
            kept += bytes_of_part
            pointers += POINTER_BYTES
        else:
            within += bytes_of_part
    return _Arenas(kept, within, pointers)

"""Everything of a plan but its layers: how the batch is cut, tables, adapters, tails.

A *frame* is one way to do all that; a *case* is a frame with a tail of so many layers
of one treatment, or without. What a case leaves over, in layers, bytes and seconds, is
filled by `fillings`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.costs import durations, forecasts
from mtuner_jax.planning.costs.forecasts import StepChoices
from mtuner_jax.planning.plans import AdapterState, Plan, SegmentPlan, Table
from mtuner_jax.planning.searching.options import Options
from mtuner_jax.planning.workloads import Workload

_POINTER_BYTES = 8
_SMALL_ROW = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """A plan without its layers.

    Attributes:
      chosen: How the batch is cut, tables and adapters.
      merge_gathers: Whether one collective gathers a layer.
      static_bytes: That no layer changes, without transients.
      floor_bytes: Transients of the loss.
      boundary_bytes: What is there beside the tail's layers while they run.
      seconds: Of a step, without its layers.
    """

    chosen: StepChoices
    merge_gathers: bool
    static_bytes: int
    floor_bytes: int
    boundary_bytes: int
    seconds: float

    def plan(
        self,
        workload: Workload,
        segments: tuple[SegmentPlan, ...],
        *,
        tail_layers: int = 0,
    ) -> Plan:
        """The frame with its layers."""
        chosen = self.chosen
        return Plan(
            mesh_sizes=chosen.mesh_sizes,
            segments=segments,
            microbatch=chosen.microbatch,
            accumulation=chosen.accumulation,
            tail_layers=tail_layers,
            tail_chunks=chosen.tail_chunks,
            embedding=chosen.embedding,
            head=chosen.head,
            adapters=chosen.adapters,
            weight_dtype=workload.dtype,
            merge_gathers=self.merge_gathers,
            model=workload.shape_name,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cases:
    """Tails of a frame, all arrays [cases].

    Attributes:
      option: The tail's treatment, an index.
      tail_layers: Layers in the tail.
      held_bytes: What they take at every instant.
      tail_bytes: What there is while the tail runs and not afterwards; 0 without one.
      seconds: Of a step, without the layers before the tail.
    """

    option: np.ndarray
    tail_layers: np.ndarray
    held_bytes: np.ndarray
    tail_bytes: np.ndarray
    seconds: np.ndarray


def cuts(global_batch_size: int, devices: int) -> list[tuple[int, int]]:
    """(microbatch, accumulation) that can be best, whole batch first.

    For each accumulation the smallest microbatch that takes all rows of a device; some
    pad the batch, and pay for it.
    """
    rows = -(-global_batch_size // devices)
    sizes = sorted({-(-rows // parts) for parts in range(1, rows + 1)}, reverse=True)
    return [(size, -(-rows // size)) for size in sizes]


def chunkings(microbatch: int) -> list[int]:
    """Numbers of tail chunks; 1 is no tail."""
    return [parts for parts in range(1, microbatch + 1) if microbatch % parts == 0]


def enumerate_frames(
    workload: Workload, hardware: Hardware, mesh_sizes: tuple[int, ...]
) -> Iterator[Frame]:
    """All frames but those that another one beats in time and in memory."""
    devices = math.prod(mesh_sizes)
    for microbatch, accumulation in cuts(workload.global_batch_size, devices):
        for chunks in chunkings(microbatch):
            found = [
                price(workload, hardware, chosen)
                for chosen in choices(
                    workload, mesh_sizes, (microbatch, accumulation), chunks
                )
            ]
            for frame in _undominated(found):
                yield frame
                if devices > 1:
                    yield dataclasses.replace(frame, merge_gathers=True)


def price(workload: Workload, hardware: Hardware, chosen: StepChoices) -> Frame:
    """A frame with its price; gathers are not merged."""
    static = forecasts.static_bytes(workload, chosen)
    times = durations.step(workload, hardware, chosen)
    each_s = times.each_microbatch_s + chosen.tail_chunks * times.loss.total_s
    return Frame(
        chosen=chosen,
        merge_gathers=False,
        static_bytes=static.total_bytes,
        floor_bytes=static.loss_transient,
        boundary_bytes=static.boundary,
        seconds=times.once_s + chosen.accumulation * each_s,
    )


def no_tail(frame: Frame, options: Options) -> Cases:
    """The one case without a tail: its arena has one small row."""
    empty = np.zeros(1, int)
    return Cases(
        option=empty,
        tail_layers=empty,
        held_bytes=empty + empty_arena_bytes(options),
        tail_bytes=empty,
        seconds=np.array([frame.seconds]),
    )


def tails(frame: Frame, options: Options, num_layers: int) -> Cases:
    """All tails of one segment, with the options of a chunk's rows."""
    option, layers = (
        grid.ravel()
        for grid in np.meshgrid(
            np.arange(len(options)), np.arange(1, num_layers + 1), indexing="ij"
        )
    )
    inputs, copies = options.input_rows[option], options.copy_rows[option]
    # See `arena_layouts.layout`: up to the inputs, or the first or last layer's copy.
    rows = np.maximum(
        layers * inputs,
        np.where(
            copies > 0,
            np.maximum(inputs + layers * copies, layers * inputs + copies),
            0,
        ),
    )
    arena = np.maximum(rows * options.row_bytes, empty_arena_bytes(options))
    pointers = _POINTER_BYTES * (copies > 0)
    short = layers < options.loop_layers[option]
    further = (layers < num_layers) * options.further_bytes
    extra = short * options.unrolled_bytes[option] + further
    chunk_s = layers * options.layer_s[option]
    chunk_s = chunk_s + options.start_s[option] + options.end_s[option]
    runs = frame.chosen.accumulation * frame.chosen.tail_chunks
    return Cases(
        option=option,
        tail_layers=layers,
        held_bytes=layers * options.rest_bytes[option] + arena + pointers + extra,
        tail_bytes=frame.boundary_bytes
        + layers * options.stack_bytes[option]
        + options.transient_bytes[option],
        seconds=frame.seconds + runs * chunk_s,
    )


def empty_arena_bytes(options: Options) -> int:
    """Bytes of an arena without anything in it."""
    return _SMALL_ROW * options.element_bytes


def choices(
    workload: Workload,
    mesh_sizes: tuple[int, ...],
    cut: tuple[int, int],
    chunks: int,
) -> Iterator[StepChoices]:
    """Tables and adapters of a plan cut into (microbatch, accumulation) and chunks."""
    devices = math.prod(mesh_sizes)
    kinds = list(Table) if devices > 1 else [Table.GATHERED]
    adapters = [AdapterState.REPLICATED]
    if devices > 1 and all(
        linear.in_dim % devices == linear.out_dim % devices == 0
        for linear in workload.linears
        if linear.rank
    ):
        adapters.append(AdapterState.SHARDED)
    for embedding, head, state in itertools.product(kinds, kinds, adapters):
        resident = (embedding is Table.RESIDENT, head is Table.RESIDENT)
        if workload.tied_embeddings and any(resident) and not all(resident):
            continue  # one table: `step_specs` refuses it
        yield StepChoices(
            mesh_sizes=mesh_sizes,
            microbatch=cut[0],
            accumulation=cut[1],
            tail_chunks=chunks,
            embedding=embedding,
            head=head,
            adapters=state,
        )


def _undominated(found):
    """Frames that no other one beats or, before them, equals."""
    prices = [
        (f.seconds, f.static_bytes, f.floor_bytes, f.boundary_bytes) for f in found
    ]
    for index, (frame, own) in enumerate(zip(found, prices, strict=True)):
        covered = [
            all(a <= b for a, b in zip(other, own, strict=True))
            and (other != own or place < index)
            for place, other in enumerate(prices)
        ]
        if not any(covered):
            yield frame

"""Everything of a plan but its layers: how the batch is cut, tables, adapters, tails.

A *frame* is one way to do all that; a *case* is a frame with a tail of so many layers
of one treatment, or without. What a case leaves over, in layers, bytes and seconds, is
filled by `fillings`.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import arena_layouts, durations, forecasts
from mtuner_jax.planning.costs.arena_layouts import SegmentRows
from mtuner_jax.planning.plans import (
    AdapterState,
    Plan,
    SegmentPlan,
    StepChoices,
    Table,
)
from mtuner_jax.planning.searching.allowed import EVERYTHING, Allowed
from mtuner_jax.planning.searching.options import Options
from mtuner_jax.planning.workloads import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """A plan without its layers.

    Attributes:
      chosen: How the batch is cut, tables and adapters.
      static_bytes: Bytes that no layer changes, without transients.
      floor_bytes: Bytes of the loss's transients.
      boundary_bytes: What is there beside the tail's layers while they run.
      seconds: Seconds of a step, without its layers.
    """

    chosen: StepChoices
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
        return Plan(
            **vars(self.chosen),
            segments=segments,
            tail_layers=tail_layers,
            weight_dtype=workload.weight_dtype,
            model=workload.shape_name,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cases:
    """Tails of a frame, N of them.

    Attributes:
      option_N: The tail's treatment, an index.
      layers_N: Layers in the tail.
      held_N: Bytes that they take at every instant.
      transient_N: Bytes of what is there while the tail runs and not afterwards; 0
        without one.
      seconds_N: Seconds of a step, without the layers before the tail.
    """

    option_N: np.ndarray
    layers_N: np.ndarray
    held_N: np.ndarray
    transient_N: np.ndarray
    seconds_N: np.ndarray


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
    workload: Workload,
    hardware: Hardware,
    axes: Axes,
    allowed: Allowed = EVERYTHING,
) -> Iterator[Frame]:
    """All frames but those that another one beats in time and in memory."""
    for cut in cuts(workload.global_batch_size, axes.num_devices):
        for chunks in chunkings(cut[0]):
            found = [
                price(workload, hardware, chosen)
                for chosen in choices(workload, axes, cut, chunks)
                if any(map(allowed.step, _mergings(chosen)))
            ]
            for frame in _undominated(found):
                for chosen in filter(allowed.step, _mergings(frame.chosen)):
                    yield dataclasses.replace(frame, chosen=chosen)


def _mergings(chosen: StepChoices) -> list[StepChoices]:
    """Gathers not merged and merged; the price of a frame is the same."""
    merges = (False, True) if chosen.num_devices > 1 else (False,)
    return [dataclasses.replace(chosen, merge_gathers=merge) for merge in merges]


def price(workload: Workload, hardware: Hardware, chosen: StepChoices) -> Frame:
    """A frame with its price."""
    static = forecasts.static_bytes(workload, chosen)
    times = durations.step(workload, hardware, chosen)
    each_s = times.each_microbatch_s + chosen.tail_chunks * times.loss.total_s
    return Frame(
        chosen=chosen,
        static_bytes=static.total_bytes,
        floor_bytes=static.loss_transient,
        boundary_bytes=static.boundary,
        seconds=times.once_s + chosen.accumulation * each_s,
    )


def no_tail(frame: Frame, options: Options) -> Cases:
    """The one case without a tail: its arena has one small row."""
    empty = np.zeros(1, int)
    return Cases(
        option_N=empty,
        layers_N=empty,
        held_N=empty + options.empty_bytes,
        transient_N=empty,
        seconds_N=np.array([frame.seconds]),
    )


def tails(frame: Frame, options: Options, num_layers: int) -> Cases:
    """All tails of one segment, with the options of a chunk's rows."""
    option_N, layers_N = (
        grid.ravel()
        for grid in np.meshgrid(
            np.arange(len(options)), np.arange(1, num_layers + 1), indexing="ij"
        )
    )
    copies_N = options.copy_rows_O[option_N]
    rows = SegmentRows(options.input_rows_O[option_N], copies_N, layers_N)
    rows_N = np.maximum.reduce(arena_layouts.rows_needed([rows]))
    arena_N = np.maximum(rows_N * options.row_bytes, options.empty_bytes)
    pointers_N = forecasts.POINTER_BYTES * (copies_N > 0)
    short_N = layers_N < options.loop_layers_O[option_N]
    further_N = (layers_N < num_layers) * options.further_bytes
    extra_N = short_N * options.unrolled_O[option_N] + further_N
    chunk_s_N = layers_N * options.layer_s_O[option_N]
    chunk_s_N = chunk_s_N + options.start_s_O[option_N] + options.end_s_O[option_N]
    runs = frame.chosen.accumulation * frame.chosen.tail_chunks
    return Cases(
        option_N=option_N,
        layers_N=layers_N,
        held_N=layers_N * options.rest_O[option_N] + arena_N + pointers_N + extra_N,
        transient_N=frame.boundary_bytes
        + layers_N * options.stack_O[option_N]
        + options.transient_O[option_N],
        seconds_N=frame.seconds + runs * chunk_s_N,
    )


def choices(
    workload: Workload, axes: Axes, cut: tuple[int, int], chunks: int
) -> Iterator[StepChoices]:
    """Tables and adapters of a plan cut into (microbatch, accumulation) and chunks."""
    devices = axes.num_devices
    kinds = list(Table) if devices > 1 else [Table.GATHERED]
    adapters = [AdapterState.REPLICATED]
    if devices > 1 and all(
        linear.in_dim % devices == linear.out_dim % devices == 0
        for linear in workload.adapted
    ):
        adapters.append(AdapterState.SHARDED)
    for embedding, head, state in itertools.product(kinds, kinds, adapters):
        resident = (embedding is Table.RESIDENT, head is Table.RESIDENT)
        if workload.tied_embeddings and any(resident) and not all(resident):
            continue  # one table: `step_specs` refuses it
        yield StepChoices(
            mesh_sizes=axes.data,
            microbatch=cut[0],
            accumulation=cut[1],
            tail_chunks=chunks,
            embedding=embedding,
            head=head,
            adapters=state,
        )


def _undominated(found: list[Frame]) -> Iterator[Frame]:
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

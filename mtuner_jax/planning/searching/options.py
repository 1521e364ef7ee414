"""The treatments worth trying for one layer, with their prices as arrays.

A treatment is dropped only if another one is nowhere worse: not in any part of its
time, so that it cannot be better at a border of segments either, and in no kind of
memory. What remains is exact for every plan.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.costs import (
    arena_layouts,
    durations,
    forecasts,
    passes,
    transients,
)
from mtuner_jax.planning.costs.durations import LayerTimes
from mtuner_jax.planning.costs.forecasts import LayerBytes
from mtuner_jax.planning.plans import Saved, SegmentPlan
from mtuner_jax.planning.workloads import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Treatments of one layer and what each costs, all arrays [options] but one.

    A pass over segments a, b, ... takes the sum of `layer_s` over all layers, plus
    `start_s` of the first, `end_s` of the last, `border_s` of each pair.

    Attributes:
      segments: The treatments, with one layer each.
      layer_s: Seconds of a layer amid equal ones, forward and backward.
      start_s: Seconds more where the model, or the tail, begins with it.
      end_s: Likewise where it ends.
      border_s: [options, options], where the second follows the first.
      rest_bytes: Of a layer's weights between steps.
      stack_bytes: Of a layer: saved, and kept from forward to backward.
      input_rows: Arena rows of a layer's input.
      copy_rows: Arena rows of its copy.
      row_bytes: Bytes of an arena row, a number.
      transient_bytes: What lives only while a layer runs.
      element_bytes: Of an element in the arena, a number.
      loop_layers: From so many layers on, a segment's loop stays one.
      further_bytes: What a segment that is not the first costs beside its layers, a
        number.
      unrolled_bytes: What any segment with fewer layers costs, or saves.
    """

    segments: tuple[SegmentPlan, ...]
    layer_s: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    border_s: np.ndarray
    rest_bytes: np.ndarray
    stack_bytes: np.ndarray
    input_rows: np.ndarray
    copy_rows: np.ndarray
    row_bytes: int
    transient_bytes: np.ndarray
    element_bytes: int
    loop_layers: np.ndarray
    further_bytes: int
    unrolled_bytes: np.ndarray

    @property
    def fixed_bytes(self) -> np.ndarray:
        """Of a layer of the main part, wherever it is, without the arena."""
        return self.rest_bytes + self.stack_bytes

    def __len__(self) -> int:
        return len(self.segments)


def treatments(mesh_sizes: Sequence[int]) -> Iterator[SegmentPlan]:
    """All treatments that the engine can run, one layer each.

    Weights are gathered one layer ahead wherever any are gathered. A layer that is
    whole anyway may look ahead too: it hides the first gather of the segment after it.
    """
    whole = len(mesh_sizes)
    lowest = whole if math.prod(mesh_sizes) == 1 else 0
    levels = range(lowest, whole + 1)
    for saved, rest in itertools.product(Saved, levels):
        for fwd_keep, bwd_keep in itertools.product(range(rest, whole + 1), repeat=2):
            for prefetch in _prefetches((fwd_keep, bwd_keep), whole, lowest):
                yield SegmentPlan(
                    num_layers=1,
                    rest_axes=rest,
                    fwd_keep_axes=fwd_keep,
                    bwd_keep_axes=bwd_keep,
                    saved=saved,
                    prefetch=prefetch,
                )


def allowed(
    workload: Workload, hardware: Hardware, *, mesh_sizes: Sequence[int], rows: int
) -> Iterator[SegmentPlan]:
    """The treatments that the host's memory allows, for so many rows at once."""
    holds = host_holds(workload, hardware, rows=rows)
    for segment in treatments(mesh_sizes):
        if holds or segment.saved is not Saved.LAYER_INPUT_ON_HOST:
            yield segment


def host_holds(workload: Workload, hardware: Hardware, *, rows: int) -> bool:
    """Whether the inputs of all layers may wait on the host, as far as anybody said.

    A plan in which those of some layers could is not looked for.
    """
    needed = workload.num_layers * forecasts.stream_bytes(workload, rows=rows)
    budget = hardware.host_budget_bytes
    return not budget or needed <= budget


def worth_trying(
    workload: Workload,
    hardware: Hardware,
    *,
    mesh_sizes: Sequence[int],
    rows: int,
    merge_gathers: bool,
) -> Options:
    """The treatments that no other one makes superfluous.

    Args:
      workload: Sizes.
      hardware: The machine.
      mesh_sizes: Devices along each mesh axis, slowest link first.
      rows: Rows of a device that run at once.
      merge_gathers: Whether one collective gathers a layer.
    """
    place = durations.Place(
        workload=workload,
        hardware=hardware,
        mesh_sizes=tuple(mesh_sizes),
        rows=rows,
        merge_gathers=merge_gathers,
    )
    segments = list(allowed(workload, hardware, mesh_sizes=mesh_sizes, rows=rows))
    memory = [place.memory(segment) for segment in segments]
    times = [
        durations.layer(place, segment, taken)
        for segment, taken in zip(segments, memory, strict=True)
    ]
    kept = _undominated(segments, times, memory)
    return _options(
        place,
        [segments[index] for index in kept],
        [times[index] for index in kept],
        [memory[index] for index in kept],
    )


def _options(place, segments, times, memory):
    shared = passes.overlap(place.hardware, merge_gathers=place.merge_gathers)
    ahead = np.array([segment.prefetch for segment in segments])
    forward = _pass([layer.forward for layer in times], ahead, shared)
    backward = _pass([layer.backward for layer in times], ahead, shared, backward=True)
    return Options(
        segments=tuple(segments),
        layer_s=forward.layer_s + backward.layer_s,
        start_s=forward.first_s + backward.end_s,
        end_s=forward.end_s + backward.first_s,
        border_s=forward.border_s + backward.border_s.T,
        **_bytes(memory, place.workload.element_bytes),
        **_segment_bytes(place, segments, memory),
    )


def _prefetches(keeps, whole, lowest):
    if lowest == whole:
        return (False,)
    return (True,) if min(keeps) < whole else (False, True)


def _undominated(segments, times, memory):
    """Indices; of equal ones the first, which looks ahead less."""
    prices = np.array([_price(*both) for both in zip(times, memory, strict=True)])
    ahead = np.array([segment.prefetch for segment in segments])
    # [one, other]: whether one is nowhere worse than the other.
    covers = (prices[:, None] <= prices[None]).all(axis=-1)
    covers &= ahead[:, None] == ahead[None]
    earlier = np.arange(len(prices))[:, None] < np.arange(len(prices))[None]
    beaten = (covers & (~covers.T | earlier)).any(axis=0)
    return np.flatnonzero(~beaten)


def _price(layer: LayerTimes, memory: LayerBytes) -> list[float]:
    """All that a plan with the layer can depend on; exact integers below 2**53."""
    return [
        *itertools.chain.from_iterable(
            (phase.compute_s, phase.link_s, phase.carry_s, phase.host_s)
            for phase in (layer.forward, layer.backward)
        ),
        memory.rest,
        memory.saved,
        memory.fwd_copy,
        memory.layer_input,
        memory.bwd_copy,
        memory.transient,
    ]


class _Pass(NamedTuple):
    """Arrays as in `Options`, for one direction, in the order in which layers run."""

    layer_s: np.ndarray
    first_s: np.ndarray
    end_s: np.ndarray
    border_s: np.ndarray


def _pass(phases, ahead, shared, *, backward=False):
    columns = {
        name: np.array([getattr(phase, name) for phase in phases])
        for name in ("compute_s", "link_s", "carry_s", "host_s")
    }
    rows = passes.Phases(**{name: values[:, None] for name, values in columns.items()})
    # By what comes next: each option, as far as it is fetched ahead, and nothing.
    following = passes.Phases(
        **{
            name: np.append(np.where(ahead, values, 0.0), 0.0)[None, :]
            for name, values in columns.items()
        }
    )
    seconds = np.where(
        ahead[:, None],
        shared.beside(rows, following, backward=backward),
        passes.alone(rows, backward=backward),
    )
    layer_s = seconds.diagonal().copy()
    more_s = seconds - layer_s[:, None]
    first_s = passes.awaited(following, backward=backward)[0, :-1]
    waited_s = np.where(ahead[:, None], 0.0, first_s[None, :])
    return _Pass(layer_s, first_s, more_s[:, -1], more_s[:, :-1] + waited_s)


def _bytes(memory, element_bytes):
    inputs = np.array([layer.layer_input // element_bytes for layer in memory])
    copies = np.array([layer.bwd_copy // element_bytes for layer in memory])
    largest = max(inputs.max(), copies.max())
    width = arena_layouts.layout([int(largest)], []).width
    return {
        "rest_bytes": np.array([layer.rest for layer in memory]),
        "stack_bytes": np.array([layer.saved + layer.fwd_copy for layer in memory]),
        "input_rows": -(-inputs // width),
        "copy_rows": -(-copies // width),
        "row_bytes": width * element_bytes,
        "transient_bytes": np.array([layer.transient for layer in memory]),
        "element_bytes": element_bytes,
    }


def _segment_bytes(place, segments, memory):
    """What segments cost beside their layers, in loops and with fewer layers."""
    workload = place.workload
    loops = [
        next(n for n in itertools.count(1) if not transients.is_unrolled(_of(s, n)))
        for s in segments
    ]
    unrolled = transients.unrolled(workload, rows=place.rows)
    # Whole weights kept by a layer outside of loops are those it was gathered to.
    spared = [
        layer.fwd_copy if s.fwd_keep_axes == len(place.mesh_sizes) else 0
        for s, layer in zip(segments, memory, strict=True)
    ]
    return {
        "loop_layers": np.array(loops),
        "further_bytes": transients.segment(workload),
        "unrolled_bytes": unrolled - np.array(spared),
    }


def _of(segment, num_layers):
    return dataclasses.replace(segment, num_layers=num_layers)

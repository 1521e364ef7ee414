"""The treatments worth trying for one layer, with their prices as arrays.

A treatment is dropped only if another one is nowhere worse: not in any part of its
time, so that it cannot be better at a border of segments either, and in no kind of
memory. What remains is exact for every plan.

Letters of arrays in this folder: O options, that is treatments of a layer (OP: pairs,
the second behind the first), V levels of transients, G segments of a sequence,
S sequences of options, C candidates for their counts, N cases (`frames`).
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import arena_layouts, forecasts, passes, transients
from mtuner_jax.planning.costs.durations import Clock, LayerTimes, Phase
from mtuner_jax.planning.costs.forecasts import LayerBytes
from mtuner_jax.planning.costs.passes import Overlap
from mtuner_jax.planning.plans import Saved, SegmentPlan
from mtuner_jax.planning.searching.allowed import EVERYTHING, Allowed
from mtuner_jax.planning.sites import Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Treatments of one layer and what each costs.

    A pass over segments a, b, ... takes the sum of `layer_s_O` over all layers, plus
    `start_s_O` of the first, `end_s_O` of the last, `border_s_OP` of each pair.

    Attributes:
      segments: The treatments, with one layer each.
      layer_s_O: Seconds of a layer amid equal ones, forward and backward.
      start_s_O: Seconds more where the model, or the tail, begins with it.
      end_s_O: Seconds more where the model, or the part before the tail, ends with it.
      border_s_OP: Seconds more where the second follows the first.
      rest_O: Bytes of a layer's weights between steps.
      stack_O: Bytes that a layer saves, and keeps from forward to backward.
      input_rows_O: Arena rows of a layer's input.
      copy_rows_O: Arena rows of its copy.
      transient_O: Bytes that live only while a layer runs.
      loop_layers_O: From so many layers on, a segment's loop stays one.
      unrolled_O: Bytes that any segment with fewer layers costs, or saves.
      row_bytes: Bytes of an arena row.
      empty_bytes: Bytes of an arena without anything in it.
      further_bytes: Bytes that a segment which is not the first costs beside its
        layers.
    """

    segments: tuple[SegmentPlan, ...]
    layer_s_O: np.ndarray
    start_s_O: np.ndarray
    end_s_O: np.ndarray
    border_s_OP: np.ndarray
    rest_O: np.ndarray
    stack_O: np.ndarray
    input_rows_O: np.ndarray
    copy_rows_O: np.ndarray
    transient_O: np.ndarray
    loop_layers_O: np.ndarray
    unrolled_O: np.ndarray
    row_bytes: int
    empty_bytes: int
    further_bytes: int

    def __len__(self) -> int:
        return len(self.segments)

    def ends_s(self, sequences_GS: np.ndarray) -> np.ndarray:
        """[S] seconds of where sequences begin, end, and go from one to another."""
        first_S, last_S = sequences_GS[0], sequences_GS[-1]
        seconds_S = self.start_s_O[first_S] + self.end_s_O[last_S]
        for one_S, two_S in itertools.pairwise(sequences_GS):
            seconds_S = seconds_S + self.border_s_OP[one_S, two_S]
        return seconds_S


def treatments(axes: Axes, allowed: Allowed = EVERYTHING) -> Iterator[SegmentPlan]:
    """All treatments that the engine can run, one layer each.

    Weights are gathered one layer ahead wherever any are gathered. A layer that is
    whole anyway may look ahead too: it hides the first gather of the segment after it.
    """
    levels = range(axes.lowest, axes.whole + 1)
    for saved, rest in itertools.product(Saved, levels):
        for fwd, bwd in itertools.product(range(rest, axes.whole + 1), repeat=2):
            for prefetch in _prefetches(min(fwd, bwd), axes):
                segment = SegmentPlan(
                    num_layers=1,
                    rest_axes=rest,
                    fwd_keep_axes=fwd,
                    bwd_keep_axes=bwd,
                    saved=saved,
                    prefetch=prefetch,
                )
                if allowed.layer(segment, axes):
                    yield segment


def possible(
    site: Site, hardware: Hardware, allowed: Allowed = EVERYTHING
) -> Iterator[SegmentPlan]:
    """The treatments that the host's memory allows for the site's rows."""
    for segment in treatments(site.axes, allowed):
        if host_holds(site, hardware, segment.saved):
            yield segment


def host_holds(site: Site, hardware: Hardware, saved: Saved) -> bool:
    """Whether what waits on the host of all layers may, as far as anybody said.

    A plan in which that of some layers could is not looked for.
    """
    needed = site.workload.num_layers * forecasts.layer_host_bytes(site, saved)
    budget = hardware.host_budget_bytes
    return not budget or needed <= budget


def worth_trying(
    site: Site, hardware: Hardware, allowed: Allowed = EVERYTHING
) -> Options:
    """The treatments that no other one makes superfluous at a site."""
    clock = Clock(site=site, hardware=hardware)
    segments = list(possible(site, hardware, allowed))
    memory = [forecasts.layer_bytes(site, segment) for segment in segments]
    times = [
        clock.layer(segment, taken)
        for segment, taken in zip(segments, memory, strict=True)
    ]
    kept = _undominated(segments, times, memory)
    return _options(
        clock,
        [segments[index] for index in kept],
        [times[index] for index in kept],
        [memory[index] for index in kept],
    )


def _options(
    clock: Clock,
    segments: Sequence[SegmentPlan],
    times: Sequence[LayerTimes],
    memory: Sequence[LayerBytes],
) -> Options:
    shared = passes.overlap(clock.hardware, merge_gathers=clock.site.merge_gathers)
    ahead_O = np.array([segment.prefetch for segment in segments])
    forward = _pass([layer.forward for layer in times], ahead_O, shared)
    backward = _pass(
        [layer.backward for layer in times], ahead_O, shared, backward=True
    )
    return Options(
        segments=tuple(segments),
        layer_s_O=forward.layer_s_O + backward.layer_s_O,
        start_s_O=forward.first_s_O + backward.end_s_O,
        end_s_O=forward.end_s_O + backward.first_s_O,
        border_s_OP=forward.border_s_OP + backward.border_s_OP.T,
        **_bytes(clock.site, segments, memory),
    )


def _prefetches(kept: int, axes: Axes) -> tuple[bool, ...]:
    if axes.lowest == axes.whole:
        return (False,)
    return (True,) if kept < axes.whole else (False, True)


def _undominated(
    segments: Sequence[SegmentPlan],
    times: Sequence[LayerTimes],
    memory: Sequence[LayerBytes],
) -> np.ndarray:
    """Indices; of equal ones the first, which looks ahead less."""
    prices = np.array([_price(*both) for both in zip(times, memory, strict=True)])
    ahead_O = np.array([segment.prefetch for segment in segments])
    covers_OP = (prices[:, None] <= prices[None]).all(axis=-1)
    covers_OP &= ahead_O[:, None] == ahead_O[None]
    earlier_OP = np.arange(len(prices))[:, None] < np.arange(len(prices))[None]
    beaten_O = (covers_OP & (~covers_OP.T | earlier_OP)).any(axis=0)
    return np.flatnonzero(~beaten_O)


def _price(layer: LayerTimes, memory: LayerBytes) -> list[float]:
    """All that a plan with the layer can depend on; exact integers below 2**53."""
    phases = (layer.forward, layer.backward)
    return [
        *(getattr(phase, name) for phase in phases for name in _PHASE_SECONDS),
        *dataclasses.astuple(memory),
    ]


_PHASE_SECONDS = tuple(field.name for field in dataclasses.fields(passes.Phases))


class _Pass(NamedTuple):
    """Arrays as in `Options`, for one direction, in the order in which layers run."""

    layer_s_O: np.ndarray
    first_s_O: np.ndarray
    end_s_O: np.ndarray
    border_s_OP: np.ndarray


def _pass(
    phases: Sequence[Phase],
    ahead_O: np.ndarray,
    shared: Overlap,
    *,
    backward: bool = False,
) -> _Pass:
    columns = {
        name: np.array([getattr(phase, name) for phase in phases])
        for name in _PHASE_SECONDS
    }
    rows = passes.Phases(**{name: of_O[:, None] for name, of_O in columns.items()})
    # By what comes next: each option, as far as it is fetched ahead, and nothing.
    following = passes.Phases(
        **{
            name: np.append(np.where(ahead_O, of_O, 0.0), 0.0)[None, :]
            for name, of_O in columns.items()
        }
    )
    seconds = np.where(
        ahead_O[:, None],
        shared.beside(rows, following, backward=backward),
        passes.alone(rows, backward=backward),
    )
    layer_s_O = seconds.diagonal().copy()
    more_s = seconds - layer_s_O[:, None]
    first_s_O = passes.awaited(following, backward=backward)[0, :-1]
    waited_s = np.where(ahead_O[:, None], 0.0, first_s_O[None, :])
    return _Pass(layer_s_O, first_s_O, more_s[:, -1], more_s[:, :-1] + waited_s)


def _bytes(
    site: Site, segments: Sequence[SegmentPlan], memory: Sequence[LayerBytes]
) -> dict[str, Any]:
    """What layers and segments take, by field of `Options`."""
    size = site.workload.activation_bytes
    inputs_O = np.array([-(-layer.layer_input // size) for layer in memory])
    copies_O = np.array([-(-layer.bwd_copy // size) for layer in memory])
    width = arena_layouts.row_width(max(inputs_O.max(), copies_O.max()))
    pairs = list(zip(segments, memory, strict=True))
    return {
        "rest_O": np.array([layer.rest for layer in memory]),
        "stack_O": np.array([layer.saved + layer.fwd_copy for layer in memory]),
        "input_rows_O": -(-inputs_O // width),
        "copy_rows_O": -(-copies_O // width),
        "transient_O": np.array([layer.transient for layer in memory]),
        "loop_layers_O": np.array(
            [transients.loop_layers(prefetch=segment.prefetch) for segment in segments]
        ),
        "unrolled_O": np.array(
            [forecasts.short_bytes(site, segment, layer) for segment, layer in pairs]
        ),
        "row_bytes": width * size,
        "empty_bytes": arena_layouts.EMPTY_ELEMENTS * size,
        "further_bytes": transients.segment(site.workload),
    }

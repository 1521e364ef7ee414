import dataclasses
import itertools
import random

import numpy as np
import pytest

from mtuner_jax.hardware import machines
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import durations, forecasts, passes
from mtuner_jax.planning.plans import Plan, Saved, SegmentPlan
from mtuner_jax.planning.searching import options
from mtuner_jax.planning.sites import Site
from tests import small_plans

SMALL = small_plans.decoder(
    num_layers=6,
    widths=(2048, 5632),
    heads=(16, 4),
    ranks={"q_proj": 8, "gate_proj": 8},
    rows=(32, 1024),
    vocab_size=4096,
)
SETTINGS = (("pcie8", (2, 2, 2)), ("h200x2-pcie", (2,)), ("nvlink8", (2, 2, 2)))


def site_of(mesh_sizes, *, rows=2, merge_gathers=True):
    axes = Axes(data=mesh_sizes)
    return Site(workload=SMALL, axes=axes, rows=rows, merge_gathers=merge_gathers)


def found_for(machine, mesh_sizes, *, rows=2, merge_gathers=True):
    site = site_of(mesh_sizes, rows=rows, merge_gathers=merge_gathers)
    return options.worth_trying(site, machines.preset(machine))


# 24 MiB a row in all layers; 80 % of a host's memory over its eight devices.
@pytest.mark.parametrize(("gib", "most_rows"), [(1, 4), (2, 8), (4, 17)])
def test_inputs_wait_on_a_host_that_holds_those_of_all_layers(gib, most_rows):
    machine = dataclasses.replace(
        machines.preset("pcie8"), host_memory_bytes=gib * 2**30
    )
    on_host = Saved.LAYER_INPUT_ON_HOST
    most, more, many = (
        site_of((2, 2, 2), rows=rows) for rows in (most_rows, most_rows + 1, 10**6)
    )
    assert options.host_holds(most, machine, on_host)
    assert not options.host_holds(more, machine, on_host)
    assert options.host_holds(many, machines.preset("pcie8"), on_host)
    found = options.possible(more, machine)
    everywhere = options.treatments(Axes(data=(2, 2, 2)))
    assert list(found) == [
        segment
        for segment in everywhere
        if segment.saved is not Saved.LAYER_INPUT_ON_HOST
    ]


def priced(segment, machine, mesh_sizes):
    site = site_of(mesh_sizes)
    clock = durations.Clock(site=site, hardware=machines.preset(machine))
    memory = forecasts.layer_bytes(site, segment)
    return clock.layer(segment, memory), memory


def test_all_that_the_engine_can_do_is_tried():
    found = list(options.treatments(Axes(data=(2, 2))))
    assert len(found) == len(set(found))
    levels = {(s.rest_axes, s.fwd_keep_axes, s.bwd_keep_axes) for s in found}
    assert len(levels) == 9 + 4 + 1
    assert {(saved, level) for saved in Saved for level in levels} == {
        (s.saved, (s.rest_axes, s.fwd_keep_axes, s.bwd_keep_axes)) for s in found
    }


def test_what_is_gathered_is_gathered_ahead():
    for segment in options.treatments(Axes(data=(2, 2, 2))):
        if min(segment.fwd_keep_axes, segment.bwd_keep_axes) < 3:
            assert segment.prefetch


@pytest.mark.parametrize("mesh_sizes", [(1,), (1, 1)])
def test_one_device_holds_everything(mesh_sizes):
    found = list(options.treatments(Axes(data=mesh_sizes)))
    assert [segment.saved for segment in found] == list(Saved)
    assert {segment.rest_axes for segment in found} == {len(mesh_sizes)}
    assert not any(segment.prefetch for segment in found)


@pytest.mark.parametrize(("machine", "mesh_sizes"), SETTINGS)
def test_what_was_dropped_is_nowhere_better_than_something_kept(machine, mesh_sizes):
    kept = found_for(machine, mesh_sizes).segments
    prices = {segment: _values(segment, machine, mesh_sizes) for segment in kept}
    dropped = set(options.treatments(Axes(data=mesh_sizes))) - set(kept)
    assert bool(dropped) == (len(mesh_sizes) > 1)
    for segment in dropped:
        own = _values(segment, machine, mesh_sizes)
        assert any(
            other.prefetch == segment.prefetch and (values <= own).all()
            for other, values in prices.items()
        )


@pytest.mark.parametrize(("machine", "mesh_sizes"), SETTINGS)
def test_nothing_kept_is_nowhere_better_than_nothing_else_kept(machine, mesh_sizes):
    kept = found_for(machine, mesh_sizes).segments
    prices = [_values(segment, machine, mesh_sizes) for segment in kept]
    for index, own in enumerate(prices):
        for other, values in enumerate(prices):
            same_kind = kept[index].prefetch == kept[other].prefetch
            assert index == other or not same_kind or (values > own).any()


def _values(segment, machine, mesh_sizes):
    """All that can make a layer better than another one."""
    layer, memory = priced(segment, machine, mesh_sizes)
    times = [
        getattr(phase, name)
        for phase in (layer.forward, layer.backward)
        for name in ("compute_s", "link_s", "carry_s", "host_s")
    ]
    return np.array(times + list(dataclasses.astuple(memory)))


@pytest.mark.parametrize("merge_gathers", [False, True])
@pytest.mark.parametrize(("machine", "mesh_sizes"), SETTINGS)
def test_arrays_add_up_to_passes(machine, mesh_sizes, merge_gathers):
    found = found_for(machine, mesh_sizes, merge_gathers=merge_gathers)
    chosen = random.Random(0)
    for _ in range(40):
        number = chosen.randint(1, 3)
        sequence = [chosen.randrange(len(found)) for _ in range(number)]
        counts = [chosen.randint(1, 4) for _ in range(number)]
        seconds = found.start_s_O[sequence[0]] + found.end_s_O[sequence[-1]]
        seconds += (found.layer_s_O[sequence] * counts).sum()
        for one, two in itertools.pairwise(sequence):
            seconds += found.border_s_OP[one, two]
        want = _passes_s(found, (sequence, counts), machine, mesh_sizes, merge_gathers)
        assert seconds == pytest.approx(want, rel=1e-9)


def _passes_s(found, sequence_and_counts, machine, mesh_sizes, merge_gathers):
    card = machines.preset(machine)
    site = site_of(mesh_sizes, merge_gathers=merge_gathers)
    clock = durations.Clock(site=site, hardware=card)
    shared = passes.overlap(card, merge_gathers=merge_gathers)
    runs = {"forward": [], "backward": []}
    for option, count in zip(*sequence_and_counts, strict=True):
        segment = found.segments[option]
        layer = clock.layer(segment, forecasts.layer_bytes(site, segment))
        for name, directed in runs.items():
            directed.append(
                passes.EqualLayers(
                    phase=getattr(layer, name), count=count, prefetch=segment.prefetch
                )
            )
    return passes.over_layers(runs["forward"], shared) + passes.over_layers(
        runs["backward"][::-1], shared, backward=True
    )


def test_bytes_are_those_of_the_memory_model():
    found = found_for("pcie8", (2, 2, 2))
    for index, segment in enumerate(found.segments):
        _, memory = priced(segment, "pcie8", (2, 2, 2))
        assert found.rest_O[index] == memory.rest
        assert found.stack_O[index] == memory.saved + memory.fwd_copy
        assert found.transient_O[index] == memory.transient
        rows = found.input_rows_O[index] * found.row_bytes
        assert 0 <= rows - memory.layer_input < found.row_bytes
        rows = found.copy_rows_O[index] * found.row_bytes
        assert 0 <= rows - memory.bwd_copy < found.row_bytes


def test_what_segments_cost_is_as_the_forecast_counts_it():
    found = found_for("pcie8", (2, 2, 2))
    for index, segment in enumerate(found.segments):
        for layers in (1, 2, 3, 5):
            both = dataclasses.replace(segment, num_layers=layers)
            first = SegmentPlan(num_layers=5, prefetch=True)
            want = _segments_bytes((first, both)) - _segments_bytes((first,))
            short = layers < found.loop_layers_O[index]
            assert want == found.further_bytes + short * found.unrolled_O[index]


def _segments_bytes(segments):
    plan = Plan(
        mesh_sizes=(2, 2, 2),
        segments=segments,
        microbatch=2,
        accumulation=1,
        merge_gathers=True,
    )
    return forecasts.forecast(plan, SMALL).segments

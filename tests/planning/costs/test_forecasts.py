import dataclasses
import math

import pytest

from mtuner_jax.planning import plans
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts, transients
from mtuner_jax.planning.sites import Site
from tests import small_plans

MESH = (2, 2, 2)
SAVED = tuple(plans.Saved)


def workload(num_layers=4, **changes):
    made = small_plans.decoder(num_layers=num_layers, **small_plans.SEVEN)
    return dataclasses.replace(made, **changes)


def segment(num_layers=4, rest=0, *, fwd=None, bwd=None, **settings):
    return plans.SegmentPlan(
        num_layers=num_layers,
        rest_axes=rest,
        fwd_keep_axes=rest if fwd is None else fwd,
        bwd_keep_axes=rest if bwd is None else bwd,
        **settings,
    )


def plan(*segments, **settings):
    return plans.Plan(
        mesh_sizes=MESH,
        segments=segments,
        **{"microbatch": 1, "accumulation": 1, **settings},
    )


def site(of=None, *, rows=1, merge_gathers=False, mesh=MESH):
    return Site(
        workload=of or workload(),
        axes=Axes(data=mesh),
        rows=rows,
        merge_gathers=merge_gathers,
    )


def layer(made, **settings):
    return forecasts.layer_bytes(site(**settings), made)


@pytest.mark.parametrize("saved", SAVED)
def test_total_is_the_sum_of_its_parts_and_one_maximum(saved):
    made = plan(segment(4, saved=saved))
    forecast = forecasts.forecast(made, workload())
    static = forecasts.static_bytes(workload(), made)
    one = layer(made.segments[0])
    inputs = 4 * one.layer_input if one.layer_input else 2 * 64  # never without a row
    empty_tail = 2 * 64
    stacks = 4 * (one.rest + one.saved + one.fwd_copy) + inputs + empty_tail
    transient = max(static.loss_transient, one.transient)
    assert forecast.total_bytes == static.total_bytes + stacks + transient


def test_every_further_segment_costs_a_constant():
    together = forecasts.forecast(plan(segment(12)), workload(12)).total_bytes
    two, three = (
        forecasts.forecast(plan(*parts), workload(12)).total_bytes
        for parts in (2 * [segment(6)], 3 * [segment(4)])
    )
    assert three - two == two - together > 0


def test_loops_of_one_trip_cost_more_than_loops():
    short, long = (
        forecasts.forecast(plan(segment(count), segment(6 - count)), workload(6))
        for count in (1, 3)
    )
    assert short.segments > long.segments
    assert short.total_bytes > long.total_bytes


def test_a_short_segment_holds_no_second_copy_of_its_last_layer():
    whole, part = (
        forecasts.forecast(
            plan(segment(6), segment(2, fwd=axes, prefetch=True)), workload(8)
        )
        for axes in (3, 2)
    )
    copy = layer(segment(fwd=3)).fwd_copy
    assert whole.fwd_copies == 2 * copy == 2 * part.fwd_copies
    assert part.segments - whole.segments == copy


def test_what_the_tail_saves_lies_where_the_main_part_goes_back():
    cut = {"microbatch": 8, "tail_layers": 1, "tail_chunks": 8}
    parts = (segment(11), segment(1, saved=plans.Saved.LINEARS))
    small = forecasts.forecast(plan(*parts, **cut), workload(12))
    main = forecasts.layer_bytes(site(workload(12), rows=8), parts[0])
    assert small.saved == 0
    assert small.transient == main.transient


def test_inputs_on_the_host_take_their_size_there():
    on_host = plans.Saved.LAYER_INPUT_ON_HOST
    stream = 4096 * 4096 * 2
    whole = plan(segment(3, saved=on_host), segment(1), microbatch=4)
    assert forecasts.host_bytes(whole, workload()) == 3 * 4 * stream
    parts = plan(
        segment(1, saved=on_host),
        segment(3, saved=on_host),
        microbatch=4,
        tail_layers=3,
        tail_chunks=2,
    )
    assert forecasts.host_bytes(parts, workload()) == (4 + 3 * 2) * stream
    assert forecasts.host_bytes(plan(segment()), workload()) == 0


def test_a_large_tail_counts_its_stacks_and_its_boundary():
    cut = {"microbatch": 2, "tail_layers": 10, "tail_chunks": 2}
    parts = (segment(2), segment(10, saved=plans.Saved.LINEARS))
    made = plan(*parts, **cut)
    forecast = forecasts.forecast(made, workload(12))
    tail = layer(parts[1])
    static = forecasts.static_bytes(workload(12), made)
    stream = 2 * 4096 * 4096 * 2
    assert static.boundary == 2 * stream + workload().table_bytes
    assert forecast.transient == static.boundary + 10 * tail.saved + tail.transient


@pytest.mark.parametrize(
    ("saved", "features"),
    [
        (plans.Saved.LINEARS, 7 * 4096 + 3 * 11008),
        (plans.Saved.ATTENTION_AND_GATES, 4 * 4096 + 2 * 11008),
        (plans.Saved.ATTENTION, 4 * 4096),
        (plans.Saved.LAYER_INPUT, 0),
        (plans.Saved.LAYER_INPUT_ON_HOST, 0),
    ],
)
def test_saved_tensors_are_counted_by_their_width(saved, features):
    statistics = 4 * 32 if features else 0
    got = layer(segment(saved=saved), rows=3)
    assert got.saved == 3 * 4096 * (2 * features + statistics)


def test_narrow_keys_are_saved_narrow():
    narrow = dataclasses.replace(workload(), num_kv_heads=4)
    saved = plans.Saved.ATTENTION
    less = forecasts.saved_bytes(site(), saved)
    less -= forecasts.saved_bytes(site(narrow), saved)
    assert less == 4096 * 2 * 2 * 28 * 128


def test_layer_inputs_on_the_host_leave_the_arena():
    forecast = forecasts.forecast(
        plan(segment(saved=plans.Saved.LAYER_INPUT_ON_HOST)), workload()
    )
    assert forecast.step_arenas == 2 * 2 * 64  # a row each for main part and tail


def test_an_arena_with_copies_is_an_input_and_one_more_output():
    kept, not_kept = (
        forecasts.forecast(plan(segment(bwd=axes)), workload()) for axes in (1, 0)
    )
    assert kept.kept_arenas >= workload().layer_weight_bytes  # four of a quarter
    assert not_kept.kept_arenas == 0
    assert kept.outputs == not_kept.outputs + 8


@pytest.mark.parametrize(
    ("field", "more", "less"),
    [
        ("embedding", plans.Table.RESIDENT, plans.Table.SPLIT),
        ("head", plans.Table.RESIDENT, plans.Table.GATHERED),
    ],
)
def test_a_resident_table_adds_what_other_devices_held(field, more, less):
    big, small = (
        forecasts.forecast(plan(segment(), **{field: value}), workload()).tables
        for value in (more, less)
    )
    assert big - small == workload().table_bytes * 7 // 8


def test_tables_are_padded_to_the_devices():
    odd = dataclasses.replace(workload(), vocab_size=32001)
    for table in plans.Table:
        choice = plans.StepChoices(
            mesh_sizes=MESH, microbatch=1, accumulation=1, embedding=table, head=table
        )
        held = forecasts.static_bytes(odd, choice).tables - 2 * 4096
        rows = 32008 if table is plans.Table.RESIDENT else 4001
        assert held == 2 * rows * 4096 * 2


def test_sharded_adapters_are_gathered_for_the_step():
    whole, split = (
        forecasts.forecast(plan(segment(), adapters=state), workload())
        for state in (plans.AdapterState.REPLICATED, plans.AdapterState.SHARDED)
    )
    weights = 4 * workload().num_adapter_weights
    assert whole.adapters - split.adapters == 3 * weights * 7 // 8
    assert split.gradients - whole.gradients == weights


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_transients_grow_with_rows_and_with_what_is_gathered(rows):
    more = layer(segment(prefetch=True), rows=rows).transient
    assert more > layer(segment(), rows=rows).transient
    assert more < layer(segment(prefetch=True), rows=rows + 1).transient
    assert more > layer(segment(rest=3), rows=rows).transient
    copied = segment(prefetch=True, bwd=1)
    assert layer(copied, rows=rows).transient > more
    merged = layer(segment(prefetch=True), rows=rows, merge_gathers=True)
    assert merged.transient > more


def test_scores_of_all_blocks_are_held_without_cudnn():
    xla = site(dataclasses.replace(workload(max_length=1000), attention="xla"), rows=2)
    got = transients.score_bytes(xla)
    assert got == 2 * 2 * 32 * 4 * (512 * 512 + 488 * 1000)
    xla = site(dataclasses.replace(workload(), attention="xla"))
    more = transients.layer(xla, segment(rest=3)) - layer(segment(rest=3)).transient
    assert more == transients.score_bytes(xla)


def test_one_device_gathers_nothing():
    made = plans.static(name="fsdp", num_layers=4, mesh_sizes=(1,), rows=(1, 1))
    forecast = forecasts.forecast(made, workload())
    assert forecast.weights == 4 * (workload().layer_weight_bytes + 2 * 2 * 4096)
    assert forecast.tables == 2 * workload().table_bytes + 2 * 4096
    assert transients.gathered_bytes(workload(), plans.Table.GATHERED, devices=1) == 0


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_copies_are_whole_weights_at_their_ratio(axes):
    whole = workload().layer_weight_bytes
    got = layer(segment(fwd=axes, bwd=axes))
    assert got.fwd_copy == got.bwd_copy == whole // 2 ** (3 - axes)


def test_a_copy_at_the_ratio_of_rest_is_none():
    got = layer(segment(rest=2))
    assert got.fwd_copy == got.bwd_copy == 0


@pytest.mark.parametrize("mesh", [(3,), (5,), (2, 3), (7,)])
def test_every_ratio_is_exact_because_rows_are_padded(mesh):
    made, devices = site(mesh=mesh), math.prod(mesh)
    whole = forecasts.held_bytes(made, len(mesh))
    for axes in range(len(mesh)):
        sharing = math.prod(mesh[axes:])
        assert forecasts.held_bytes(made, axes) * sharing == whole
    padding = whole - workload().layer_weight_bytes
    widths = sum(linear.out_dim for linear in workload().linears)
    assert 0 < padding < devices * widths * 2


def test_weights_and_activations_have_dtypes_of_their_own():
    wide = dataclasses.replace(workload(), activation_dtype="float32")
    narrow, got = (
        layer(segment(fwd=3)),
        forecasts.layer_bytes(site(wide), segment(fwd=3)),
    )
    assert (got.rest, got.fwd_copy) == (narrow.rest, narrow.fwd_copy)
    assert got.layer_input == 2 * narrow.layer_input

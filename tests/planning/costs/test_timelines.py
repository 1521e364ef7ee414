import collections
import dataclasses
import itertools
import json
import random

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware import machines
from mtuner_jax.planning import sites
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts, passes, timelines
from mtuner_jax.planning.plans import AdapterState, Plan, Saved, SegmentPlan, Table
from mtuner_jax.planning.searching import options
from tests import small_plans

MESH = (2, 2, 2)
MACHINE = dataclasses.replace(machines.preset("pcie8"), overlap_slowdown=1.25)
SMALL = small_plans.decoder(
    num_layers=6,
    widths=(1024, 2816),
    heads=(8, 4),
    ranks={"q_proj": 8, "gate_proj": 8},
    rows=(30, 1024),
    vocab_size=4096,
)
TREATMENTS = list(options.treatments(Axes(data=MESH)))


def random_plan(seed):
    chosen = random.Random(seed)
    counts = [chosen.randint(1, 3), chosen.randint(1, 2)]
    counts.append(SMALL.num_layers - sum(counts))
    segments = tuple(
        dataclasses.replace(chosen.choice(TREATMENTS), num_layers=count)
        for count in counts
    )
    tail = chosen.randint(0, 3)
    return Plan(
        mesh_sizes=MESH,
        segments=segments,
        microbatch=4,
        accumulation=chosen.randint(1, 3),
        tail_layers=sum(counts[3 - tail :]),
        tail_chunks=chosen.choice((2, 4)) if tail else 1,
        embedding=chosen.choice(list(Table)),
        head=chosen.choice(list(Table)),
        adapters=chosen.choice(list(AdapterState)),
        merge_gathers=chosen.random() < 0.5,
    )


def plain(*, num_layers=SMALL.num_layers, **settings):
    segment = SegmentPlan(num_layers=num_layers, **{"prefetch": True, **settings})
    return Plan(
        mesh_sizes=MESH,
        segments=(segment,),
        microbatch=4,
        accumulation=1,
        merge_gathers=True,
    )


def of_stream(played, stream):
    return [event for event in played.events if event.stream == stream]


@pytest.mark.parametrize("seed", range(40))
def test_playing_a_step_takes_what_adding_it_up_gives(seed):
    plan = random_plan(seed)
    played = timelines.replay(plan, SMALL, MACHINE)
    added = passes.step_s(plan, SMALL, MACHINE)
    assert played.step_s == pytest.approx(added, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_does_one_thing_at_a_time(seed):
    played = timelines.replay(random_plan(seed), SMALL, MACHINE)
    for stream in (timelines.COMPUTE, timelines.LINK, timelines.HOST):
        for one, two in itertools.pairwise(of_stream(played, stream)):
            assert two.start_s >= one.end_s - 1e-12
    assert max(event.end_s for event in played.events) <= played.step_s * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_computed_and_exposed_seconds_are_the_step(seed):
    played = timelines.replay(random_plan(seed), SMALL, MACHINE)
    compute = of_stream(played, timelines.COMPUTE)
    assert played.compute_s == pytest.approx(sum(event.seconds for event in compute))
    assert played.compute_s + played.exposed_s == pytest.approx(played.step_s)
    link = of_stream(played, timelines.LINK)
    assert played.communication_s == pytest.approx(sum(e.seconds for e in link))
    waited = played.exposed_s - sum(
        e.seconds for e in of_stream(played, timelines.HOST)
    )
    assert waited <= played.communication_s * (1 + 1e-9)


def test_tokens_of_padding_do_not_count():
    played = timelines.replay(plain(), SMALL, MACHINE)
    assert played.tokens_per_s == pytest.approx(30 * 1024 / played.step_s)


def layers_of(played, kind):
    found = [e.layer for e in played.events if e.kind == kind]
    return [layer for layer, _ in itertools.groupby(found)]


def test_layers_run_in_the_engines_order():
    plan = dataclasses.replace(
        plain(num_layers=4),
        segments=(plain(num_layers=4).segments[0], plain(num_layers=2).segments[0]),
        tail_layers=2,
        tail_chunks=2,
        accumulation=2,
    )
    played = timelines.replay(plan, SMALL, MACHINE)
    assert layers_of(played, "forward") == [0, 1, 2, 3, 4, 5, 4, 5] * 2
    assert layers_of(played, "backward") == [5, 4, 5, 4, 3, 2, 1, 0] * 2
    losses = [event for event in played.events if event.kind == "loss"]
    updates = [event for event in played.events if event.kind == "update"]
    assert (len(losses), len(updates)) == (4, 1)


def test_a_gather_runs_beside_the_layer_before():
    played = timelines.replay(plain(), SMALL, MACHINE)
    starts = {
        event.layer: event.start_s
        for event in reversed(played.events)
        if event.kind == "forward"
    }
    gathers = [
        event for event in of_stream(played, timelines.LINK) if event.kind == "weights"
    ]
    forward, backward = gathers[: SMALL.num_layers], gathers[SMALL.num_layers :]
    assert [event.layer for event in forward] == [0, 1, 2, 3, 4, 5]
    assert [event.layer for event in backward] == [5, 4, 3, 2, 1, 0]
    for event in forward[1:]:
        assert event.start_s == starts[event.layer - 1]
    assert forward[0].end_s == starts[0]


def test_gathers_are_those_of_the_plan():
    plan = plain(fwd_keep_axes=1)
    played = timelines.replay(plan, SMALL, MACHINE)
    found = collections.Counter(
        event.axes for event in played.events if event.kind == "weights"
    )
    assert found == {(0, 1): 6, (1, 3): 12}
    received = sum(e.num_bytes for e in played.events if e.kind == "weights")
    whole = SMALL.layer_weight_bytes
    assert received == 6 * (whole * 7 // 8 + whole * 3 // 4)


def test_nothing_is_gathered_where_all_is_whole():
    plan = plain(rest_axes=3, fwd_keep_axes=3, bwd_keep_axes=3, prefetch=False)
    played = timelines.replay(plan, SMALL, MACHINE)
    assert not [event for event in played.events if event.kind == "weights"]


def test_inputs_travel_to_the_host_and_back_once():
    plan = plain(saved=Saved.LAYER_INPUT_ON_HOST)
    events = of_stream(timelines.replay(plan, SMALL, MACHINE), timelines.HOST)
    assert [event.layer for event in events] == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    assert {event.num_bytes for event in events} == {4 * 1024 * 1024 * 2}


def peak_bytes(plan):
    played = timelines.replay(plan, SMALL, MACHINE)
    return max(sum(instant.num_bytes.values()) for instant in played.memory)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_alive_fits_into_what_is_allocated(seed):
    plan = random_plan(seed)
    allocated = forecasts.forecast(plan, SMALL).total_bytes
    assert 0.5 * allocated < peak_bytes(plan) <= allocated


def with_tail(**settings):
    """Three layers that keep nothing, and a tail of three in two parts."""
    segments = (
        plain(num_layers=3).segments[0],
        plain(num_layers=3, **settings).segments[0],
    )
    return dataclasses.replace(plain(), segments=segments, tail_layers=3, tail_chunks=2)


@pytest.mark.parametrize(
    "plan",
    [
        plain(),
        plain(saved=Saved.LINEARS),
        plain(fwd_keep_axes=3, prefetch=False),
        plain(rest_axes=1, fwd_keep_axes=2, bwd_keep_axes=1),
        plain(rest_axes=3, fwd_keep_axes=3, bwd_keep_axes=3),
        with_tail(saved=Saved.LINEARS),
        with_tail(rest_axes=1, fwd_keep_axes=3, bwd_keep_axes=1, saved=Saved.LINEARS),
    ],
)
def test_the_peak_is_what_is_allocated_but_for_results_and_segments(plan):
    forecast = forecasts.forecast(plan, SMALL)
    at_no_instant = forecast.outputs + forecast.segments
    want = forecast.total_bytes - at_no_instant
    assert peak_bytes(plan) == pytest.approx(want, abs=2**12)


def test_a_boundary_is_there_while_the_tail_runs_and_not_longer():
    plan = dataclasses.replace(with_tail(), accumulation=2)
    played = timelines.replay(plan, SMALL, MACHINE)
    found = [instant.num_bytes["boundary"] > 0 for instant in played.memory]
    shown = [there for there, _ in itertools.groupby(found)]
    assert shown == [False, True, False, True, False]
    inside = {
        event.layer
        for event in played.events
        for instant, after in itertools.pairwise(played.memory)
        if event.kind in ("forward", "backward")
        and instant.time_s <= event.start_s < after.time_s
        and instant.num_bytes["boundary"]
    }
    assert inside == {3, 4, 5}


@pytest.mark.parametrize("seed", range(20))
def test_a_step_leaves_memory_as_it_found_it(seed):
    first, *_, last = timelines.replay(random_plan(seed), SMALL, MACHINE).memory
    assert first.num_bytes == last.num_bytes
    times = [
        instant.time_s
        for instant in timelines.replay(random_plan(seed), SMALL, MACHINE).memory
    ]
    assert times == sorted(times)


def test_copies_leave_as_inputs_come():
    plan = plain(bwd_keep_axes=1)
    memory = timelines.replay(plan, SMALL, MACHINE).memory
    copy = forecasts.held_bytes(sites.main(plan, SMALL), 1)
    kept = [instant.num_bytes["kept_across_steps"] // copy for instant in memory]
    inputs = [instant.num_bytes["layer_inputs"] // (4 * 2**21) for instant in memory]
    assert (kept[0], max(inputs), kept[-1], inputs[-1]) == (6, 6, 6, 0)
    assert all(one + two <= 6 for one, two in zip(kept, inputs, strict=True))


def test_json_is_the_same_to_the_byte_and_whole():
    plan = random_plan(1)
    text = timelines.to_json(timelines.replay(plan, SMALL, MACHINE))
    assert text == timelines.to_json(timelines.replay(plan, SMALL, MACHINE))
    content = json.loads(text)
    played = timelines.replay(plan, SMALL, MACHINE)
    assert len(content["events"]) == len(played.events)
    assert content["step_s"] == pytest.approx(played.step_s, abs=1e-9)
    assert content["memory"][0]["num_bytes"] == played.memory[0].num_bytes
    assert timelines.from_json(text).memory[0] == played.memory[0]
    assert timelines.to_json(timelines.from_json(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "timeline: not JSON"),
        ("[]", "timeline: a JSON object, not list"),
        (json.dumps({"version": 0}), "version 0 is not 1"),
        (
            json.dumps({"version": 1, "events": []}),
            "timeline: misses the field .*memory",
        ),
    ],
)
def test_what_is_no_timeline_is_an_error_that_names_the_file(tmp_path, text, message):
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"timeline.json: .*{message}"):
        timelines.read(path)
    with pytest.raises(ConfigError, match=r"nothing.json: .*No such file"):
        timelines.read(tmp_path / "nothing.json")

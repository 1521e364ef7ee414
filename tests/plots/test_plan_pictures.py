import numpy as np
import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import timelines
from mtuner_jax.plots import plan_pictures
from tests.small_plans import PLAN, PLAYED

SHOWN = plan_pictures.picture(PLAN, PLAYED)


def held(layer, time_s):
    """Axes over which a layer is held just after a time."""
    return SHOWN.held_axes[layer, np.searchsorted(SHOWN.edges_s, time_s, "right") - 1]


def runs(kind, layer):
    """(start, end) of each of a layer's passes, waiting included."""
    found = []
    for event in (e for e in PLAYED.events if e.kind in ("forward", "backward")):
        if found and found[-1][0] == (event.kind, event.layer):
            found[-1][2] = event.end_s
        else:
            found.append([(event.kind, event.layer), event.start_s, event.end_s])
    return [(start, end) for key, start, end in found if key == (kind, layer)]


def test_ratios_are_shares_on_a_device():
    assert SHOWN.ratios == (1 / 8, 1 / 4, 1 / 2, 1.0)


@pytest.mark.parametrize("layer", range(4))
def test_a_layer_is_whole_while_it_runs(layer):
    for start_s, end_s in [*runs("forward", layer), *runs("backward", layer)]:
        for part in (0.0, 0.5, 0.999):
            assert held(layer, start_s + part * (end_s - start_s)) == 3


def test_a_copy_across_steps_waits_at_both_ends_and_between_microbatches():
    (_, first_end), (second, _) = runs("forward", 0)
    backward, end_s = runs("backward", 0)[0]
    assert held(0, 0.0) == SHOWN.held_axes[0, -1] == 2
    assert held(0, first_end) == 0
    assert held(0, end_s) == 2
    assert backward < end_s < second


def test_a_copy_to_the_backward_pass_stays_until_then():
    (_, forward_end), _ = runs("forward", 1)
    (backward, backward_end), _ = runs("backward", 1)
    assert held(1, 0.0) == 0
    assert held(1, forward_end) == held(1, (forward_end + backward) / 2) == 3
    assert held(1, backward_end) == 0


def test_the_tail_is_gathered_for_each_chunk():
    assert len(runs("forward", 3)) == PLAN.accumulation * PLAN.tail_chunks
    assert all(held(3, end_s) == 1 for _, end_s in runs("backward", 3))


def test_memory_is_that_of_the_replay():
    total = sum(SHOWN.num_bytes.values())
    most = max(sum(instant.num_bytes.values()) for instant in PLAYED.memory)
    assert total.max() == most
    assert set(SHOWN.num_bytes) == set(PLAYED.memory[0].num_bytes)


def test_bars_of_computation_fill_the_step_with_what_waits():
    computes = SHOWN.bars[timelines.COMPUTE]
    seconds = {kind: sum(s for _, s in spans) for kind, spans in computes.items()}
    assert sum(seconds.values()) == pytest.approx(PLAYED.step_s)
    assert seconds["waits"] == pytest.approx(PLAYED.exposed_s)
    links = SHOWN.bars[timelines.LINK].values()
    total = sum(s for spans in links for _, s in spans)
    assert total == pytest.approx(PLAYED.communication_s)


def test_shares_of_moments_add_up_to_the_spans():
    spans = [(0.0, 1.0), (1.5, 0.25), (3.0, 1.0)]
    got = plan_pictures.shares(spans, np.array([0.0, 0.5, 2.0, 3.5, 4.0]))
    np.testing.assert_allclose(got, [1.0, 0.5, 1 / 3, 1.0])


def test_one_microbatch_of_several_is_shown():
    whole = plan_pictures.picture(PLAN, PLAYED, microbatch=1).window_s
    assert PLAYED.step_s / 3 < whole[0] < whole[1] == PLAYED.step_s
    with pytest.raises(ConfigError, match="the plan has 2, counted from 0"):
        plan_pictures.picture(PLAN, PLAYED, microbatch=2)


def test_a_timeline_of_another_plan_is_refused():
    other = plans.static(
        name="fsdp", num_layers=3, mesh_sizes=PLAN.mesh_sizes, rows=(2, 2)
    )
    with pytest.raises(ConfigError, match="timeline of 4 layers, plan of 3"):
        plan_pictures.picture(other, PLAYED)


def test_a_written_timeline_shows_the_same(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text(timelines.to_json(PLAYED))
    read = plan_pictures.picture(PLAN, timelines.read(path))
    assert read.bars.keys() == SHOWN.bars.keys()
    np.testing.assert_allclose(read.edges_s, SHOWN.edges_s, atol=1e-8)
    np.testing.assert_array_equal(read.held_axes, SHOWN.held_axes)

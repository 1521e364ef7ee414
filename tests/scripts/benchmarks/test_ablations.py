import dataclasses

import pytest

from mtuner_jax.planning.costs import forecasts
from mtuner_jax.planning.plans import Saved
from scripts.benchmarks import ablations
from tests.scripts.benchmarks.test_mechanisms import BUDGET_BYTES, MESH, PCIE, WORKLOAD


def make_place(budget_bytes=BUDGET_BYTES, **changed):
    return ablations.Place(
        workload=dataclasses.replace(WORKLOAD, **changed),
        hardware=PCIE,
        mesh_sizes=MESH,
        budget_bytes=budget_bytes,
    )


def held(plan):
    return {axes for s in plan.segments for axes in (s.rest_axes, s.bwd_keep_axes)}


@pytest.fixture(scope="module")
def fillings():
    place = make_place(3 * 2**30, num_layers=12, global_batch_size=8)
    return place, ablations.fillings(place)


def test_fillings_hold_only_their_ratios(fillings):
    _, found = fillings
    assert held(found[ablations.NOTHING_KEPT]) == {0}
    assert held(found[ablations.ONE_RATIO]) == {0, 3}
    assert held(found[ablations.PROGRESSIVE]) & {1, 2}


def test_fillings_differ_in_nothing_else(fillings):
    place, found = fillings
    for plan in found.values():
        assert {s.saved for s in plan.segments} == {Saved.LAYER_INPUT}
        assert plan.tail_layers == 0
        taken = forecasts.forecast(plan, place.workload).total_bytes
        assert taken <= place.budget_bytes
    settings = [
        dataclasses.replace(plan, segments=found[ablations.NOTHING_KEPT].segments)
        for plan in found.values()
    ]
    assert settings[0] == settings[1] == settings[2]


def test_a_freer_filling_is_faster(fillings):
    place, found = fillings
    seconds = [place.step_s(plan) for plan in found.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


def test_a_tail_is_compared_with_the_best_without():
    found = ablations.tails(make_place(12 * 2**30 // 10, global_batch_size=64))
    assert found[ablations.NO_TAIL].tail_layers == 0
    assert found[ablations.TAIL].tail_chunks > 1
    saved = {s.saved for plan in found.values() for s in plan.segments}
    assert Saved.LAYER_INPUT_ON_HOST not in saved


def test_where_nothing_fits_there_is_nothing_to_compare():
    assert ablations.fillings(make_place(2**20)) == {}
    assert ablations.tails(make_place(2**20)) == {}

"""No plan within the limits is better than the one that was found: brute force."""

import random

import pytest

from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import passes
from mtuner_jax.planning.searching import options, search
from tests.planning.searching import brute_force

SAME = 1e-9


def check_best(scores, prices, budget_bytes):
    """The plan found is the best of all that fit."""
    found = brute_force.fastest(scores, budget_bytes)
    plan = found.plan
    assert brute_force.num_bytes(plan, scores.workload) <= budget_bytes
    assert found.forecast.total_bytes == brute_force.num_bytes(plan, scores.workload)
    seconds = passes.step_s(plan, scores.workload, scores.machine)
    share = 1 + search.SEGMENT_SHARE * (len(plan.segments) - 1)
    want = min(one for one, taken in prices if taken <= budget_bytes)
    assert seconds * share == pytest.approx(want, rel=SAME)


@pytest.mark.parametrize("seed", range(14))
def test_on_one_device_nothing_within_the_limits_is_better(seed):
    layers = 2 + seed % 3
    rows = 1 + min(seed // 3 % 3, 5 - layers)
    scores = brute_force.scores_of(seed, (1,), num_layers=layers, rows=rows)
    workload = scores.workload
    found = brute_force.all_plans(workload, (1,), brute_force.heads(workload, (1,)))
    prices = [
        (scores.score(plan), brute_force.num_bytes(plan, workload)) for plan in found
    ]
    for budget_bytes in brute_force.budgets(prices, seed, 4):
        check_best(scores, prices, budget_bytes)


@pytest.mark.parametrize("seed", (0, 1))
def test_on_two_devices_nothing_within_the_limits_is_better(seed):
    scores = brute_force.scores_of(seed, (2,), num_layers=2, rows=1)
    chosen = list(brute_force.heads(scores.workload, (2,)))
    one_of_each = {head["merge_gathers"]: head for head in chosen}.values()
    found = list(brute_force.all_plans(scores.workload, (2,), one_of_each))
    prices = list(brute_force.price_heads(chosen, found, scores))
    for budget_bytes in brute_force.budgets(prices, seed, 6):
        check_best(scores, prices, budget_bytes)


@pytest.mark.parametrize("seed", (*range(8), 9, 10))
def test_no_random_plan_and_no_neighbour_is_better(seed):
    mesh_sizes = ((2,), (2, 2))[seed % 2]
    layers, rows = 2 + seed % 3, 1 + seed // 2 % 3
    scores = brute_force.scores_of(seed, mesh_sizes, num_layers=layers, rows=rows)
    workload, chosen = scores.workload, random.Random(seed)
    treatments = list(options.treatments(Axes(data=mesh_sizes)))
    sampled = [
        brute_force.random_plan(workload, mesh_sizes, treatments, chosen)
        for _ in range(150)
    ]
    prices = [
        (scores.score(plan), brute_force.num_bytes(plan, workload)) for plan in sampled
    ]
    for budget_bytes in brute_force.budgets(prices, seed, 3):
        plan = brute_force.fastest(scores, budget_bytes).plan
        near = [
            (scores.score(other), brute_force.num_bytes(other, workload))
            for other in brute_force.neighbours(plan, workload, treatments)
        ]
        assert len(near) > len(treatments)
        check_best_known(scores, plan, near + prices, budget_bytes)


def check_best_known(scores, plan, prices, budget_bytes):
    """None of these plans that fits is better than this one."""
    assert brute_force.num_bytes(plan, scores.workload) <= budget_bytes
    assert plan.rows >= scores.workload.global_batch_size
    fitting = [one for one, taken in prices if taken <= budget_bytes]
    assert scores.score(plan) <= min(fitting) * (1 + SAME)


def test_scores_of_these_tests_are_those_of_the_models():
    scores, chosen = (
        brute_force.scores_of(3, (2, 2), num_layers=4, rows=2),
        random.Random(3),
    )
    treatments = list(options.treatments(Axes(data=(2, 2))))
    for _ in range(20):
        plan = brute_force.random_plan(scores.workload, (2, 2), treatments, chosen)
        seconds = passes.step_s(plan, scores.workload, scores.machine)
        further = search.SEGMENT_SHARE * (len(plan.segments) - 1)
        want = seconds * (1 + further)
        assert scores.score(plan) == pytest.approx(want, rel=1e-12)

import dataclasses
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts
from mtuner_jax.planning.searching import limits, search, shortages
from tests import small_plans
from tests.planning.searching import brute_force

SAME = 1e-9


def test_more_memory_is_never_slower():
    scores = brute_force.scores_of(5, (2, 2), num_layers=6, rows=2)
    machine, workload = scores.machine, scores.workload
    least = shortages.least_bytes(workload, machine, Axes(data=(2, 2)))
    searcher = search.Searcher(workload, machine, mesh_sizes=(2, 2))
    found = [searcher.best(least + least * step // 8) for step in range(20)]
    times = [one.score_s for one in found]
    for before, after in itertools.pairwise(times):
        assert after <= before * (1 + SAME)
    assert times[-1] < times[0]


def test_the_same_plan_to_the_byte_in_every_process():
    scores = brute_force.scores_of(7, (2, 2), num_layers=4, rows=2)
    machine, workload = scores.machine, scores.workload
    budget_bytes = shortages.least_bytes(workload, machine, Axes(data=(2, 2))) * 5 // 4
    want = plans.to_json(brute_force.fastest(scores, budget_bytes).plan)
    assert plans.to_json(brute_force.fastest(scores, budget_bytes).plan) == want
    program = "\n".join(
        (
            "from mtuner_jax.hardware import machines",
            "from mtuner_jax.planning import plans",
            "from mtuner_jax.planning.searching import search",
            "from mtuner_jax.planning.workloads import LinearSizes, Workload",
            f"workload = {workload!r}",
            f"machine = machines.fitted(machines.preset({machine.name!r}), (2, 2))",
            "found = search.fastest(workload, machine, mesh_sizes=(2, 2), "
            f"budget_bytes={budget_bytes})",
            "print(plans.to_json(found.plan), end='')",
        )
    )
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=pathlib.Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == want


@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_the_global_batch_is_covered_and_not_one_microbatch_more(rows):
    scores = brute_force.scores_of(11, (2,), num_layers=3, rows=1)
    workload = dataclasses.replace(scores.workload, global_batch_size=rows)
    scores = brute_force.Scores(workload, scores.machine, (2,))
    plan = brute_force.fastest(scores, 2**40).plan
    assert 0 <= plan.rows - rows < 2 * plan.microbatch


def test_a_step_that_computes_all_the_time_has_one_segment_and_says_so():
    made = brute_force.random_workload(2, mesh_sizes=(2,), num_layers=4, rows=64)
    workload = dataclasses.replace(made, max_length=4096)
    machine = machines.fitted(machines.preset("h200x2"), (2,))
    found = brute_force.fastest(brute_force.Scores(workload, machine, (2,)), 2**40)
    assert limits.find(found).binds is limits.Binds.COMPUTE
    assert limits.find(found).reason.startswith("computation is")
    assert len(found.plan.segments) == 1


SEVENTY = {"num_layers": 80, "widths": (8192, 28672), "heads": (64, 8)}
PCIE8 = machines.preset("pcie8")


def seventy_on_pcie(budget_gib, *, rows=8, machine=PCIE8):
    """70B, rows of 1024 tokens; a row a card exposes every gather."""
    return search.fastest(
        small_plans.decoder(**SEVENTY, rows=(rows, 1024)),
        machine,
        mesh_sizes=(2, 2, 2),
        budget_bytes=budget_gib * 2**30,
    )


def test_the_hosts_memory_is_not_exceeded_where_it_is_known():
    workload = small_plans.decoder(**SEVENTY, rows=(32, 1024))
    free = seventy_on_pcie(22, rows=32)
    taken = forecasts.host_bytes(free.plan, workload)
    # A fifth of a host is not to be pinned; with what is left, half of it fits.
    host = dataclasses.replace(PCIE8, host_memory_bytes=taken * 8 * 5 // 8)
    found = seventy_on_pcie(22, rows=32, machine=host)
    assert taken > 0
    assert forecasts.host_bytes(found.plan, workload) <= host.host_budget_bytes
    assert host.host_budget_bytes == pytest.approx(taken / 2, rel=1e-6)
    assert found.timeline.step_s > free.timeline.step_s


def test_what_more_memory_would_win_is_told_up_to_the_card():
    found = seventy_on_pcie(29)
    assert limits.find(found).binds is limits.Binds.MEMORY
    assert limits.find(found).reason.startswith("communication is exposed for 8")
    shares = re.findall(
        r"(\d+\.\d)% faster with (\d+\.\d) GiB", limits.find(found).reason
    )
    (near, near_gib), (most, most_gib) = [map(float, pair) for pair in shares]
    assert 1 < near < most
    assert 29 < near_gib < most_gib < PCIE8.memory_bytes / 2**30


def test_a_full_card_is_told_instead_of_memory_that_no_card_has():
    found = seventy_on_pcie(39)
    assert limits.find(found).binds is limits.Binds.MEMORY
    assert limits.find(found).reason.endswith("takes more than the 39.4 GiB of a card")


def test_what_no_memory_hides_is_bound_by_the_link():
    scores = brute_force.scores_of(0, (2,), num_layers=2, rows=1)
    found = brute_force.fastest(scores, 2**40)
    assert limits.find(found).binds is limits.Binds.LINK
    assert limits.find(found).reason.endswith("of the step with any memory")


def test_a_budget_below_the_least_names_the_least_and_what_lowers_it():
    scores = brute_force.scores_of(4, (2, 2), num_layers=4, rows=2)
    least = shortages.least_bytes(scores.workload, scores.machine, Axes(data=(2, 2)))
    fitting = brute_force.fastest(scores, least).plan
    assert brute_force.num_bytes(fitting, scores.workload) <= least
    half = scores.workload.max_length // 2
    match = (
        f"no plan fits.* needs at least {least:,} bytes.*the budget is {least - 1:,} "
        f".*raise memory_budget, or .*lower max_length to {half} "
    )
    with pytest.raises(ConfigError, match=match):
        brute_force.fastest(scores, least - 1)


def test_no_axes_are_one_device():
    scores = brute_force.scores_of(6, (1,), num_layers=3, rows=2)
    one = brute_force.fastest(scores, 2**40).plan
    none = brute_force.fastest(
        brute_force.Scores(scores.workload, scores.machine, ()), 2**40
    ).plan
    assert none == one
    assert one.mesh_sizes == (1,)
    assert {segment.rest_axes for segment in one.segments} == {1}

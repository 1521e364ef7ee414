import dataclasses

import pytest

from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import passes
from mtuner_jax.planning.plans import AdapterState, Saved, SegmentPlan, Table
from mtuner_jax.planning.searching import search
from scripts.benchmarks import mechanisms
from tests import small_plans

MESH = (2, 2, 2)
BUDGET_BYTES = 5 * 2**29
WORKLOAD = small_plans.decoder(num_layers=4, rows=(16, 1024), **small_plans.SEVEN)
PCIE = machines.preset("pcie8")
PLACE = {"workload": WORKLOAD, "hardware": PCIE, "mesh_sizes": MESH}


def make_plan(*segments, **settings):
    return plans.Plan(
        mesh_sizes=MESH, segments=segments, microbatch=2, accumulation=1, **settings
    )


def test_shares_are_of_layers_or_all_or_nothing():
    plan = make_plan(
        SegmentPlan(num_layers=2, bwd_keep_axes=3),
        SegmentPlan(num_layers=1, rest_axes=1, fwd_keep_axes=1, bwd_keep_axes=1),
        SegmentPlan(num_layers=1, fwd_keep_axes=2, saved=Saved.LAYER_INPUT_ON_HOST),
        SegmentPlan(num_layers=4, saved=Saved.ATTENTION),
        tail_layers=4,
        tail_chunks=2,
        head=Table.SPLIT,
        adapters=AdapterState.SHARDED,
    )
    shares = {name: m.share(plan) for name, m in mechanisms.ALL.items()}
    assert shares == {
        "held": 2 / 8,
        "bwd_keep": 2 / 8,
        "saved": 4 / 8,
        "on_host": 1 / 8,
        "tail": 4 / 8,
        "mix": 1.0,
        "tables": 1.0,
        "adapters": 1.0,
    }


def test_plain_sharding_uses_no_mechanism():
    plan = make_plan(SegmentPlan(num_layers=5), SegmentPlan(num_layers=3))
    assert not any(m.share(plan) for m in mechanisms.ALL.values())


def test_one_device_holds_everything_and_nothing_more():
    one = plans.static(name="fsdp", num_layers=8, mesh_sizes=(1,), rows=(2, 1))
    assert mechanisms.ALL["held"].share(one) == 0.0


@pytest.fixture(scope="module")
def best():
    return search.Searcher(**PLACE).best(BUDGET_BYTES)


# One of each kind: of layers, tail, mix, tables and adapters.
@pytest.mark.parametrize("name", ["held", "saved", "tail", "mix", "tables"])
def test_without_a_mechanism_no_plan_uses_it_or_is_faster(name, best):
    mechanism = mechanisms.ALL[name]
    left = search.Searcher(**PLACE, allowed=mechanism.without).best(BUDGET_BYTES)
    assert left is not None
    assert mechanism.share(left.plan) == 0.0
    # Scores hold the price of further segments, so they compare; seconds may not.
    assert left.score_s >= best.score_s * (1 - 1e-9)
    if mechanism.share(best.plan) == 0.0:
        assert left.score_s == pytest.approx(best.score_s)


def test_a_slow_link_makes_held_weights_worth_more():
    worths = []
    for factor in (0.5, 16.0):
        links = tuple(
            dataclasses.replace(link, bytes_per_s=factor * link.bytes_per_s)
            for link in PCIE.links
        )
        machine = dataclasses.replace(PCIE, links=links)
        place = PLACE | {"hardware": machine}
        seconds = [
            passes.step_s(searcher.best(BUDGET_BYTES).plan, WORKLOAD, machine)
            for searcher in (
                search.Searcher(**place),
                search.Searcher(**place, allowed=mechanisms.ALL["held"].without),
            )
        ]
        worths.append(seconds[1] / seconds[0])
    assert worths[0] > worths[1] >= 1 - 1e-9

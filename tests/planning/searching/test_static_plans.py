import pytest

from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.searching import search, static_plans
from tests import small_plans

WORKLOAD = small_plans.decoder(
    num_layers=8,
    widths=(1024, 2816),
    heads=(8, 4),
    ranks={"q_proj": 8, "v_proj": 8},
    rows=(16, 1024),
    vocab_size=4096,
)
MESH = (2, 2, 2)


def best(budget_bytes):
    machine = machines.preset("pcie8")
    found = static_plans.best(
        WORKLOAD, machine, mesh_sizes=MESH, budget_bytes=budget_bytes
    )
    return {static.name: static for static in found}


def test_settings_are_those_that_peers_offer():
    assert list(static_plans.settings(Axes(data=MESH))) == [
        "fsdp",
        "zero2",
        "hsdp-1/4",
        "hsdp-1/2",
        "replicated",
    ]
    assert list(static_plans.settings(Axes(data=(2,)))) == [
        "fsdp",
        "zero2",
        "replicated",
    ]
    assert list(static_plans.settings(Axes(data=(1,)))) == ["replicated"]


def test_each_setting_is_priced_as_the_models_price_its_plan():
    machine = machines.preset("pcie8")
    for name, static in best(2**34).items():
        assert static.plan is not None, name
        total = forecasts.forecast(static.plan, WORKLOAD).total_bytes
        assert static.total_bytes == total
        played = timelines.replay(static.plan, WORKLOAD, machine)
        assert static.step_s == pytest.approx(played.step_s, rel=1e-6)
        assert len(static.plan.segments) == 1
        assert static.plan.rows >= WORKLOAD.global_batch_size
        assert static.plan.tail_chunks == 1


def test_no_other_variant_of_plain_sharding_is_faster():
    machine, won = machines.preset("pcie8"), best(2**34)["fsdp"]
    for saved in plans.Saved:
        for rows in ((2, 1), (1, 2)):
            plan = plans.static(
                name="fsdp",
                num_layers=WORKLOAD.num_layers,
                mesh_sizes=MESH,
                rows=rows,
                saved=saved,
                prefetch=True,
                merge_gathers=True,
            )
            assert won.step_s <= timelines.replay(plan, WORKLOAD, machine).step_s


def test_setting_that_cannot_fit_says_what_it_needs():
    budget_bytes = WORKLOAD.num_layers * WORKLOAD.layer_weight_bytes
    tight = best(budget_bytes)
    assert tight["replicated"].plan is None
    assert tight["replicated"].total_bytes > budget_bytes
    assert tight["fsdp"].plan is not None


@pytest.mark.parametrize("budget_bytes", [2**28, 2**29, 2**30, 2**34])
def test_the_planned_step_is_as_fast_as_any_static_one(budget_bytes):
    found = search.fastest(
        WORKLOAD,
        machines.preset("pcie8"),
        mesh_sizes=MESH,
        budget_bytes=budget_bytes,
    )
    for static in best(budget_bytes).values():
        if static.plan is not None:
            assert found.timeline.step_s <= static.step_s * (1 + search.SEGMENT_SHARE)

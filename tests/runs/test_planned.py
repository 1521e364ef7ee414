"""Plans are searched again, smaller, as often as it is of use and no more often."""

import pytest

from models import llama_configs, llama_family
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.runs import planned, requests
from mtuner_jax.training.executors import NoSmallerPlanError

TINY = llama_family.LlamaShape(
    llama_configs.LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )
)


def make_planner(**host):
    request = requests.StepRequest(
        name="tiny",
        mesh=meshes.parse("pcie8"),
        global_batch_size=16,
        max_length=512,
        memory_budget=1.0,
    )
    return planned.Planner(requests.make(TINY, request), **host)


def test_a_smaller_plan_takes_less_and_is_compared_with_the_budget_asked_for():
    planner = make_planner()
    first = planner.fastest()
    smaller = planner.smaller(1000)
    assert smaller is planner.report
    assert smaller.forecast.total_bytes <= first.forecast.total_bytes - 1000
    assert smaller.budget_bytes == first.budget_bytes == 2**30


def test_where_nothing_is_smaller_the_budget_asked_for_is_named():
    planner = make_planner()
    found = planner.fastest()
    match = r"no plan fits the budget of 1,073,741,824 bytes .* needs 1.0+ GiB more .*"
    with pytest.raises(NoSmallerPlanError, match=match):
        planner.smaller(2**30)
    assert planner.report is found  # which goes on
    assert issubclass(NoSmallerPlanError, ConfigError)


def test_plans_are_changed_a_few_times_at_most_whoever_asks():
    planner, built, told = make_planner(), [], []
    planner.fastest()
    settled = planner.settle(
        lambda report: built.append(report) or report,
        over_bytes=lambda report: 1000 if len(built) < 3 else 0,
        tell=told.append,
    )
    assert settled == planned.Settled(built[-1], 0)
    assert told == [1000, 1000]
    settled = planner.settle(
        lambda report: report, over_bytes=lambda report: 7, tell=told.append
    )
    assert settled.over_bytes == 7
    assert len(told) == planned.MAX_REPLANS
    with pytest.raises(NoSmallerPlanError, match="the plan was changed 3 times; lower"):
        planner.smaller(1)


def test_a_plan_for_virtual_devices_fits_the_hosts_memory_too(caplog):
    unbound = make_planner()
    unbound.fastest()
    needed = planned.host_bytes(unbound.report)
    devices = 8
    forecast = unbound.report.forecast.total_bytes
    assert needed >= devices * (forecast + unbound.report.host_bytes)
    free = make_planner(host_bytes=needed)
    assert free.fastest().plan == unbound.report.plan
    with caplog.at_level("INFO"):
        bound = make_planner(host_bytes=int(0.8 * needed))
        assert planned.host_bytes(bound.fastest()) <= 0.8 * needed
    assert "MiB are free: planned again for that" in caplog.text
    assert bound.report.host_bytes == 0
    assert bound.smaller(1000).forecast.total_bytes < bound.inputs.budget_bytes


def test_a_host_that_holds_no_plan_is_named_with_what_is_needed():
    match = (
        r"8 virtual devices share this host's memory, of which 1.0 MiB are free: no "
        r"plan fits: .* needs at least [\d,]+ bytes .* or lower max_length to 256"
    )
    with pytest.raises(ConfigError, match=match):
        make_planner(host_bytes=2**20).fastest()


def test_a_given_plan_beyond_the_hosts_memory_is_warned_of(caplog):
    report = make_planner().fastest()
    for free in (0, 2**40):
        planned.warn_of_host(report, free, name="fsdp")
    assert not caplog.records
    planned.warn_of_host(report, 2**20, name="fsdp")
    assert "plan fsdp takes about" in caplog.text
    assert "1.0 MiB are free: lower max_length or the global batch" in caplog.text

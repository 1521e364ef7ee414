import dataclasses
import json

import pytest

from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans, reports
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.searching import limits, search, static_plans
from tests import small_plans

GIB = 2**30
MESH, WORKLOAD = small_plans.PLAN.mesh_sizes, small_plans.WORKLOAD
FOUND = search.fastest(
    WORKLOAD, small_plans.MACHINE, mesh_sizes=MESH, budget_bytes=2 * GIB
)


def static_plan(name="fsdp"):
    return plans.static(name=name, num_layers=4, mesh_sizes=MESH, rows=(1, 1))


def report(plan=None, **changes):
    """A plan priced on pcie8, by default without a search or comparison."""
    machine = machines.preset("pcie8")
    plan = plan or static_plan()
    made = reports.Report(
        workload=WORKLOAD,
        hardware=machine,
        budget_bytes=machine.budget_bytes,
        plan=plan,
        timeline=timelines.replay(plan, WORKLOAD, machine),
        forecast=forecasts.forecast(plan, WORKLOAD),
    )
    return dataclasses.replace(made, **changes)


def static(name, step_s, **changes):
    fields = {"plan": static_plan(), "total_bytes": GIB, **changes}
    return static_plans.StaticSetting(name=name, step_s=step_s, **fields)


def statics(report_, *factors):
    """Static settings that take so many times the report's seconds."""
    step_s = report_.timeline.step_s
    return tuple(
        static(f"setting{index}", factor * step_s)
        for index, factor in enumerate(factors)
    )


def test_columns_are_aligned():
    rows = [("a", "1.0"), ("long", "10.0")]
    assert reports.columns(rows) == "a      1.0\nlong  10.0"


def test_text_tells_segments_seconds_bytes_and_budget():
    made = report(found=FOUND)
    text = reports.text(made)
    assert plans.table(made.plan) in text
    assert f"{made.timeline.tokens_per_s:,.0f} tokens/s" in text
    total = made.forecast.total_bytes
    assert f"total {total / GIB:11.2f}".split() in [x.split() for x in text.split("\n")]
    assert f"budget {made.budget_bytes / GIB:.2f}".split() in [
        line.split() for line in text.split("\n")
    ]
    limit = limits.find(FOUND)
    assert f"{limit.binds}: {limit.reason}" in text
    assert f"{FOUND.num_scored:,} plans compared" in text
    assert "static setting" not in text


def test_printed_kinds_add_up_to_the_printed_total():
    lines = reports.text(report()).split("per device")[1].split("\n\n")[0].split("\n")
    gib = {line.rsplit(maxsplit=1)[0]: float(line.split()[-1]) for line in lines[1:]}
    total, _ = gib.pop("total"), gib.pop("budget")
    assert abs(sum(gib.values()) - total) <= 0.005 * len(gib)


def test_only_what_rests_on_assumed_figures_is_marked():
    machine = machines.preset("pcie8")
    assert "kernel_s" in reports.assumed(machine)
    assert " *" in reports.text(report())
    measured = dict.fromkeys(machine.sources, "measured")
    made = report(hardware=dataclasses.replace(machine, sources=measured))
    assert reports.assumed(made.hardware) == ()
    assert "*" not in reports.text(made)
    unknown = dataclasses.replace(machine, sources={})
    assert "links" in reports.assumed(unknown)


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ((1.5, 1.25), "gain 1.25x over setting1 ("),
        ((1.001,), "gain 1.00x: link-bound, nothing to be won over setting0"),
        ((0.8, 2.0), "gain 0.80x: slower than setting0 ("),
    ],
)
def test_gain_is_measured_against_the_fastest_static_setting(factors, text):
    made = report(found=FOUND)
    made = dataclasses.replace(made, statics=statics(made, *factors))
    assert reports.gain(made).startswith(text)
    assert made.gain == pytest.approx(min(factors))


def test_settings_that_do_not_fit_say_what_they_need_and_are_no_measure():
    made = report()
    too_large = static("replicated", 0.0, plan=None, total_bytes=48 * GIB)
    made = dataclasses.replace(made, statics=(*statics(made, 1.5), too_large))
    assert "does not fit: needs 48.00 GiB" in reports.text(made)
    assert made.best_static is made.statics[0]
    alone = dataclasses.replace(made, statics=(too_large,))
    assert alone.gain is None
    assert reports.gain(alone) == "gain: no static setting fits"


def test_a_plan_above_its_budget_is_said_not_to_fit():
    made = report()
    made = dataclasses.replace(made, budget_bytes=made.forecast.total_bytes // 2)
    over = (made.forecast.total_bytes - made.budget_bytes) / GIB
    assert not made.fits
    assert f"does not fit: {over:.2f} GiB above the budget" in reports.text(made)


def test_pinned_memory_is_told_and_held_against_the_hosts():
    plan = plans.static(
        name="fsdp",
        num_layers=4,
        mesh_sizes=MESH,
        rows=(1, 1),
        saved=plans.Saved.LAYER_INPUT_ON_HOST,
    )
    assert "host memory" not in reports.text(report())
    made = report(plan)
    pinned = 4 * WORKLOAD.max_length * WORKLOAD.hidden_size * 2
    assert made.fits and made.host_bytes == pinned
    amounts = (
        f"pinned host memory: {pinned / GIB:.2f} GiB per device, "
        f"{8 * pinned / GIB:.2f} GiB per host of 8"
    )
    unknown = f"{amounts}; hardware pcie8 does not say what a host has"
    assert unknown in reports.text(made)
    host = reports.to_data(made)["host"]
    assert host == {
        "bytes_per_device": pinned,
        "bytes_per_host": 8 * pinned,
        "limit_bytes_per_device": None,
    }
    small = dataclasses.replace(made.hardware, host_memory_bytes=8 * pinned)
    tight = dataclasses.replace(made, hardware=small)
    assert not tight.fits
    assert f"{amounts}, of 0.01 GiB that may be pinned" in reports.text(tight)
    assert "does not fit: the host has less memory than" in reports.text(tight)


def test_data_are_json_and_hold_the_plan_as_its_file_does():
    made = report()
    made = dataclasses.replace(made, statics=statics(made, 2.0))
    data = json.loads(json.dumps(reports.to_data(made)))
    assert plans.from_json(json.dumps(data["plan"])) == made.plan
    assert data["forecast"]["total"] == made.forecast.total_bytes
    assert data["timeline"]["step_s"] == made.timeline.step_s
    assert data["gain"] == pytest.approx(2.0)
    assert data["statics"][0]["fits"]


def test_compiled_bytes_stand_beside_the_predicted_ones():
    made = report()
    forecast = made.forecast
    compiled = reports.Compiled(
        device="card",
        inputs=forecast.arguments_bytes,
        outputs=0,
        temporaries=2 * forecast.temporaries_bytes,
        cudnn_workspace=GIB,
        compile_s=3.0,
    )
    text = reports.compiled_text(compiled, made)
    rows = {line.split("  ")[0]: line.split() for line in text.split("\n")}
    assert rows["inputs"][-1] == "1.000"
    assert rows["temporaries"][-1] == "0.500"
    assert rows["cuDNN workspace"][-1] == "1.00"
    assert text.endswith("\nfits")
    small = dataclasses.replace(made, budget_bytes=compiled.total_bytes - GIB // 2)
    assert "does not fit: 0.50 GiB above" in reports.compiled_text(compiled, small)

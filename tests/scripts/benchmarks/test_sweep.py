import json

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import forecasts, passes
from mtuner_jax.settings import programs
from scripts.benchmarks import phase_plots, sweep

GRID = {
    "--models": ["smollm2-135m"],
    "--max_lengths": ["256"],
    "--global_batch_sizes": ["8"],
    "--budgets": ["0.05", "0.3", "8"],
    "--links": ["14"],
}


def arguments(output, **changed):
    grid = GRID | {f"--{name}": values for name, values in changed.items()}
    return [
        *(word for name in grid for word in (name, *grid[name])),
        "--output",
        str(output),
    ]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    assert sweep.main(arguments(folder)) == 0
    lines = (folder / "cells.jsonl").read_text().splitlines()
    return folder, [json.loads(line) for line in lines]


def test_each_cell_has_a_record_and_maps_are_drawn(swept):
    folder, records = swept
    assert [record["budget_gib"] for record in records] == [0.05, 0.3, 8.0]
    assert records[0]["status"] == phase_plots.NOTHING_FITS
    assert "needs at least" in records[0]["reason"]
    for name in ("gain.png", "mechanisms.png", "bwd_keep.png", "tail.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_a_plan_is_at_least_as_fast_as_settings_and_plans_without_a_mechanism(swept):
    _, records = swept
    for record in records[1:]:
        assert record["status"] == phase_plots.PLANNED
        assert record["gain"] == pytest.approx(record["static_s"] / record["step_s"])
        # A plan may forgo what a further segment is too little worth.
        assert record["gain"] >= 0.99
        assert record["used"].keys() == record["without_s"].keys()
        for seconds in record["without_s"].values():
            assert seconds is None or seconds >= 0.99 * record["step_s"]
    assert records[2]["step_s"] <= records[1]["step_s"]


def test_a_record_holds_the_plan_that_it_prices(swept):
    _, records = swept
    grid = sweep.parse(arguments("unused"))
    (panel,) = sweep.panels(grid)
    place = panel.inputs.workload, panel.inputs.hardware
    for record in records[1:]:
        plan = plans.from_json(json.dumps(record["plan"]))
        assert passes.step_s(plan, *place) == pytest.approx(record["step_s"])
        taken = forecasts.forecast(plan, panel.inputs.workload).total_bytes
        assert taken == record["total_bytes"] <= record["budget_gib"] * 2**30


@pytest.mark.parametrize(
    ("gain", "without_s", "winner"),
    [
        (1.01, {"held": 9.0}, phase_plots.NOTHING_WON),
        (1.5, {"held": 2.0, "tail": 1.1, "mix": 1.2}, "held"),
        (1.5, {"saved": 2.0, "tail": None}, "tail"),
        (1.5, {"held": 1.01, "tail": 1.0}, phase_plots.NONE_ALONE),
        (1.5, {}, phase_plots.NONE_ALONE),
    ],
)
def test_the_winner_is_what_most_is_lost_without(gain, without_s, winner):
    record = {
        "status": phase_plots.PLANNED,
        "gain": gain,
        "step_s": 1.0,
        "without_s": without_s,
    }
    assert sweep.winner(record) == winner


def test_what_is_not_used_costs_nothing_to_forbid():
    record = {"step_s": 2.0, "without_s": {"held": 3.0, "tail": None}}
    assert sweep.without("held", record) == 1.5
    assert sweep.without("tail", record) is None
    assert sweep.without("bwd_keep", record) == 1.0


def test_links_are_scaled_by_the_slowest():
    pcie = machines.preset("pcie8")
    scaled = sweep.with_link(pcie, 2 * pcie.links[0].bytes_per_s)
    for link, before in zip(scaled.links, pcie.links, strict=True):
        assert link.bytes_per_s == pytest.approx(2 * before.bytes_per_s)
        assert link.latency_s == before.latency_s
    with pytest.raises(ConfigError, match="without links to sweep over"):
        sweep.with_link(machines.preset("h200x1"), 1e9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budgets": ["0"]}, "budgets=.*finite and above 0"),
        ({"links": ["-1"]}, "links=.*finite and above 0"),
        ({"jobs": ["0"]}, "jobs=.*finite and above 0"),
        ({"models": ["llama2-8b"]}, "did you mean llama2-"),
    ],
)
def test_grids_that_cannot_be_are_refused(changed, message, tmp_path, capsys):
    assert sweep.main(arguments(tmp_path, **changed)) == programs.BAD_INPUT
    with pytest.raises(ConfigError, match=message):
        list(sweep.panels(sweep.parse(arguments(tmp_path, **changed))))
    assert capsys.readouterr().err.startswith("error: ")


def test_nothing_is_drawn_of_nothing(tmp_path, capsys):
    assert sweep.main(["--draw_only", "--output", str(tmp_path)]) == programs.BAD_INPUT
    assert "cells.jsonl: no such file" in capsys.readouterr().err


def test_quick_keeps_what_was_given():
    grid = sweep.parse(["--quick", "--links", "3"])
    assert (grid.links, grid.models) == ((3.0,), sweep.QuickConfig().models)

import dataclasses
import pathlib

import pytest

from mtuner_jax.planning.costs import passes
from mtuner_jax.runs import requests
from mtuner_jax.settings import cli
from scripts.benchmarks import grids, predicted_gains
from scripts.benchmarks.predicted_gains import GainsConfig

DOCUMENT = pathlib.Path(__file__).resolve().parents[3] / predicted_gains.OUTPUT
FLAGS = ["--models", "llama2-7b", "llama2-70b", "--max_lengths", "1024"]


def grid(flags):
    mesh = predicted_gains.MESH
    return grids.inputs(cli.parse(flags, GainsConfig), mesh, hardware=mesh.name)


@pytest.fixture(scope="module")
def cells():
    """7B, which fits whole, and 70B, eight rows each."""
    flags = [*FLAGS, "--global_batch_sizes", "8"]
    return [predicted_gains.compared(inputs) for inputs in grid(flags)]


def test_gains_are_those_of_the_steps_and_cuts_those_of_their_communication(cells):
    for one in cells:
        planned, workload = one.report.timeline, one.report.workload
        assert one.best.static is one.report.best_static
        assert one.best.gain == pytest.approx(one.report.gain - 1)
        assert one.plain.static.name == "fsdp"
        plain_s = passes.step_s(one.plain.static.plan, workload, one.report.hardware)
        assert one.plain.gain == pytest.approx(plain_s / planned.step_s - 1)
        assert one.plain.gain >= one.best.gain
        assert 0 < one.plain.communication_cut < 1
    seven, seventy = cells
    assert seven.best.static.name == "replicated"
    assert seven.plain.communication_cut > 0.9
    # All of 70B's communication is exposed: it and the gain are about the same thing.
    assert seventy.plain.exposed_cut > seventy.plain.communication_cut > 0.1


def test_means_are_of_what_fits(cells):
    alone = dataclasses.replace(cells[0], best=None)
    lines = predicted_gains.summary([alone, cells[1]]).split("\n")
    rows = {row[0]: row[1:] for row in (x.strip("| ").split(" | ") for x in lines)}
    gain = f"{100 * cells[1].best.gain:.1f} %"
    assert rows["gain over the best static setting"][:3] == [gain] * 3
    both = [one.plain.gain for one in cells]
    want = [sum(both) / 2, sum(both) / 2, max(both)]
    assert rows["gain over FSDP"][:3] == [f"{100 * share:.1f} %" for share in want]
    assert "28.3 % on average, 51.2 % at most" in rows["gain over FSDP"][3]
    table = predicted_gains.table([alone])
    assert "| none fits | - |" in table


def test_the_document_says_how_it_was_made_and_has_all_steps():
    text = DOCUMENT.read_text()
    assert "Predictions of the cost model, nothing here was measured" in text
    assert "\n    python scripts/benchmarks/predicted_gains.py\n" in text
    assert text.count("| llama2-") == 4 * 4 * 2


def test_it_is_printed_for_a_dash_and_bad_input_is_an_error(capsys):
    flags = ["--models", "smollm2-135m", "--max_lengths", "128"]
    assert predicted_gains.main([*flags, "--output", "-"]) == 0
    found = capsys.readouterr()
    assert found.out.count("| smollm2-135m | 128 |") == 2
    assert "smollm2-135m 32 x 128: gain" in found.err
    assert predicted_gains.main(["--models", "llama9"]) == 2
    assert "error: model='llama9': no such shape" in capsys.readouterr().err


def test_a_plan_is_searched_for_the_papers_machine():
    flags = [*FLAGS[:2], *FLAGS[3:], "--global_batch_sizes", "8"]
    (inputs,) = grid(flags)
    assert isinstance(inputs, requests.PlanningInputs)
    assert (inputs.hardware.name, inputs.mesh_sizes) == ("pcie8", (2, 2, 2))

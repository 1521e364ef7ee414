import pathlib
import struct

import numpy as np
import pytest

from models import llama_family
from mtuner_jax.devices import meshes
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.plans import Saved
from mtuner_jax.plots import plan_pictures, plan_plots
from mtuner_jax.runs import pricing, requests, shapes
from tests.small_plans import PLAN, PLAYED, WORKLOAD

DOCUMENTED = (
    pathlib.Path(__file__).parents[2] / "docs" / "plans" / "llama2-13b-pcie8.json"
)


def size_of(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(("microbatch", "most_bars"), [(None, 0), (1, 10_000)])
def test_a_plan_is_drawn_in_full_size(tmp_path, monkeypatch, microbatch, most_bars):
    monkeypatch.setattr(plan_plots, "MOST_BARS", most_bars)
    path = tmp_path / "plan.png"
    shown = plan_pictures.picture(PLAN, PLAYED, microbatch=microbatch)
    allocated = forecasts.forecast(PLAN, WORKLOAD).total_bytes
    plan_plots.write(
        path,
        shown,
        title=plan_pictures.headline("small", PLAN, PLAYED),
        limits={"budget": 2**27, "allocated": allocated},
    )
    assert size_of(path) == (1200, 1000)


def test_the_title_says_what_it_is_and_that_it_is_predicted():
    title = plan_pictures.headline("small", PLAN, PLAYED)
    assert title.startswith("small on 8 devices: ")
    assert f"{PLAYED.tokens_per_s:,.0f} tokens/s" in title
    assert title.endswith("(predicted)")


def test_the_documented_plan_shows_all_four_actions(tmp_path):
    """As docs/elastic.md draws and explains it."""
    inputs = requests.make(
        shapes.shape(llama_family.FAMILY, "llama2-13b"),
        requests.StepRequest(
            name="llama2-13b",
            mesh=meshes.PRESETS["pcie8"],
            global_batch_size=64,
            max_length=1024,
            memory_budget=20.0,
        ),
    )
    plan = pricing.read_plan(str(DOCUMENTED), inputs.workload, inputs.mesh_sizes)
    played = timelines.replay(plan, inputs.workload, inputs.hardware)
    shown = plan_pictures.picture(plan, played)
    allocated = forecasts.forecast(plan, inputs.workload).total_bytes
    assert allocated <= inputs.budget_bytes
    # Gather: what is not always whole is raised to it, and nothing else.
    gathered = {event.layer for event in played.events if event.kind == "weights"}
    assert gathered == set(range(25))
    # Discard: copies of layers 0-2 wait at both ends, and take nothing in between.
    assert list(shown.held_axes[:4, 0]) == [3, 3, 3, 1]
    middle = np.searchsorted(shown.edges_s, played.step_s / 2) - 1
    assert list(shown.held_axes[:4, middle]) == [0, 0, 0, 1]
    copies = shown.num_bytes["kept_across_steps"]
    assert copies[0] == copies[-1] == copies.max() > 2**30
    assert copies[len(copies) // 2] == 0
    # Execute and checkpoint: the tail's saved tensors rise and fall once a chunk.
    assert {s.saved for s in plan.segments[plan.tail_start :]} == {
        Saved.ATTENTION_AND_GATES
    }
    saved = shown.num_bytes["saved"]
    high = saved > saved.max() / 2
    assert np.count_nonzero(high[1:] & ~high[:-1]) == plan.tail_chunks == 4
    plan_plots.write(
        tmp_path / "step.png", shown, title="", limits={"budget": allocated}
    )
    assert size_of(tmp_path / "step.png") == (1200, 1000)

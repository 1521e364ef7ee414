import struct

import pytest

from mtuner_jax.planning import memory_model
from mtuner_jax.training import plan_pictures, plan_plots
from tests.small_plans import PLAN, PLAYED, WORKLOAD


def size_of(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize("most_bars", [0, 10_000])
@pytest.mark.parametrize("microbatch", [None, 1])
def test_a_plan_is_drawn_in_full_size(tmp_path, monkeypatch, microbatch, most_bars):
    monkeypatch.setattr(plan_plots, "MOST_BARS", most_bars)
    path = tmp_path / "plan.png"
    shown = plan_pictures.picture(PLAN, PLAYED, microbatch=microbatch)
    allocated = memory_model.forecast(PLAN, WORKLOAD).total_bytes
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

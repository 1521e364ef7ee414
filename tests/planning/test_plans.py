import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import plans
from mtuner_jax.planning.plans import Plan, Saved, SegmentPlan

MIXED = Plan(
    mesh_sizes=(2, 2, 2),
    segments=(
        SegmentPlan(num_layers=3, saved=Saved.ATTENTION_AND_GATES),
        SegmentPlan(num_layers=1, rest_axes=3),
        SegmentPlan(num_layers=2, rest_axes=1),
    ),
    microbatch=2,
    accumulation=3,
)


def test_counts_follow_from_the_segments():
    assert (MIXED.num_layers, MIXED.num_devices, MIXED.rows) == (6, 8, 48)
    assert MIXED.starts == (0, 3, 4)


@pytest.mark.parametrize(("name", "rest_axes"), [("fsdp", 0), ("replicated", 3)])
def test_static_plans_treat_all_layers_alike(name, rest_axes):
    plan = plans.static(
        name=name,
        num_layers=5,
        mesh_sizes=(2, 2, 2),
        rows=(2, 4),
        saved=Saved.ATTENTION_AND_GATES,
    )
    assert plan.segments == (
        SegmentPlan(num_layers=5, rest_axes=rest_axes, saved=Saved.ATTENTION_AND_GATES),
    )
    assert (plan.microbatch, plan.accumulation, plan.rows) == (2, 4, 64)


def test_json_is_what_the_format_says():
    """Stored plans must stay readable: a change here needs a new VERSION."""
    plan = Plan(
        mesh_sizes=(4, 2),
        segments=(SegmentPlan(num_layers=2, rest_axes=1),),
        microbatch=1,
        accumulation=2,
    )
    content = json.loads(plans.to_json(plan))
    assert content == {
        "version": 1,
        "mesh_sizes": [4, 2],
        "segments": [{"num_layers": 2, "rest_axes": 1, "saved": "layer_input"}],
        "microbatch": 1,
        "accumulation": 2,
    }
    assert list(content) == sorted(content)


@st.composite
def any_plan(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 8), max_size=4)))
    segment = st.builds(
        SegmentPlan,
        num_layers=st.integers(1, 100),
        rest_axes=st.integers(0, len(sizes)),
        saved=st.sampled_from(Saved),
    )
    return Plan(
        mesh_sizes=sizes,
        segments=tuple(draw(st.lists(segment, min_size=1, max_size=4))),
        microbatch=draw(st.integers(1, 64)),
        accumulation=draw(st.integers(1, 64)),
    )


@given(any_plan())
def test_round_trip_is_equal_and_byte_stable(plan):
    text = plans.to_json(plan)
    again = plans.from_json(text)
    assert again == plan
    assert plans.to_json(again) == text
    assert text.isascii()
    assert text.endswith("}\n")


def test_a_file_is_read(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plans.to_json(MIXED))
    assert plans.read(path) == MIXED


def changed(**fields):
    return json.dumps({**json.loads(plans.to_json(MIXED)), **fields})


def without(name):
    content = json.loads(plans.to_json(MIXED))
    del content[name]
    return json.dumps(content)


SEGMENT = {"num_layers": 1, "rest_axes": 0, "saved": "layer_input"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (changed(version=2), "plan version 2 is not 1; plan again"),
        (without("version"), "plan version None is not 1"),
        (without("microbatch"), "plan: .*microbatch"),
        (without("segments"), "plan: 'segments'"),
        (changed(colour="red"), "plan: .*colour"),
        (changed(segments=[]), "plan: no segments"),
        (changed(segments=[{**SEGMENT, "colour": 1}]), "plan: .*colour"),
        (changed(segments=[{"num_layers": 1}]), "plan: .*'saved'"),
        (changed(segments=[{**SEGMENT, "num_layers": 0}]), "segment 0 .*layers=0; at"),
        (changed(segments=[SEGMENT, {**SEGMENT, "rest_axes": 4}]), "segment 1 .*has 3"),
        (changed(segments=[{**SEGMENT, "rest_axes": -1}]), "rest_axes=-1; the mesh"),
        (changed(segments=[{**SEGMENT, "saved": "all"}]), "saved='all'; one of layer"),
        (changed(microbatch=0), "plan: microbatch=0; at least 1"),
        (changed(accumulation=0), "plan: accumulation=0; at least 1"),
        (changed(microbatch="2"), "plan: microbatch='2' is not an integer"),
        (changed(accumulation=2.0), "plan: accumulation=2.0 is not an integer"),
        (changed(mesh_sizes="222"), "plan: mesh_sizes='2' is not an integer"),
        (changed(segments=[{**SEGMENT, "rest_axes": True}]), "rest_axes=True is not"),
        (changed(segments=[{**SEGMENT, "num_layers": None}]), "layers=None is not"),
        (changed(segments=3), "plan: .*iterable"),
        ("{", "plan: not JSON: .*line 1"),
        ("[]", "plan: a JSON object, not list"),
    ],
)
def test_what_is_no_plan_is_an_error_that_says_why(text, error):
    with pytest.raises(ConfigError, match=error):
        plans.from_json(text)


def test_an_unknown_name_is_an_error():
    text = "plan='zero3' is unknown; use fsdp, replicated or a file"
    with pytest.raises(ConfigError, match=text):
        plans.static(name="zero3", num_layers=1, mesh_sizes=(8,), rows=(1, 1))


def test_every_policy_says_what_it_saves():
    assert plans.SAVED_TENSORS.keys() == set(Saved)

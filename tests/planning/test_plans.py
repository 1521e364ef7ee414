import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import plans
from mtuner_jax.planning.plans import AdapterState, Plan, Saved, SegmentPlan, Table

MIXED = Plan(
    mesh_sizes=(2, 2, 2),
    segments=(
        SegmentPlan(
            num_layers=3,
            fwd_keep_axes=1,
            bwd_keep_axes=2,
            saved=Saved.ATTENTION_AND_GATES,
            prefetch=True,
        ),
        SegmentPlan(num_layers=1, rest_axes=3, fwd_keep_axes=3, bwd_keep_axes=3),
        SegmentPlan(
            num_layers=2,
            rest_axes=1,
            fwd_keep_axes=1,
            bwd_keep_axes=1,
            saved=Saved.LAYER_INPUT_ON_HOST,
        ),
    ),
    microbatch=2,
    accumulation=3,
    tail_layers=3,
    tail_chunks=2,
    embedding=Table.SPLIT,
    head=Table.RESIDENT,
    adapters=AdapterState.SHARDED,
)

TABLE = """\
layers  rest  fwd keep  bwd keep  saved                prefetch  runs
0-2     1/8   1/4       1/2       attention_and_gates  yes       whole microbatch
3-3     1     1         1         layer_input          no        in 2 parts
4-5     1/4   1/4       1/4       layer_input_on_host  no        in 2 parts
embedding split, head resident, adapters sharded, weights bfloat16; \
3 x 8 devices x 2 rows"""


def test_counts_follow_from_the_segments():
    assert (MIXED.num_layers, MIXED.num_devices, MIXED.rows) == (6, 8, 48)
    assert MIXED.starts == (0, 3, 4)
    assert MIXED.tail_start == 1


@pytest.mark.parametrize(
    ("tail_layers", "tail_start"), [(0, 3), (2, 2), (3, 1), (6, 0)]
)
def test_the_tail_is_whole_segments(tail_layers, tail_start):
    plan = dataclasses.replace(MIXED, tail_layers=tail_layers, tail_chunks=1)
    assert plan.tail_start == tail_start


@pytest.mark.parametrize("tail_layers", [-1, 1, 4, 7])
def test_a_tail_that_begins_inside_a_segment_is_an_error(tail_layers):
    text = (
        rf"tail_layers={tail_layers} begins at layer {6 - tail_layers}, inside a "
        r"segment; segments begin at 0, 3, 4, 6"
    )
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(MIXED, tail_layers=tail_layers)


@pytest.mark.parametrize(
    ("bwd_keep_axes", "keeps"), [((0, 0), False), ((0, 1), True), ((3, 0), True)]
)
def test_copies_cross_the_step_if_one_segment_keeps_some(bwd_keep_axes, keeps):
    segments = tuple(
        SegmentPlan(num_layers=1, fwd_keep_axes=3, bwd_keep_axes=axes)
        for axes in bwd_keep_axes
    )
    plan = dataclasses.replace(MIXED, segments=segments, tail_layers=0, tail_chunks=1)
    assert plan.keeps_copies is keeps


@pytest.mark.parametrize(("name", "axes"), [("fsdp", 0), ("replicated", 3)])
def test_static_plans_treat_all_layers_alike(name, axes):
    plan = plans.static(
        name=name,
        num_layers=5,
        mesh_sizes=(2, 2, 2),
        rows=(2, 4),
        saved=Saved.ATTENTION_AND_GATES,
        prefetch=True,
        tail_layers=5,
        tail_chunks=2,
        embedding=Table.SPLIT,
        adapters=AdapterState.SHARDED,
        weight_dtype="float32",
        merge_gathers=True,
    )
    segment = SegmentPlan(
        num_layers=5,
        rest_axes=axes,
        fwd_keep_axes=axes,
        bwd_keep_axes=axes,
        saved=Saved.ATTENTION_AND_GATES,
        prefetch=True,
    )
    assert plan == Plan(
        mesh_sizes=(2, 2, 2),
        segments=(segment,),
        microbatch=2,
        accumulation=4,
        tail_layers=5,
        tail_chunks=2,
        embedding=Table.SPLIT,
        adapters=AdapterState.SHARDED,
        weight_dtype="float32",
        merge_gathers=True,
    )
    assert not plan.keeps_copies


def test_json_is_what_the_format_says():
    """Stored plans must stay readable: a change here needs a new VERSION."""
    plan = Plan(
        mesh_sizes=(4, 2),
        segments=(
            SegmentPlan(num_layers=2, rest_axes=1, fwd_keep_axes=2, bwd_keep_axes=1),
        ),
        microbatch=1,
        accumulation=2,
    )
    content = json.loads(plans.to_json(plan))
    segment = {
        "num_layers": 2,
        "rest_axes": 1,
        "fwd_keep_axes": 2,
        "bwd_keep_axes": 1,
        "saved": "layer_input",
        "prefetch": False,
    }
    assert content == {
        "version": 2,
        "mesh_sizes": [4, 2],
        "segments": [segment],
        "microbatch": 1,
        "accumulation": 2,
        "tail_layers": 0,
        "tail_chunks": 1,
        "embedding": "gathered",
        "head": "gathered",
        "adapters": "replicated",
        "weight_dtype": "bfloat16",
        "merge_gathers": False,
        "model": "",
    }
    assert list(content) == sorted(content)
    assert list(content["segments"][0]) == sorted(segment)


@st.composite
def any_segment(draw, num_axes):
    rest = draw(st.integers(0, num_axes))
    saved = draw(st.sampled_from(Saved))
    return SegmentPlan(
        num_layers=draw(st.integers(1, 100)),
        rest_axes=rest,
        fwd_keep_axes=draw(st.integers(rest, num_axes)),
        bwd_keep_axes=draw(st.integers(rest, num_axes)),
        saved=saved,
        prefetch=draw(st.booleans()),
    )


@st.composite
def any_plan(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 8), max_size=4)))
    segments = tuple(draw(st.lists(any_segment(len(sizes)), min_size=1, max_size=4)))
    in_tail = draw(st.integers(0, len(segments)))
    chunks = draw(st.integers(1, 8)) if in_tail else 1
    tail = segments[len(segments) - in_tail :]
    return Plan(
        mesh_sizes=sizes,
        segments=segments,
        microbatch=chunks * draw(st.integers(1, 64)),
        accumulation=draw(st.integers(1, 64)),
        tail_layers=sum(segment.num_layers for segment in tail),
        tail_chunks=chunks,
        embedding=draw(st.sampled_from(Table)),
        head=draw(st.sampled_from(Table)),
        adapters=draw(st.sampled_from(AdapterState)),
        weight_dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        merge_gathers=draw(st.booleans()),
        model=draw(st.sampled_from(["", "L32 D4096 F11008 N32 K32 H128 V32000"])),
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


def test_a_file_from_before_plans_named_their_model_fits_any():
    assert plans.from_json(without("model")) == MIXED
    assert not MIXED.model


def changed(**fields):
    return json.dumps({**json.loads(plans.to_json(MIXED)), **fields})


def without(name):
    content = json.loads(plans.to_json(MIXED))
    del content[name]
    return json.dumps(content)


SEGMENT = {
    "num_layers": 1,
    "rest_axes": 0,
    "fwd_keep_axes": 0,
    "bwd_keep_axes": 0,
    "saved": "layer_input",
    "prefetch": False,
}


def segments(*entries, **fields):
    """A plan's file with these segments, no tail, and in the last one `fields`."""
    entries = [{**SEGMENT, **entry} for entry in (*entries, fields)]
    return changed(segments=entries, tail_layers=0, tail_chunks=1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (changed(version=1), "plan version 1 is not 2; plan again"),
        (without("version"), "plan version None is not 2"),
        (without("microbatch"), "plan: misses the field microbatch"),
        (without("segments"), "plan: misses the field segments"),
        (changed(colour="red"), "plan: .*colour"),
        (changed(segments=[]), "plan: no segments"),
        (segments(colour=1), "plan: .*colour"),
        (changed(segments=[{"rest_axes": 0}]), "plan: misses the field num_layers"),
        (segments(num_layers=0), "segment 0 .*layers=0; at least 1"),
        (segments({}, rest_axes=4), "segment 1 has rest_axes=4; the mesh has 3"),
        (segments(rest_axes=-1), "rest_axes=-1; the mesh"),
        (segments(rest_axes=1, bwd_keep_axes=1), "fwd_keep_axes=0; from rest_axes=1"),
        (segments(rest_axes=1, fwd_keep_axes=1), "bwd_keep_axes=0; from rest_axes=1"),
        (segments({}, fwd_keep_axes=4), "segment 1 has fwd_.*=4; .* mesh's 3 axes"),
        (segments(bwd_keep_axes=4), "segment 0 has bwd_.*=4; .* mesh's 3 axes"),
        (segments(saved="all"), "saved='all'; one of linears, .*, layer_input, layer_"),
        (segments(saved=[]), r"saved=\[\]; one of linears"),
        (changed(embedding="whole"), "embedding='whole'; one of gathered, split, res"),
        (changed(head=None), "head=None; one of gathered, split, resident"),
        (changed(adapters=1), "adapters=1; one of replicated, sharded"),
        (changed(microbatch=0), "plan: microbatch=0; at least 1"),
        (changed(accumulation=0), "plan: accumulation=0; at least 1"),
        (changed(tail_chunks=0), "plan: tail_chunks=0; at least 1"),
        (changed(tail_chunks=3), "tail_chunks=3 does not divide microbatch=2"),
        (changed(tail_layers=0), "plan: tail_chunks=2 without a tail"),
        (changed(microbatch="2"), "plan: microbatch='2' is not an integer"),
        (changed(accumulation=2.0), "plan: accumulation=2.0 is not an integer"),
        (changed(tail_layers=3.0), "plan: tail_layers=3.0 is not an integer"),
        (changed(tail_chunks="2"), "plan: tail_chunks='2' is not an integer"),
        (changed(mesh_sizes="222"), "plan: mesh_sizes='222' is not a list"),
        (changed(weight_dtype=16), "plan: weight_dtype=16 is not a string"),
        (changed(merge_gathers=1), "plan: merge_gathers=1 is not true or false"),
        (segments(rest_axes=True), "rest_axes=True is not an integer"),
        (segments(fwd_keep_axes="1"), "fwd_keep_axes='1' is not an integer"),
        (segments(bwd_keep_axes=None), "bwd_keep_axes=None is not an integer"),
        (segments(num_layers=None), "layers=None is not an integer"),
        (segments(prefetch="yes"), "prefetch='yes' is not true or false"),
        (changed(segments=3), "plan: segments=3 is not a list"),
        (changed(segments=[3]), "plan: segments=3 is not an object"),
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


def test_each_policy_but_the_host_saves_less_than_the_one_before():
    sets = [set(names) for names in plans.SAVED_TENSORS.values()]
    assert all(more > less for more, less in itertools.pairwise(sets[:-1]))
    assert sets[-2] == sets[-1] == set()


def test_the_table_has_a_line_for_each_segment():
    assert plans.table(MIXED) == TABLE

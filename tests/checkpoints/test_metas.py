import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from mtuner_jax.checkpoints import metas

PATH = pathlib.Path("run/checkpoints/3")
META = metas.RunMeta(
    base_model={"config": "ab"}, data="cd", lora={"names": ("q", "v")}, seed=1, rng={}
)


def test_a_meta_equals_itself_after_json():
    saved = json.loads(json.dumps(dataclasses.asdict(META)))
    metas.check_same_run(PATH, saved, META)


def test_all_differences_are_named_with_both_values():
    saved = {**dataclasses.asdict(META), "seed": 2, "lora": {"names": ["q"], "r": 4}}
    with pytest.raises(metas.CheckpointMismatch) as raised:
        metas.check_same_run(PATH, saved, META)
    text = str(raised.value)
    assert "run/checkpoints/3 is not a checkpoint of this run" in text
    assert 'lora.names was ["q"], now ["q", "v"] is asked for' in text
    assert "lora.r was 4, now null is asked for" in text
    assert "seed was 2, now 1 is asked for" in text


def test_array_types_name_every_leaf():
    tree = {"a": [jnp.zeros((2, 3)), jnp.int32(1)]}
    assert metas.array_types(tree) == {
        "['a'][0]": "float32[2,3]",
        "['a'][1]": "int32[]",
    }


def test_missing_and_unexpected_arrays_are_named():
    asked = {"b": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(metas.CheckpointMismatch) as raised:
        metas.check_same_arrays(PATH, {"['a']": "float32[2]"}, asked)
    assert "['a']: saved float32[2], asked nothing" in str(raised.value)
    assert "['b']: saved nothing, asked float32[2]" in str(raised.value)


DATA = {
    "dataset": 64 * "a",
    "tokenizer": 64 * "b",
    "chat_template": 64 * "c",
    "global_batch_size": 8,
    "tokens": 64 * "d",
}
FILE = {"bytes": 1000, "sha256": 64 * "e"}
BASE = {"config": 64 * "f", "files": {"model.safetensors": FILE}}
RUN = metas.RunMeta(base_model=BASE, data=DATA, lora={"r": 4}, seed=1, rng="threefry")


def told(rows="", **changes):
    """What is said to a run that differs so from the one that was saved."""
    with pytest.raises(metas.CheckpointMismatch) as raised:
        asked = dataclasses.replace(RUN, **changes)
        metas.check_same_run(PATH, dataclasses.asdict(RUN), asked, rows=rows)
    head, _, text = str(raised.value).partition(": ")
    assert head == "run/checkpoints/3 is not a checkpoint of this run"
    return text


def test_other_data_is_told_by_its_rows_with_a_warm_start_as_a_way_on():
    data = {**DATA, "dataset": 64 * "0", "tokens": 64 * "1"}
    assert told(data=data, rows="the dataset has 13 rows, was 12") == (
        "the dataset has 13 rows, was 12. Give back what was there, or start anew in "
        "another --output_dir, from this adapter if you like: --init_adapter run"
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ("dataset", "the dataset is another one. Give"),
        ("tokenizer", "the tokenizer is another one. Give"),
        ("chat_template", "the chat template is another one. Give"),
        ("tokens", "the samples became other tokens, though dataset, tokenizer and ch"),
    ],
)
def test_no_digest_is_shown_to_a_user(changed, text):
    found = told(data={**DATA, changed: 64 * "0"})
    assert found.startswith(text)
    assert "0000" not in found


def test_a_setting_is_told_with_the_flag_that_sets_it_back():
    assert told(data={**DATA, "global_batch_size": 4}, seed=2).startswith(
        "global_batch_size was 8, now 4 is asked for; seed was 1, now 2 is asked for. "
        "Ask for the saved values (--global_batch_size 8 --seed 1), or start anew"
    )


@pytest.mark.parametrize(
    ("base", "text"),
    [
        ({**BASE, "config": "0"}, "is another one: its config.json changed. Give"),
        ({**BASE, "files": {}}, "model.safetensors (1,000 bytes then, missing now)"),
        (
            {**BASE, "files": {"model.safetensors": {**FILE, "sha256": "0"}}},
            "is another one: the content of model.safetensors changed. Give back",
        ),
        (
            {"random_init": 7},
            "was read from model.safetensors, now it is random (seed 7",
        ),
    ],
)
def test_another_base_model_is_told_by_its_files_and_without_a_warm_start(base, text):
    found = told(base_model=base)
    assert found.startswith("the base model ") and text in found
    assert "--init_adapter" not in found

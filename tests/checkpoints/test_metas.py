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

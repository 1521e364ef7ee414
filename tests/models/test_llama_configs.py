import dataclasses

import pytest

from models import llama_configs, llama_sizes, rotary
from models.llama_configs import ModelConfigError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("name", llama_sizes.SIZES)
def test_every_size_survives_the_round_trip(name):
    config = llama_sizes.SIZES[name]
    assert llama_configs.from_hf(llama_configs.to_hf(config)) == config


@pytest.mark.parametrize("name", llama_sizes.SIZES)
def test_transformers_reads_what_is_written(name):
    transformers = pytest.importorskip("transformers")
    config = llama_sizes.SIZES[name]
    theirs = transformers.AutoConfig.for_model(**llama_configs.to_hf(config))
    assert llama_configs.from_hf(theirs.to_dict()) == config


@pytest.mark.parametrize("family", llama_configs.FAMILIES)
def test_settings_that_are_not_in_the_file_have_transformers_defaults(family):
    transformers = pytest.importorskip("transformers")
    minimal = {**LLAMA, "model_type": family, "num_key_value_heads": 2}
    theirs = transformers.AutoConfig.for_model(**minimal)
    ours = llama_configs.from_hf(minimal)
    assert ours == llama_configs.from_hf(theirs.to_dict())


def test_kv_heads_and_head_dim_follow_from_the_heads():
    config = llama_configs.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    config = llama_configs.from_hf({**LLAMA, "head_dim": None, "rope_theta": 5})
    assert (config.head_dim, config.rope_theta) == (8, 5.0)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **ROPE}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **ROPE}},
    ],
)
def test_both_spellings_of_the_rotary_settings_are_read(spelling):
    config = llama_configs.from_hf({**LLAMA, **spelling})
    assert config.rope_theta == 500.0
    assert config.rope_scaling == rotary.Llama3Scaling(**ROPE)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    ],
)
def test_scalings_survive_the_round_trip(scaling):
    config = llama_configs.from_hf({**LLAMA, "rope_scaling": scaling})
    assert config.rope_scaling is not None
    assert llama_configs.from_hf(llama_configs.to_hf(config)) == config


@pytest.mark.parametrize(
    "plain", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}]
)
def test_plain_rotary_frequencies_need_no_settings(plain):
    config = llama_configs.from_hf({**LLAMA, **plain})
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": None}, 0),
        ("llama", {"sliding_window": 8}, 0),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, 0),
    ],
)
def test_only_families_that_use_a_window_have_one(family, changes, window):
    hf = {**LLAMA, "model_type": family, **changes}
    assert llama_configs.from_hf(hf).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({}, (False, False, False)),
        ({"attention_bias": True}, (True, True, False)),
        ({"mlp_bias": True}, (False, False, True)),
        ({"model_type": "qwen2"}, (True, False, False)),
        ({"model_type": "mistral"}, (False, False, False)),
        ({"model_type": "qwen3"}, (False, False, False)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_those_of_the_family(changes, biases):
    config = llama_configs.from_hf({**LLAMA, **changes})
    got = (config.attention_bias, config.attention_out_bias, config.mlp_bias)
    assert got == biases


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not supported; .* llama, qwen2, qwen3"),
        ({"model_type": ""}, "model_type='' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu'"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not implem.* yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' lacks factor"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window=t"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "'llama3' lacks low_freq_factor, high_freq_factor, original_max",
        ),
        ({"num_key_value_heads": 3}, "heads=4 must be a multiple of .*heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=tr"),
    ],
)
def test_what_the_decoder_cannot_represent_is_refused(changes, text):
    with pytest.raises(ModelConfigError, match=text):
        llama_configs.from_hf({**LLAMA, **changes})


def test_missing_sizes_are_listed():
    hf = {name: LLAMA[name] for name in ("model_type", "vocab_size", "hidden_size")}
    text = "lacks intermediate_size, num_hidden_layers, num_attention_heads"
    with pytest.raises(ModelConfigError, match=text):
        llama_configs.from_hf(hf)


def test_sizes_that_cannot_be_are_refused_however_made():
    config = llama_configs.from_hf(LLAMA)
    with pytest.raises(ModelConfigError, match="must be a multiple"):
        dataclasses.replace(config, num_kv_heads=3)

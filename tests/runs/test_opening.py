"""Models that cannot be opened: each is told before data, plan and weights."""

import json

import numpy as np
import pytest

from models import llama_configs, llama_family, llama_hf_names
from mtuner_jax.checkpoints import safetensors_files
from mtuner_jax.configs import LoraConfig, RunConfig, UserError
from mtuner_jax.runs import opening, shapes
from tests import tiny
from tests.data import chat_tokenizers

TOKENIZER = chat_tokenizers.chatml()


def tensors(prefix=""):
    rng = np.random.default_rng(0)
    return {
        prefix + tensor.name: rng.standard_normal(tensor.shape).astype(np.float32)
        for tensor in llama_hf_names.tensors(tiny.CONFIG)
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The content of a model's folder that can be opened, by file name."""
    folder = tmp_path_factory.mktemp("original")
    TOKENIZER.save_pretrained(folder)
    safetensors_files.write(folder / "model.safetensors", tensors())
    config = json.dumps(llama_configs.to_hf(tiny.CONFIG))
    (folder / "config.json").write_text(config)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(original, tmp_path):
    """Such a folder, to be spoilt."""
    path = tmp_path / "model"
    path.mkdir()
    for name, content in original.items():
        (path / name).write_bytes(content)
    return path


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def open_it(folder, **settings):
    config = RunConfig(model=str(folder), **settings)
    return opening.open_model(llama_family.FAMILY, config)


def test_a_good_folder_is_opened(folder):
    opened = open_it(folder)
    assert opened.shape.num_layers == tiny.CONFIG.num_layers
    assert len(opened.source.infos()) == len(tensors())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, r"config\.json: model_type='gemma2' is not supp"),
        ({"hidden_size": "64"}, r"config\.json: hidden_size='64' must be a whole"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be a whole"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be a map or null"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "'LlamaForSequenceClassification'.* give the language model",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "these are GPTQ weights .*; give the original model",
        ),
        (
            {"quantization_config": {"load_in_4bit": True}},
            "these are QUANTIZED weights",
        ),
        ({"intermediate_size": 64}, r"9 misshapen \(model.layers.0.mlp.gate_proj"),
        ({"num_hidden_layers": 4}, r"9 missing .* The checkpoint is incomplete"),
        ({"num_hidden_layers": 2}, r"9 unexpected \(model.layers.2.input_layernorm"),
    ],
)
def test_a_config_that_cannot_be_is_told_before_anything_is_loaded(
    folder, changes, message
):
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        open_it(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"a": 1,', r"config\.json is not valid JSON \(.*line 1"),
        ("config.json", b"[1]", r"config\.json holds a list, not an object"),
        ("config.json", b"\xff\xfe", r"config\.json is not valid JSON"),
        ("config.json", None, "has no config.json"),
        ("tokenizer.json", None, "has no tokenizer .*; copy the tokenizer's files"),
        ("tokenizer.json", b'{"a": 1', r"tokenizer\.json is not valid JSON"),
        ("tokenizer.json", b'{"a": 1}', "transformers cannot make a tokenizer"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json holds a list"),
        ("model.safetensors", None, "has neither model.safetensors nor"),
        ("model.safetensors", b"\0" * 50, "model.safetensors is damaged or incomplete"),
    ],
)
def test_a_file_that_is_missing_or_broken_is_named(folder, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_it(folder)


def test_a_file_that_is_cut_is_told_by_its_header(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="is damaged or incomplete"):
        open_it(folder)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "base_model.model."])
def test_weights_of_a_wrapped_model_are_told_by_their_prefix(folder, prefix):
    safetensors_files.write(folder / "model.safetensors", tensors(prefix))
    with pytest.raises(UserError, match=f"names begin with '{prefix}'"):
        open_it(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}'])
def test_an_index_that_is_none_is_named(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json is not an index of safetensors"):
        open_it(folder)


def test_target_modules_are_checked_before_the_data(folder):
    lora = LoraConfig(target_modules=("q_porj",))
    with pytest.raises(UserError, match=r"'q_porj' matches no linear.* 'q_proj'"):
        open_it(folder, lora=lora)


def test_random_weights_need_no_files_and_may_be_of_a_quantized_model(folder):
    (folder / "model.safetensors").unlink()
    change_config(folder, quantization_config={"quant_method": "fp8"})
    assert open_it(folder, random_init=True).source is None


def test_planning_names_the_file_too(folder):
    change_config(folder, num_key_value_heads=3)
    with pytest.raises(UserError, match=r"model='.*': .*config\.json: num_attention"):
        shapes.shape(llama_family.FAMILY, str(folder))


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="it is an adapter; point at its base model"):
        open_it(tmp_path)


def test_rows_longer_than_the_models_positions_are_warned_of_once(folder, caplog):
    change_config(folder, max_position_embeddings=512)
    open_it(folder, max_length=512, strict=True)
    assert not caplog.records
    open_it(folder, max_length=600)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "max_length=600, but the model was made for 512 tokens" in warning
    assert '"rope_scaling": {"rope_type": "linear", "factor": 2.0}' in warning
    with pytest.raises(UserError, match=r"max_length=600, .* 512 .*\(strict=true\)"):
        open_it(folder, max_length=600, strict=True)

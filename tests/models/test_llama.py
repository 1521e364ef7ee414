import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama, llama_configs, llama_hf_names
from mtuner_jax.checkpoints import hf_import, safetensors_files
from mtuner_jax.devices import meshes
from mtuner_jax.ops import tapes
from mtuner_jax.ops.low_rank.operands import LayerAdapters
from mtuner_jax.planning import plans
from mtuner_jax.protocols.states import Batch
from mtuner_jax.weights import layouts
from tests import comparing, tiny

TOKENS = 48
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {  # stretches most of H = 8 frequencies; TOKENS is past the old length
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500.0}}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# Documents of TOKENS are beyond the model's length.
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
SHORT = {"max_position_embeddings": 16}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
YARN_SETTINGS = {
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
    "mscale": 1.5,
    "mscale_all_dim": 0.5,
}
CASES = {
    "llama 2, MHA": ("LlamaConfig", {"num_key_value_heads": 4}),
    "GQA, one kv head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama 3": ("LlamaConfig", LLAMA3),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "head_dim of its own": ("LlamaConfig", {"head_dim": 12}),
    "biases everywhere": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {"rms_norm_eps": 1e-3}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen3, tied, biases": (
        "Qwen3Config",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "linear": ("LlamaConfig", {"rope_parameters": {**LINEAR, "rope_theta": 500.0}}),
    "dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC, **SHORT}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "yarn, all settings": ("Qwen2Config", {"rope_parameters": YARN | YARN_SETTINGS}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral, window": ("MistralConfig", {"sliding_window": 8}),
}


def rows_of(ids):
    """Whole rows, one document each."""
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    ones = np.ones_like(ids)
    return Batch(ids, ids, ones.astype(np.float32), ones, positions, ones)


def random_ids(*shape, seed=0):
    ids = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape)
    return ids.astype(np.int32)


def logits_of(model, weights, rows):
    """[B, T, V] from a plain tree of weights."""
    context = model.context(rows)

    def body(x_BTD, layer_weights):
        adapters = LayerAdapters({})
        tape = tapes.Tape()
        x_BTD = model.layer(layer_weights, adapters, x_BTD, context=context, tape=tape)
        return x_BTD, None

    x_BTD = model.embed(weights["embed"]["table"], rows.input_ids)
    x_BTD, _ = jax.lax.scan(body, x_BTD, weights["layers"])
    x_BTD = model.final_norm(weights["head"]["norm"], x_BTD)
    table_VD = weights["head"].get("table", weights["embed"]["table"])
    return x_BTD @ table_VD[: model.vocab_size].T


def saved_transformers_model(folder, config_class, settings):
    """Writes a checkpoint whose every parameter is random; returns the torch model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class)(**{**SIZES, **settings})
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            value.normal_(centre, 0.3, generator=generator)
    theirs.save_pretrained(folder)
    return theirs


def loaded(folder):
    """(model, weights) from a checkpoint's folder by the path that training takes."""
    config = llama_configs.from_file(folder / "config.json")
    model = llama.Llama(config)
    mesh = meshes.make(meshes.parse("1"), jax.devices())
    plan = plans.static(
        name="fsdp", num_layers=config.num_layers, mesh_sizes=(1,), rows=(1, 1)
    )
    weights = hf_import.load(
        safetensors_files.Folder(folder),
        layouts.locate(llama_hf_names.tensors(config), plan),
        layouts.layout(model, plan, mesh, dtype=jnp.float32),
    )
    layers = weights.pop("segments")["0"]
    return model, {**weights, "layers": layers}


def our_logits(folder, ids):
    model, weights = loaded(folder)
    run = jax.jit(functools.partial(logits_of, model))
    with jax.numpy_dtype_promotion("strict"):
        return np.asarray(run(weights, rows_of(ids)))


def their_logits(theirs, ids):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return theirs(torch.tensor(ids.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(tmp_path, name):
    theirs = saved_transformers_model(tmp_path, *CASES[name])
    ids = random_ids(2, TOKENS)
    want = their_logits(theirs, ids)
    comparing.assert_trees_close(our_logits(tmp_path, ids), want)
    if name == "llama 3":
        # known-bugs C7: the spelling of files on the hub, before transformers 5.
        path = tmp_path / "config.json"
        content = json.loads(path.read_text())
        rope = content.pop("rope_parameters")
        content["rope_theta"] = rope.pop("rope_theta")
        path.write_text(json.dumps({**content, "rope_scaling": rope}))
        comparing.assert_trees_close(our_logits(tmp_path, ids), want)


def test_each_case_differs_from_plain_llama(tmp_path):
    """Else a setting that is ignored on both sides would go unseen."""
    ids = random_ids(1, TOKENS)
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    theirs = saved_transformers_model(tmp_path, "LlamaConfig", settings)
    plain = their_logits(theirs, ids)
    config = dataclasses.replace(
        llama_configs.from_file(tmp_path / "config.json"),
        rope_scaling=llama_configs.from_hf(
            {**SIZES, **LLAMA3, "model_type": "llama"}
        ).rope_scaling,
    )
    _, weights = loaded(tmp_path)
    for changed in (config, dataclasses.replace(config, sliding_window=8)):
        got = logits_of(llama.Llama(changed), weights, rows_of(ids))
        assert np.linalg.norm(got - plain) > 0.01 * np.linalg.norm(plain)


def tiny_logits(rows, *, dtype=np.float64, **changes):
    model = llama.Llama(dataclasses.replace(tiny.CONFIG, **changes))
    weights = tiny.parameters(model, dtype=dtype)
    return np.asarray(jax.jit(functools.partial(logits_of, model))(weights, rows))


def packed(first, second):
    """One row of two documents and three tokens of padding."""
    lengths = (len(first), len(second), 3)
    ids = np.concatenate([first, second, np.zeros(3, np.int32)])[None]
    segments = np.repeat(np.array([1, 2, 0], np.int32), lengths)[None]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    return Batch(ids, ids, np.ones(ids.shape, np.float32), segments, positions, ids)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("window", [0, 3])
def test_a_document_has_the_same_logits_alone_and_packed(window):
    """known-bugs B2: block mask and positions from 0, both."""
    first, second = random_ids(9, seed=1), random_ids(7, seed=2)
    both = tiny_logits(packed(first, second), sliding_window=window)[0]
    for document, place in ((first, slice(0, 9)), (second, slice(9, 16))):
        alone = tiny_logits(rows_of(document[None]), sliding_window=window)[0]
        comparing.assert_trees_close(both[place], alone)


def test_changing_one_document_leaves_the_logits_of_the_next_bit_unchanged():
    """known-bugs B1."""
    second = random_ids(7, seed=2)
    before, after = (
        tiny_logits(packed(random_ids(9, seed=seed), second), dtype=np.float32)[0]
        for seed in (1, 3)
    )
    assert np.all(np.any(before[:9] != after[:9], axis=-1))
    np.testing.assert_array_equal(before[9:], after[9:])


def test_weights_in_16_bits_give_16_bit_logits_near_the_float32_ones():
    rows = rows_of(random_ids(1, 12))
    wide, narrow = (
        tiny_logits(rows, dtype=dtype) for dtype in (np.float32, jnp.bfloat16)
    )
    assert narrow.dtype == jnp.bfloat16
    difference = np.linalg.norm(narrow.astype(np.float32) - wide)
    assert difference < 3e-2 * np.linalg.norm(wide)


def test_linears_are_listed_in_the_order_they_run():
    model = llama.Llama(tiny.CONFIG)
    d, f, kv = 32, 48, 16
    got = {linear.module: (linear.in_dim, linear.out_dim) for linear in model.linears()}
    assert list(got.items()) == [
        ("self_attn.q_proj", (d, d)),
        ("self_attn.k_proj", (d, kv)),
        ("self_attn.v_proj", (d, kv)),
        ("self_attn.o_proj", (d, d)),
        ("mlp.gate_proj", (d, f)),
        ("mlp.up_proj", (d, f)),
        ("mlp.down_proj", (f, d)),
    ]

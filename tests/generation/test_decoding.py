import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama, rotary
from mtuner_jax.adapters import lora
from mtuner_jax.generation import decoding, sampling
from mtuner_jax.ops import tapes
from mtuner_jax.ops.low_rank.operands import LayerAdapters, Lora
from mtuner_jax.protocols.states import Batch
from tests import tiny

PROMPT = [3, 17, 99, 4, 5]
CONFIGS = {
    **tiny.MODELS,
    "window": dataclasses.replace(tiny.CONFIG, family="mistral", sliding_window=4),
    "yarn": dataclasses.replace(
        tiny.CONFIG,
        rope_scaling=rotary.YarnScaling(
            factor=4.0, original_max_position_embeddings=16, attention_factor=1.1
        ),
    ),
}


def setting(name):
    model = llama.Llama(CONFIGS[name])
    weights = tiny.parameters(model, dtype=np.float32)
    specs = tiny.adapters(model)
    adapted = decoding.Adapted(
        tiny.filled(specs, dtype=np.float32), lora.scaling_arrays(specs)
    )
    return model, weights, adapted


def whole_logits(model, weights, adapted, ids):
    """[T, V] of the training path, which knows no cache."""
    ids = jnp.asarray(ids, jnp.int32)[None]
    ones = jnp.ones_like(ids)
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    rows = Batch(ids, ids, ones, ones, positions, ones)
    context = model.context(rows)

    def body(x_BTD, layer):
        layer_weights, (adapters, scalings) = layer
        loras = {
            module: Lora(leaf["lora_a"], leaf["lora_b"], scalings[module])
            for module, leaf in adapters.items()
        }
        x_BTD = model.layer(
            layer_weights,
            LayerAdapters(loras, None),
            x_BTD,
            context=context,
            tape=tapes.Tape(),
        )
        return x_BTD, None

    x_BTD = model.embed(jnp.asarray(weights["embed"]["table"]), ids)
    x_BTD, _ = jax.lax.scan(body, x_BTD, (weights["layers"], adapted))
    x_BTD = model.final_norm(weights["head"]["norm"], x_BTD)
    table = weights["head"].get("table", weights["embed"]["table"])
    return (x_BTD @ table[: model.vocab_size].T)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_the_most_likely_ones_of_the_whole_text(name):
    model, weights, adapted = setting(name)
    generator = decoding.Generator(model, weights, adapted)
    tokens = list(
        generator.stream(
            PROMPT, max_new_tokens=12, stop_ids=frozenset(), choice=sampling.Choice()
        )
    )
    text = [*PROMPT, *tokens]
    run = jax.jit(functools.partial(whole_logits, model))
    logits = np.asarray(run(weights, adapted, np.asarray(text)))[len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()
    # Far enough apart that rounding decides none of them.
    best = np.sort(logits, axis=-1)[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 1e-4


def test_adapters_change_the_answer_and_none_is_the_base():
    model, weights, adapted = setting("gqa")
    answers = [
        list(
            decoding.Generator(model, weights, each).stream(
                PROMPT, max_new_tokens=8, stop_ids=frozenset(), choice=sampling.Choice()
            )
        )
        for each in (adapted, None)
    ]
    assert answers[0] != answers[1]


def test_an_answer_ends_at_a_stop_or_at_its_limit():
    model, weights, _ = setting("gqa")
    generator = decoding.Generator(model, weights)
    run = functools.partial(generator.stream, PROMPT, choice=sampling.Choice())
    tokens = list(run(max_new_tokens=6, stop_ids=frozenset()))
    assert len(tokens) == 6
    stop = tokens[2]
    assert (
        list(run(max_new_tokens=6, stop_ids=frozenset([stop])))
        == (tokens[: tokens.index(stop) + 1])
    )


def test_transformers_generates_the_same(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        want = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            do_sample=False,
            pad_token_id=0,
        )
    from models import llama_family
    from mtuner_jax.checkpoints import safetensors_files
    from mtuner_jax.runs import generating, shapes

    shape = shapes.of_hf(llama_family.FAMILY, shapes.hf_config(tmp_path), tmp_path)
    model, weights = generating.load(
        shape, safetensors_files.Folder(tmp_path), dtype="float32"
    )
    got = decoding.Generator(model, weights).stream(
        PROMPT, max_new_tokens=10, stop_ids=frozenset(), choice=sampling.Choice()
    )
    assert list(got) == want[0, len(PROMPT) :].tolist()

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from mtuner_jax.adapters import lora
from mtuner_jax.engines import layer_passes
from mtuner_jax.planning import plans
from mtuner_jax.planning.plans import Saved
from tests import tiny

ROWS, TOKENS = 2, 12
CONFIG = tiny.CONFIG
HEAD_FLOATS = ROWS * TOKENS * CONFIG.head_dim
QUERY_FLOATS = CONFIG.num_heads * HEAD_FLOATS
KEY_FLOATS = CONFIG.num_kv_heads * HEAD_FLOATS
KEPT_FLOATS = {
    Saved.LAYER_INPUT: {},
    Saved.ATTENTION_AND_GATES: {
        "query": QUERY_FLOATS,
        "key": KEY_FLOATS,
        "value": KEY_FLOATS,
        "attention": QUERY_FLOATS,
        "attention_extra": ROWS * TOKENS * CONFIG.num_heads,  # softmax statistics
        "gate": ROWS * TOKENS * CONFIG.intermediate_size,
        "up": ROWS * TOKENS * CONFIG.intermediate_size,
    },
}


def segment_run():
    """(run, inputs, x, arena) of all layers on one device, whole weights."""
    model = llama.Llama(CONFIG)
    specs = tiny.adapters(model)
    rows = tiny.batch(
        np.random.default_rng(0), rows=ROWS, tokens=TOKENS, vocab_size=model.vocab_size
    )
    run = layer_passes.LayerRun(
        model=model, axes=(), context=model.context(rows), drop=None
    )
    inputs = layer_passes.SegmentInputs(
        shards=tiny.parameters(model, dtype=np.float32)["layers"],
        adapters=tiny.filled(specs, dtype=np.float32),
        scalings=lora.scaling_arrays(specs),
        layer=jnp.arange(model.num_layers, dtype=jnp.int32),
    )
    x_BTD = jnp.zeros((ROWS, TOKENS, CONFIG.hidden_size))
    arena = jnp.zeros((model.num_layers, *x_BTD.shape))
    return run, inputs, x_BTD, arena


def segment_of(saved):
    return plans.SegmentPlan(num_layers=CONFIG.num_layers, saved=saved)


def residuals(saved):
    """What the forward loop hands to the backward loop: (arena, kept tensors)."""
    run, inputs, x_BTD, arena = segment_run()
    forward = functools.partial(layer_passes.forward, run, segment_of(saved))
    (_, arena), kept = jax.eval_shape(forward, inputs, (x_BTD, arena))
    return arena, kept


@pytest.mark.parametrize("saved", Saved)
def test_policy_keeps_exactly_these_floats(saved):
    arena, kept = residuals(saved)
    got = {name: math.prod(leaf.shape) for name, leaf in kept.items()}
    want = {name: CONFIG.num_layers * n for name, n in KEPT_FLOATS[saved].items()}
    assert got == want
    assert arena.size == CONFIG.num_layers * ROWS * TOKENS * CONFIG.hidden_size


def dots_of_backward(saved):
    run, inputs, x_BTD, arena = segment_run()
    backward = functools.partial(layer_passes.backward, run, segment_of(saved))
    _, kept = residuals(saved)
    lowered = jax.jit(backward).lower(inputs, kept, (x_BTD, arena))
    return lowered.as_text().count("stablehlo.dot_general")


def test_backward_recomputes_only_what_was_not_kept():
    """Not the products of q, k, v, gate and up, nor attention's scores and output.

    Their adapters' x @ A stays (B's gradient needs it); (x @ A) @ B goes as well.
    """
    everything = dots_of_backward(Saved.LAYER_INPUT)
    with_kept = dots_of_backward(Saved.ATTENTION_AND_GATES)
    attention, linears, updates = 2, 5, 5
    assert everything - with_kept == attention + linears + updates

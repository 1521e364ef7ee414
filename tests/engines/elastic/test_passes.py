import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from mtuner_jax.adapters import lora
from mtuner_jax.devices import meshes
from mtuner_jax.engines.elastic import passes
from mtuner_jax.engines.elastic.layer_runs import LayerRun
from mtuner_jax.engines.elastic.segment_weights import Backwards, Segment
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import arena_layouts
from mtuner_jax.planning.plans import Saved
from mtuner_jax.weights import layouts
from tests import tiny

ROWS, TOKENS = 2, 12
CONFIG = tiny.CONFIG
LAYERS = CONFIG.num_layers
TOKEN_FLOATS = ROWS * TOKENS
INPUT_FLOATS = TOKEN_FLOATS * CONFIG.hidden_size
HIDDEN_FLOATS = TOKEN_FLOATS * CONFIG.intermediate_size
QUERY_FLOATS = TOKEN_FLOATS * CONFIG.num_heads * CONFIG.head_dim
KEY_FLOATS = TOKEN_FLOATS * CONFIG.num_kv_heads * CONFIG.head_dim
ATTENTION = {
    "query": QUERY_FLOATS,
    "key": KEY_FLOATS,
    "value": KEY_FLOATS,
    "attention": QUERY_FLOATS,
    "attention_extra": TOKEN_FLOATS * CONFIG.num_heads,  # softmax statistics
}
GATES = {"gate": HIDDEN_FLOATS, "up": HIDDEN_FLOATS}
LINEARS = {
    "attention_input": INPUT_FLOATS,
    "residual": INPUT_FLOATS,
    "mlp_input": INPUT_FLOATS,
    "hidden": HIDDEN_FLOATS,
}
KEPT_FLOATS = {
    Saved.LINEARS: {**ATTENTION, **GATES, **LINEARS},
    Saved.ATTENTION_AND_GATES: {**ATTENTION, **GATES},
    Saved.ATTENTION: ATTENTION,
    Saved.LAYER_INPUT: {},
    Saved.LAYER_INPUT_ON_HOST: {},
}


def segment_run(saved, *, prefetch=False, config=CONFIG):
    """(run, segment, x, arena) of all layers on one device, whole weights."""
    model = llama.Llama(config)
    specs = tiny.adapters(model)
    rows = tiny.batch(
        np.random.default_rng(0), rows=ROWS, tokens=TOKENS, vocab_size=model.vocab_size
    )
    run = LayerRun(
        model=model,
        axes=(),
        context=model.context(rows),
        drop=None,
        adapters=tiny.filled(specs, dtype=np.float32),
        scalings=lora.scaling_arrays(specs),
    )
    input_size = 0 if saved is Saved.LAYER_INPUT_ON_HOST else INPUT_FLOATS
    layout = arena_layouts.layout(LAYERS * [input_size], LAYERS * [0])
    whole = plans.static(name="fsdp", num_layers=LAYERS, mesh_sizes=(1,), rows=(1, 1))
    mesh = meshes.make(meshes.parse("1"), jax.devices())
    table = layouts.table(model, whole, mesh, dtype="float32")
    segment = Segment(
        plan=plans.SegmentPlan(num_layers=LAYERS, saved=saved, prefetch=prefetch),
        start=0,
        first=0,
        table=table["segments"]["0"],
        shards=tiny.parameters(model, dtype=np.float32)["layers"],
        arena=layout,
        axes=(),
        dtype=np.dtype("float32"),
    )
    x_BTD = jnp.zeros((ROWS, TOKENS, CONFIG.hidden_size))
    return run, segment, x_BTD, jnp.zeros((layout.rows, layout.width))


def residuals(saved, **settings):
    """What the forward loop hands to the backward loop: (arena, kept)."""
    run, segment, x_BTD, arena = segment_run(saved, **settings)
    forward = functools.partial(passes.forward, run, [segment])
    traced = jax.jit(forward).trace(x_BTD, arena)
    results = jax.tree.unflatten(
        jax.tree.structure(traced.out_info), traced.jaxpr.out_avals
    )
    _, (kept,), arena = results
    return arena, kept


@pytest.mark.parametrize("saved", Saved)
@pytest.mark.parametrize("prefetch", [False, True])
def test_policy_keeps_exactly_these_floats(saved, prefetch):
    arena, kept = residuals(saved, prefetch=prefetch)
    got = {name: math.prod(leaf.shape) for name, leaf in kept.tensors.items()}
    assert got == {name: LAYERS * n for name, n in KEPT_FLOATS[saved].items()}
    assert kept.blocks == {}
    if saved is Saved.LAYER_INPUT_ON_HOST:
        assert arena.shape[0] == 1
        assert sum(leaf.size for leaf in kept.inputs) == LAYERS * INPUT_FLOATS
        spaces = {leaf.memory_space for leaf in kept.inputs}
        assert spaces == {jax.memory.Space.Host}
    else:
        assert arena.size == LAYERS * INPUT_FLOATS
        assert kept.inputs == []


def dots_of_backward(saved, config):
    """Products in the lowered backward pass of a layer."""
    run, segment, x_BTD, arena = segment_run(saved, config=config)
    kept = jax.tree.map(jnp.zeros_like, residuals(saved, config=config)[1])

    def backward(kept, dx_BTD, arena):
        grads = jax.tree.map(jnp.zeros_like, run.adapters)
        state = Backwards(dx_BTD, arena, grads)
        return passes.backward(run, [segment], [kept], state)

    lowered = jax.jit(backward).lower(kept, x_BTD, arena)
    return lowered.as_text().count("stablehlo.dot_general")


# Forward a linear takes x W and its adapter s B, and each input s = x A of all its
# adapters. Backward a linear takes the gradient to x and its adapter those to s and B,
# each input those to A and of A to x, and s again. Attention's backward has five, the
# scores among them; its forward two.
LINEAR, INPUT = 2, 1
LINEAR_BACKWARD, INPUT_BACKWARD = 3, 3
ATTENTION_FORWARD, ATTENTION_BACKWARD = 2, 5
O_PROJ = LINEAR + INPUT
GATE_UP = 2 * LINEAR + INPUT
QKV = 3 * LINEAR + INPUT


@pytest.mark.parametrize(
    ("saved", "recomputed"),
    [
        (Saved.LINEARS, 0),
        (Saved.ATTENTION_AND_GATES, O_PROJ),
        (Saved.ATTENTION, O_PROJ + GATE_UP),
        (Saved.LAYER_INPUT, O_PROJ + GATE_UP + QKV + ATTENTION_FORWARD),
        (Saved.LAYER_INPUT_ON_HOST, O_PROJ + GATE_UP + QKV + ATTENTION_FORWARD),
    ],
)
@pytest.mark.parametrize("model", ["gqa", "qk_norm"])
def test_backward_recomputes_only_what_was_not_kept(saved, recomputed, model):
    backward = 7 * LINEAR_BACKWARD + 4 * INPUT_BACKWARD + ATTENTION_BACKWARD
    assert dots_of_backward(saved, tiny.MODELS[model]) == backward + recomputed

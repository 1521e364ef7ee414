"""Layer inputs in pinned host memory train exactly like layer inputs on the device.

XLA has read offloaded rows of a loop in the wrong order without an error (openxla/xla
pull requests 46231 and 46308), so this runs on the GPU, with enough bytes that copies
overlap with computation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import llama, llama_configs
from mtuner_jax.devices import meshes
from mtuner_jax.engines import compiling
from mtuner_jax.engines.elastic import steps
from mtuner_jax.planning import plans
from mtuner_jax.planning.plans import Saved
from mtuner_jax.protocols.states import TrainState
from mtuner_jax.weights import random_weights
from tests import comparing, tiny

CONFIG = llama_configs.LlamaConfig(
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
)
TOKENS = 1024
MICROBATCH, TAIL_CHUNKS = 4, 2
STEPS = 4
# Not Adam: its first updates are signs, which turn rounding into large differences. At
# a rate of 0.1, differences of two float64 programs grow a thousandfold with each step.
OPTIMIZER = optax.sgd(1e-4, momentum=0.9)
ON_HOST, ON_DEVICE = Saved.LAYER_INPUT_ON_HOST, Saved.LAYER_INPUT
# What each segment saves, and whether it gathers ahead. The last one is the tail.
LAYERS = (4, 1, 3)
CASES = {
    "in a loop": ((ON_HOST, False), (ON_HOST, False), (ON_HOST, False)),
    "ahead": ((ON_HOST, True), (ON_HOST, True), (ON_HOST, True)),
    "mixed": ((ON_HOST, True), (ON_DEVICE, True), (ON_HOST, False)),
}
REFERENCE = 3 * ((ON_DEVICE, False),)


@pytest.fixture(params=["float64", "bfloat16"])
def dtype(request):
    """Of the weights: as trained, and one in which a wrong term cannot hide."""
    jax.config.update("jax_enable_x64", request.param == "float64")
    yield request.param
    jax.config.update("jax_enable_x64", False)


@functools.cache
def make(kinds, dtype):
    """(spec, compiled step) of one device whose segments save and prefetch as told."""
    model = llama.Llama(CONFIG)
    mesh = meshes.make(meshes.parse("1"), jax.devices()[:1])
    segments = tuple(
        plans.SegmentPlan(
            num_layers=count, saved=saved, prefetch=prefetch, bwd_keep_axes=1
        )
        for count, (saved, prefetch) in zip(LAYERS, kinds, strict=True)
    )
    plan = plans.Plan(
        mesh_sizes=tuple(mesh.devices.shape),
        segments=segments,
        microbatch=MICROBATCH,
        accumulation=2,
        tail_layers=LAYERS[-1],
        tail_chunks=TAIL_CHUNKS,
        weight_dtype=dtype,
    )
    spec = steps.StepSpec(
        model=model, plan=plan, mesh=mesh, adapters=tiny.adapters(model)
    )
    options = compiling.options(
        on_gpu=jax.default_backend() == "gpu", num_devices=mesh.size
    )
    step = steps.build_train(spec, OPTIMIZER, compiler_options=options)
    state, weights, arenas = start(spec, dtype)
    batch = rows_of(spec, np.random.default_rng(0))
    return spec, step.lower(state, weights, batch, arenas).compile()


def start(spec, dtype):
    """Fresh (state, weights, arenas)."""
    wide = np.float64 if dtype == "float64" else np.float32
    adapters = tiny.filled(spec.adapters, dtype=wide)
    state = TrainState(adapters, OPTIMIZER.init(adapters), jnp.int32(0))
    state = jax.device_put(state, steps.state_shardings(spec, OPTIMIZER))
    weights = random_weights.draw(spec.table, spec.mesh, jax.random.key(0))
    arenas = steps.init_arenas(spec, weights, max_length=TOKENS)
    return state, weights, arenas


def rows_of(spec, rng):
    """A global batch on the device."""
    rows = tiny.batch(
        rng, rows=spec.plan.rows, tokens=TOKENS, vocab_size=CONFIG.vocab_size
    )
    return steps.put(steps.cut(rows, spec.plan), spec.mesh)


def results(kinds, dtype):
    """[(loss, gradient norm, update of the adapters)] of each step."""
    spec, step = make(kinds, dtype)
    state, weights, arenas = start(spec, dtype)
    rng = np.random.default_rng(0)
    history, before = [], jax.device_get(state.adapters)
    for _ in range(STEPS):
        batch = rows_of(spec, rng)
        state, metrics, arenas = step(state, weights, batch, arenas)
        loss, norm, after = jax.device_get(
            (metrics.loss, metrics.grad_norm, state.adapters)
        )
        history.append((loss, norm, jax.tree.map(np.subtract, after, before)))
        before = after
    return history


@functools.cache
def reference(dtype):
    return results(REFERENCE, dtype)


def host_bytes(kinds, dtype):
    """Pinned host memory of the compiled step."""
    return make(kinds, dtype)[1].memory_analysis().host_temp_size_in_bytes


def input_bytes(kinds, dtype):
    """Layer inputs that wait on the host at the same time."""
    one = MICROBATCH * TOKENS * CONFIG.hidden_size * jnp.dtype(dtype).itemsize
    parts = (1, 1, TAIL_CHUNKS)
    return sum(
        count * one // part
        for count, part, (saved, _) in zip(LAYERS, parts, kinds, strict=True)
        if saved is ON_HOST
    )


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", CASES)
def test_inputs_on_the_host_train_like_inputs_on_the_device(case, dtype):
    got, want = results(CASES[case], dtype), reference(dtype)
    for one, other in zip(got, want, strict=True):
        comparing.assert_trees_close(one, other, bound=comparing.BOUNDS[dtype])


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_step_holds_the_inputs_on_the_host(case, dtype):
    kinds = CASES[case]
    assert host_bytes(REFERENCE, dtype) == 0
    assert host_bytes(kinds, dtype) >= input_bytes(kinds, dtype) > 2**25

"""Layer inputs in pinned host memory; on GPUs also tests/gpu/test_host_offload.py."""

import jax.numpy as jnp
import optax
import pytest

from models import llama, llama_configs
from mtuner_jax.engines import compiling
from mtuner_jax.engines.elastic import engine, steps
from mtuner_jax.hardware import cards
from mtuner_jax.inspection import compile_only
from mtuner_jax.planning import plans
from mtuner_jax.planning.plans import Saved
from tests import tiny
from tests.engines.elastic import plan_cases

ON_HOST, IN_ARENA = Saved.LAYER_INPUT_ON_HOST, Saved.LAYER_INPUT


def segment(num_layers, saved=ON_HOST, *, prefetch=True, **settings):
    return plans.SegmentPlan(
        num_layers=num_layers, saved=saved, prefetch=prefetch, **settings
    )


PLANS = {
    "across segments": ((segment(2, bwd_keep_axes=1), segment(1)), {}),
    "after the arena": ((segment(1, IN_ARENA), segment(2, fwd_keep_axes=1)), {}),
    "in tail chunks": (
        (segment(3, bwd_keep_axes=1),),
        {"tail_layers": 3, "tail_chunks": 2},
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PLANS)
def test_inputs_fetched_ahead_give_the_plain_step(name):
    segments, settings = PLANS[name]
    plan = plans.Plan(
        mesh_sizes=(4,),
        segments=segments,
        microbatch=2,
        accumulation=2,
        weight_dtype="float64",
        **settings,
    )
    plan_cases.check(plan_cases.Case(mesh="4", plan=plan), dtype=jnp.float64)


TOKENS = 512
SMALL = llama_configs.LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=128,
)


def host_bytes(*, prefetch):
    """What a step compiled for a GPU holds in pinned host memory."""
    model = llama.Llama(SMALL)
    plan = plans.Plan(
        mesh_sizes=(1,),
        segments=(segment(2, prefetch=prefetch), segment(1, prefetch=prefetch)),
        microbatch=2,
        accumulation=1,
    )
    spec = steps.StepSpec(
        model=model,
        plan=plan,
        mesh=compile_only.topology_mesh(cards.H200, plan.mesh_sizes),
        adapters=tiny.adapters(model, target_modules=("q_proj",)),
    )
    optimizer = optax.sgd(0.1)
    arguments = engine.abstract_arguments(spec, optimizer, max_length=TOKENS)
    options = compiling.options(on_gpu=True, num_devices=spec.mesh.size)
    step = steps.build_train(spec, optimizer, compiler_options=options)
    stats = step.lower(*arguments).compile().memory_analysis()
    return stats.host_temp_size_in_bytes


@pytest.mark.aot
@pytest.mark.skipif(
    not compile_only.available(), reason=compile_only.unavailable_reason()
)
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_input_waits_on_the_host(prefetch):
    """XLA must not keep those of layers that run outside of a loop on the device."""
    one = 2 * 2 * TOKENS * SMALL.hidden_size
    assert host_bytes(prefetch=prefetch) == SMALL.num_layers * one

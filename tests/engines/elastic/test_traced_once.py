"""A step is traced once, whatever batch arrives: a second trace is a second compile."""

import jax
import numpy as np
import optax
import pytest

from models import llama
from mtuner_jax.devices import meshes
from mtuner_jax.engines.elastic import steps
from mtuner_jax.planning import plans
from mtuner_jax.weights import layouts, random_weights
from tests import tiny

TOKENS = 12
STEPS = 3


class CountingLlama(llama.Llama):
    """Counts how often a whole program is traced: each embeds once."""

    traces = 0

    def embed(self, table_VD, ids_BT):
        type(self).traces += 1
        return super().embed(table_VD, ids_BT)


def batches(plan, rng):
    """An epoch whose last batch is not full."""
    for rows in (plan.rows, plan.rows, plan.rows - 3):
        yield tiny.batch(rng, rows=rows, tokens=TOKENS, vocab_size=120)


@pytest.mark.parametrize("bwd_keep_axes", [0, 2])
def test_step_and_evaluation_are_traced_once_each(bwd_keep_axes):
    model = CountingLlama(tiny.CONFIG)
    mesh = meshes.make(meshes.parse("2x2x2"), jax.devices())
    segment = plans.SegmentPlan(num_layers=3, bwd_keep_axes=bwd_keep_axes)
    plan = plans.Plan(
        mesh_sizes=(2, 2, 2),
        segments=(segment,),
        microbatch=1,
        accumulation=2,
        weight_dtype="float32",
    )
    spec = steps.StepSpec(
        model=model, plan=plan, mesh=mesh, adapters=tiny.adapters(model)
    )
    optimizer = optax.adamw(1e-2)
    table = layouts.table(model, plan, mesh, dtype="float32")
    weights = random_weights.draw(table, mesh, jax.random.key(0))
    state = steps.init_state(spec, optimizer)
    arenas = steps.init_arenas(spec, weights, max_length=TOKENS)
    assert bool(arenas) == plan.keeps_copies == (bwd_keep_axes > 0)
    train = steps.build_train(spec, optimizer)
    evaluate = steps.build_eval(spec)
    rng = np.random.default_rng(0)
    before, after_one = CountingLlama.traces, None
    for rows in batches(plan, rng):
        batch = steps.put(steps.cut(rows, plan), mesh)
        state, _, arenas = train(state, weights, batch, arenas)
        evaluate(state.adapters, weights, batch)
        after_one = after_one or CountingLlama.traces
    # A trace may run the loop's body more than once; a second step must not.
    assert before < CountingLlama.traces == after_one
    assert train._cache_size() == evaluate._cache_size() == 1
    assert int(state.step) == STEPS

"""known-bugs A1 to A3: the mean is over the trained tokens of the whole step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import llama
from mtuner_jax.devices import meshes
from mtuner_jax.engines.elastic import steps
from mtuner_jax.planning import plans
from mtuner_jax.protocols.states import TrainState
from mtuner_jax.weights import layouts
from tests import comparing, tiny

MODEL = llama.Llama(dataclasses.replace(tiny.CONFIG, num_layers=1))
SPECS = tiny.adapters(MODEL, target_modules=("q_proj", "up_proj"))
OPTIMIZER = optax.sgd(1.0)
CUTS = {"at once": (4, 1), "accumulated": (1, 4), "two devices": (1, 2)}


@functools.cache
def built(cut, mesh, dtype):
    """(plan, mesh, step, weights) of a cut on a mesh."""
    mesh = meshes.make(meshes.parse(mesh), jax.devices())
    sizes = tuple(mesh.devices.shape)
    plan = plans.static(
        name="fsdp",
        num_layers=1,
        mesh_sizes=sizes,
        rows=cut,
        weight_dtype=np.dtype(dtype).name,
    )
    spec = steps.StepSpec(model=MODEL, plan=plan, mesh=mesh, adapters=SPECS)
    plain = tiny.parameters(MODEL, dtype=dtype)
    arranged = {
        "embed": plain["embed"],
        "head": plain["head"],
        "segments": {"0": plain["layers"]},
    }
    weights = jax.tree.map(
        lambda leaf, value: jax.device_put(value, leaf.sharding),
        layouts.layout(MODEL, plan, mesh, dtype=dtype),
        arranged,
    )
    return plan, mesh, steps.build_train(spec, OPTIMIZER), weights


def run_step(rows, cut, *, mesh="1"):
    """(update of the adapters, metrics) of one step of plain gradient descent."""
    dtype = jnp.zeros(0).dtype
    plan, mesh, step, weights = built(cut, mesh, dtype)
    before = tiny.filled(SPECS, dtype=dtype)
    state = TrainState(before, OPTIMIZER.init(before), jnp.int32(0))
    batch = steps.put(steps.cut(rows, plan), mesh)
    state, metrics, _ = step(state, weights, batch, {})
    updates = jax.tree.map(np.subtract, jax.device_get(state.adapters), before)
    return updates, jax.device_get(metrics)


def lopsided_rows():
    """Four rows with 1, 9, 0 and 5 trained tokens."""
    rows = tiny.batch(
        np.random.default_rng(0), rows=4, tokens=12, vocab_size=MODEL.vocab_size
    )
    weights = np.zeros_like(rows.weights)
    for row, count in enumerate((1, 9, 0, 5)):
        weights[row, :count] = 1.0
    return rows._replace(weights=weights)


@pytest.mark.usefixtures("x64")
def test_every_cut_of_the_batch_gives_the_token_mean():
    """One trained token of loss 2.0 and nine of 1.0 make 1.1, not 1.5."""
    rows = lopsided_rows()
    want_updates, want = run_step(rows, CUTS["at once"])
    assert float(want.trained_tokens) == 15.0
    plain = tiny.PlainStep(model=MODEL, specs=SPECS, optimizer=OPTIMIZER)
    loss, grads = jax.jit(jax.value_and_grad(plain.loss))(
        tiny.filled(SPECS, dtype=np.float64),
        tiny.parameters(MODEL, dtype=np.float64),
        rows,
        jnp.int32(0),
    )
    comparing.assert_trees_close(want.loss, np.asarray(loss))
    comparing.assert_trees_close(want_updates, jax.tree.map(lambda g: -g, grads))
    for name, mesh in (("accumulated", "1"), ("two devices", "2")):
        updates, metrics = run_step(rows, CUTS[name], mesh=mesh)
        comparing.assert_trees_close(updates, want_updates)
        comparing.assert_trees_close(metrics, want)
    each = [
        run_step(rows._replace(weights=rows.weights * only), CUTS["at once"])[1]
        for only in np.eye(4, dtype=np.float32)[:, :, None]
    ]
    losses = np.array([metrics.loss for metrics in each])
    comparing.assert_trees_close(
        np.asarray(want.loss), np.asarray(losses @ [1, 9, 0, 5] / 15)
    )
    assert abs(losses.mean() - want.loss) > 0.01


def test_a_step_without_trained_tokens_changes_nothing():
    rows = lopsided_rows()
    rows = rows._replace(weights=np.zeros_like(rows.weights))
    updates, metrics = run_step(rows, CUTS["at once"])
    assert metrics == (0.0, 0.0, 0.0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))

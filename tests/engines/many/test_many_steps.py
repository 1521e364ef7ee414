"""Adapters that train together equal adapters that train alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.planning import plans
from tests import comparing
from tests.engines.many import many_cases

DTYPE = np.dtype("float64")
ONE_DEVICE = many_cases.plan(
    (1,), [{"num_layers": 3, "saved": plans.Saved.ATTENTION_AND_GATES}],
    microbatch=2, accumulation=2,
)  # fmt: skip
ELASTIC = many_cases.plan(
    (2, 2),
    [
        {"num_layers": 1, "bwd_keep_axes": 1, "prefetch": True},
        {"num_layers": 2, "rest_axes": 1, "fwd_keep_axes": 2, "bwd_keep_axes": 1},
    ],
    microbatch=2,
    accumulation=1,
    tail_layers=2,
    tail_chunks=2,
    adapters=plans.AdapterState.SHARDED,
    head=plans.Table.SPLIT,
)
PLANS = {"one device": ("1", ONE_DEVICE), "elastic": ("2x2", ELASTIC)}


def check(run, metrics, ends, done):
    """What the step tells, and the updates, of the adapters that stepped."""
    alone, params = many_cases.alone(DTYPE), many_cases.setting(DTYPE)[3]
    adapters = run.adapters()
    for number in np.flatnonzero(ends).tolist():
        loss, norm, after = alone[number][done[number]]
        comparing.assert_trees_close(metrics.loss[number], loss)
        comparing.assert_trees_close(metrics.grad_norm[number], norm)
        before = params[number]
        comparing.assert_trees_close(
            jax.tree.map(np.subtract, adapters[number], before),
            jax.tree.map(np.subtract, after, before),
        )
        done[number] += 1


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PLANS)
def test_four_together_equal_the_four_alone_after_twenty_steps_and_a_resume(name):
    mesh, plan = PLANS[name]
    batches = many_cases.setting(DTYPE)[4]
    run = many_cases.Together(plan, mesh, DTYPE)
    done = [0] * len(batches)
    last = None
    for number, (rows, ends) in enumerate(
        many_cases.mixed(batches, num_rows=plan.rows, seed=5)
    ):
        if number == 11:  # within batches: a new program and a state from the host
            state = jax.device_get(run.state)
            run = many_cases.Together(plan, mesh, DTYPE)
            run.state = run.place(state)
        metrics = run.run(rows, ends)
        assert metrics.finite
        check(run, metrics, ends, done)
        last = number
    assert done == [len(one) for one in batches]
    assert run.state.step == last + 1
    assert list(run.state.steps) == done


@pytest.mark.usefixtures("x64")
def test_adapter_without_tokens_and_without_end_stays_bit_for_bit():
    batches = many_cases.setting(DTYPE)[4]
    run = many_cases.Together(ONE_DEVICE, "1", DTYPE)
    before = jax.device_get(run.state)
    rows = many_cases.first_fit([(2, one) for one in batches[2][0]])
    run.run(rows, np.array([False, False, True, False]))
    after = jax.device_get(run.state)
    names = ("adapters", "first_moments", "second_moments", "grads")
    for name in names:
        old, new = (
            run.stack.split(jax.tree.map(jnp.asarray, getattr(state, name)))
            for state in (before, after)
        )
        for number in (0, 1, 3):
            jax.tree.map(np.testing.assert_array_equal, new[number], old[number])
    assert list(after.steps) == [0, 0, 1, 0]


@pytest.mark.usefixtures("x64")
def test_step_that_is_not_finite_changes_no_adapter():
    batches = many_cases.setting(DTYPE)[4]
    run = many_cases.Together(ONE_DEVICE, "1", DTYPE)
    before = jax.device_get(run.state)
    module = next(iter(before.adapters))
    broken = before.adapters[module]["lora_b"].copy()
    broken[:, run.stack.columns[module][0]] = np.inf
    spoilt = before._replace(
        adapters=before.adapters
        | {module: before.adapters[module] | {"lora_b": broken}}
    )
    run.state = run.place(spoilt)
    rows = many_cases.first_fit([(0, batches[0][0][0]), (2, batches[2][0][0])])
    metrics = run.run(rows, np.array([True, False, True, False]))
    assert not metrics.finite
    after = jax.device_get(run.state)
    jax.tree.map(np.testing.assert_array_equal, after.adapters, spoilt.adapters)
    assert list(after.steps) == [0, 0, 0, 0]
    assert after.step == 1

import dataclasses

import jax.numpy as jnp
import pytest

from mtuner_jax.planning import plans
from tests.engines.elastic import plan_cases

NUM_RANDOM = 200
# A few of the random plans in every run; together they touch each choice and mesh.
FIXED = (1, 3, 8, 14, 36)
QK_NORM = (10, 21)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", FIXED)
def test_random_plan_equals_the_plain_step(seed):
    plan_cases.check(plan_cases.random_case(seed), dtype=jnp.float64)


# Each with three segments of unlike saved tensors and a tail.
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", QK_NORM)
def test_random_plan_of_a_model_with_norms_of_queries_and_keys(seed):
    case = dataclasses.replace(plan_cases.random_case(seed), variant="qk_norm")
    plan_cases.check(case, dtype=jnp.float64)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", sorted(set(range(NUM_RANDOM)) - set(FIXED)))
def test_each_random_plan_equals_the_plain_step(seed):
    plan_cases.check(plan_cases.random_case(seed), dtype=jnp.float64)


# One for each size: 3, 5, 6 and 7 devices, with copies, tails and every kind of table.
ODD_FIXED = (5, 14, 18, 21)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", ODD_FIXED)
def test_plan_on_a_mesh_that_divides_little_equals_the_plain_step(seed):
    case = plan_cases.random_case(seed, plan_cases.ODD_MESHES)
    plan_cases.check(case, dtype=jnp.float64)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", sorted(set(range(NUM_RANDOM // 2)) - set(ODD_FIXED)))
def test_each_plan_on_a_mesh_that_divides_little_equals_the_plain_step(seed):
    case = plan_cases.random_case(seed, plan_cases.ODD_MESHES)
    plan_cases.check(case, dtype=jnp.float64)


def stored_in(storage, **settings):
    """A case of weights stored in another dtype than that of activations."""
    segments = (
        plans.SegmentPlan(num_layers=1, bwd_keep_axes=1, prefetch=True),
        plans.SegmentPlan(num_layers=2, fwd_keep_axes=2),
    )
    plan = plans.Plan(
        mesh_sizes=(2, 3),
        segments=segments,
        microbatch=3,
        accumulation=1,
        weight_dtype=storage,
        **settings,
    )
    return plan_cases.Case(
        mesh="2x3", plan=plan, storage=storage, variant="bias_and_padded_vocabulary"
    )


def test_weights_in_bfloat16_under_activations_in_float32_are_converted():
    plan_cases.check(stored_in("bfloat16"), dtype=jnp.float32)


@pytest.mark.usefixtures("x64")
def test_weights_in_float32_under_activations_in_float64_are_converted():
    split = plans.Table.SPLIT
    case = stored_in("float32", embedding=split, head=split)
    plan_cases.check(case, dtype=jnp.float64)


def test_plan_in_float32_stays_within_rounding():
    segments = (
        plans.SegmentPlan(
            num_layers=2,
            fwd_keep_axes=2,
            bwd_keep_axes=1,
            saved=plans.Saved.ATTENTION_AND_GATES,
            prefetch=True,
        ),
        plans.SegmentPlan(num_layers=1, bwd_keep_axes=3, fwd_keep_axes=0),
    )
    plan = plans.Plan(
        mesh_sizes=(2, 2, 2),
        segments=segments,
        microbatch=2,
        accumulation=1,
        tail_layers=1,
        tail_chunks=2,
        weight_dtype="float32",
    )
    case = plan_cases.Case(mesh="2x2x2", plan=plan)
    plan_cases.check(case, dtype=jnp.float32)

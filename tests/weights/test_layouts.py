import chex
import jax
import jax.numpy as jnp
import pytest

from models import llama
from mtuner_jax.devices import meshes
from mtuner_jax.planning import plans
from mtuner_jax.weights import layouts, random_weights
from tests import tiny


def weights(mesh_text, counts):
    """Random weights under a plan of such segments, back in one stack a leaf."""
    model = llama.Llama(tiny.CONFIG)
    mesh_spec = meshes.parse(mesh_text)
    mesh = meshes.make(mesh_spec, jax.devices())
    plan = plans.Plan(
        mesh_sizes=tuple(mesh.devices.shape),
        segments=tuple(plans.SegmentPlan(num_layers=count) for count in counts),
        microbatch=1,
        accumulation=1,
    )
    table = layouts.table(model, plan, mesh, dtype="float32")
    tree = jax.device_get(random_weights.draw(table, mesh, jax.random.key(3)))
    stacks = [tree["segments"][str(index)] for index in range(len(counts))]
    tree["segments"] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)
    return tree


@pytest.mark.parametrize(("mesh", "counts"), [("2x2", (1, 2)), ("2x2x2", (1, 1, 1))])
def test_random_weights_depend_on_neither_plan_nor_mesh(mesh, counts):
    want, got = weights("1", (3,)), weights(mesh, counts)
    chex.assert_trees_all_equal(got, want)
    kernel = want["segments"]["self_attn.q_proj"]["kernel"]
    assert abs(float(kernel.std()) - 0.02) < 2e-3
    assert not jnp.array_equal(kernel[0], kernel[1])

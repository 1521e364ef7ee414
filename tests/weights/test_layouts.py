import chex
import jax
import jax.numpy as jnp
import numpy as np
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


def without_padding(tree, true_tree):
    """The tree in the other one's sizes; what lies outside of them must be 0."""

    def cut(array, true_array):
        kept = tuple(slice(size) for size in true_array.shape)
        assert np.count_nonzero(array) == np.count_nonzero(array[kept])
        return array[kept]

    return jax.tree.map(cut, tree, true_tree)


def test_rows_that_devices_do_not_divide_are_padded_and_the_others_not():
    model = llama.Llama(tiny.CONFIG)  # D = 32, F = 48, V = 120
    mesh = meshes.make(meshes.parse("2x3"), jax.devices())
    plan = plans.static(name="fsdp", num_layers=3, mesh_sizes=(2, 3), rows=(1, 1))
    table = layouts.table(model, plan, mesh, dtype="bfloat16")
    layer = table["segments"]["0"]
    up, down = layer["mlp.up_proj"]["kernel"], layer["mlp.down_proj"]["kernel"]
    assert (up.shape, up.stored_shape) == ((3, 32, 48), (3, 36, 48))
    assert down.shape == down.stored_shape == (3, 48, 32)
    assert table["embed"]["table"].stored_shape == (120, 32)
    assert {row.storage for row in jax.tree.leaves(table)} == {"bfloat16"}
    kernels = 3 * 36 * (32 + 16 + 16 + 32 + 48 + 48) + 3 * 48 * 32
    whole = 7 * 32  # norms
    abstract = layouts.layout(model, plan, mesh, dtype="bfloat16")
    per_device = (kernels + 2 * 120 * 32) // 6 + whole
    assert layouts.num_bytes(abstract) == 2 * per_device


@pytest.mark.parametrize(
    ("mesh", "counts"), [("2x2", (1, 2)), ("2x2x2", (1, 1, 1)), ("7", (2, 1))]
)
def test_random_weights_depend_on_neither_plan_nor_mesh(mesh, counts):
    want, got = weights("1", (3,)), weights(mesh, counts)
    chex.assert_trees_all_equal(without_padding(got, want), want)
    kernel = want["segments"]["self_attn.q_proj"]["kernel"]
    assert abs(float(kernel.std()) - 0.02) < 2e-3
    assert not jnp.array_equal(kernel[0], kernel[1])

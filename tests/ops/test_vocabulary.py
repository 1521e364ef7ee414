import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.devices import meshes
from mtuner_jax.numbers import chunking
from mtuner_jax.ops import vocabulary
from mtuner_jax.ops.cross_entropy import reference
from mtuner_jax.ops.cross_entropy.operands import LossTokens
from tests import comparing

VOCAB, PADDED, WIDTH = 37, 40, 6
ROWS, TOKENS = 8, 12  # some chunks of the loss
MESHES = ("2x2x2", "2x4", "8", "2", "1")


def mesh_of(text):
    return meshes.make(meshes.parse(text), jax.devices())


def table(mesh):
    """(whole table, the padded one split as the engine stores it).

    Rows of padding are large, so that none of them passes unseen.
    """
    rng = np.random.default_rng(0)
    table_VD = rng.normal(size=(VOCAB, WIDTH))
    padded_VD = np.full((PADDED, WIDTH), 1e3)
    padded_VD[:VOCAB] = table_VD
    split = NamedSharding(mesh, P(mesh.axis_names[::-1], None))
    return table_VD, jax.device_put(padded_VD, split)


def tokens(mesh):
    """(x, targets, weights) of all devices, [devices * S, ...]."""
    rng = np.random.default_rng(1)
    size = mesh.size * ROWS * TOKENS
    x_SD = rng.normal(size=(size, WIDTH))
    targets_S = rng.integers(0, VOCAB, size).astype(np.int32)
    targets_S[:2] = 0, VOCAB - 1
    weights_S = rng.integers(0, 3, size).astype(np.float32)
    weights_S[:2] = 1.0
    return x_SD, targets_S, weights_S


def by_device(array, mesh):
    return array.reshape(mesh.size, -1, *array.shape[1:])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mesh", MESHES)
def test_lookup_finds_the_rows_of_the_whole_table(mesh):
    mesh = mesh_of(mesh)
    axes = mesh.axis_names
    table_VD, split_VD = table(mesh)
    ids_BT = np.random.default_rng(2).integers(
        0, VOCAB, (mesh.size * ROWS, TOKENS), dtype=np.int32
    )
    ids_BT[0, :2] = 0, VOCAB - 1
    lookup = jax.shard_map(
        lambda shard_VD, ids_BT: vocabulary.lookup(shard_VD, ids_BT, axes=axes),
        mesh=mesh,
        in_specs=(P(axes[::-1], None), P(axes, None)),
        out_specs=P(axes, None, None),
    )
    got_BTD = jax.jit(lookup)(split_VD, ids_BT)
    np.testing.assert_array_equal(got_BTD, table_VD[ids_BT])


def split_loss(mesh, vocab_size=VOCAB):
    """(x, table, targets, weights) -> (loss of each token, gradient to x)."""
    axes = mesh.axis_names

    def run(x_SD, shard_VD, targets_S, weights_S):
        loss, dx_SD = vocabulary.value_and_grad(
            LossTokens(x_SD, targets_S, weights_S),
            shard_VD,
            axes=axes,
            vocab_size=vocab_size,
        )
        return loss, dx_SD

    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P(axes, None), P(axes[::-1], None), P(axes), P(axes)),
            out_specs=(P(axes), P(axes, None)),
        )
    )


def unsplit_loss(mesh, x_SD, table_VD, targets_S, weights_S):
    """The same from `cross_entropy.reference`, device after device."""

    @jax.jit
    def run(x_SD, table_VD, targets_S, weights_S):
        given = LossTokens(x_SD, targets_S, weights_S)
        return reference.value_and_grad(given, table_VD)

    results = [
        run(x_SD, table_VD, targets_S, weights_S)
        for x_SD, targets_S, weights_S in zip(
            *(by_device(array, mesh) for array in (x_SD, targets_S, weights_S)),
            strict=True,
        )
    ]
    losses, dx = zip(*results, strict=True)
    return np.concatenate(losses), np.concatenate(dx)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradient_of_each_device_are_those_of_the_whole_table(mesh):
    mesh = mesh_of(mesh)
    table_VD, split_VD = table(mesh)
    x_SD, targets_S, weights_S = tokens(mesh)
    want = unsplit_loss(mesh, x_SD, table_VD, targets_S, weights_S)
    assert chunking.loss_tokens(ROWS * TOKENS, PADDED // mesh.size) < ROWS * TOKENS
    got = split_loss(mesh)(x_SD, split_VD, targets_S, weights_S)
    comparing.assert_trees_close(jax.device_get(got), want)


@pytest.mark.usefixtures("x64")
def test_rows_of_padding_would_change_the_loss():
    mesh = mesh_of("2x2x2")
    _, split_VD = table(mesh)
    arrays = tokens(mesh)
    masked, _ = split_loss(mesh)(arrays[0], split_VD, *arrays[1:])
    unmasked, _ = split_loss(mesh, PADDED)(arrays[0], split_VD, *arrays[1:])
    more = by_device(unmasked, mesh).sum(axis=1) / by_device(masked, mesh).sum(axis=1)
    assert np.all(more > 2)


@pytest.mark.usefixtures("x64")
def test_tokens_without_weight_add_nothing():
    mesh = mesh_of("2x2x2")
    _, split_VD = table(mesh)
    x_SD, targets_S, weights_S = tokens(mesh)
    loss, dx_SD = split_loss(mesh)(x_SD, split_VD, targets_S, 0 * weights_S)
    assert not np.any(loss)
    assert not np.any(dx_SD)

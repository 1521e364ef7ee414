import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes, shardings

AXES = ("tier0", "tier1", "tier2")


def mesh_of(text):
    return meshes.make(meshes.parse(text), jax.devices())


def kernel_sharding(mesh, *, rest_axes):
    rules = shardings.rules(mesh.axis_names, rest_axes=rest_axes)
    dims = shardings.dims("kernel", stacked=True)
    return jax.sharding.NamedSharding(mesh, rules.spec(*dims))


check = functools.partial(shardings.check_divides, remedy="pad it")


@pytest.mark.parametrize(
    ("rest_axes", "rows"),
    [
        (0, ("tier2", "tier1", "tier0")),
        (1, ("tier2", "tier1")),
        (2, ("tier2",)),
        (3, None),
    ],
)
def test_weight_rows_have_the_slowest_axis_minor(rest_axes, rows):
    rules = shardings.rules(AXES, rest_axes=rest_axes)
    assert rules.spec("weight_rows", None) == P(rows, None)
    assert rules.spec("batch") == P(AXES)
    # A vocabulary table is split over all devices under every plan.
    assert rules.spec("vocab_rows", None) == P(("tier2", "tier1", "tier0"), None)


def test_two_dims_on_one_axis_are_an_error():
    rules = shardings.rules(AXES, rest_axes=0)
    text = "dims .*'batch', 'weight_rows'.* a mesh axis may shard only one dim"
    with pytest.raises(ValueError, match=text):
        rules.spec("batch", "weight_rows")
    assert rules.spec(None, None) == P(None, None)


@pytest.mark.parametrize(
    ("leaf", "stacked", "want"),
    [
        ("kernel", True, P(None, ("tier2", "tier1", "tier0"), None)),
        ("kernel", False, P(("tier2", "tier1", "tier0"), None)),
        ("table", False, P(("tier2", "tier1", "tier0"), None)),
        ("scale", True, P(None, None)),
        ("bias", False, P(None)),
    ],
)
def test_sharding_of_a_parameter_follows_its_name(leaf, stacked, want):
    rules = shardings.rules(AXES, rest_axes=0)
    dims = shardings.dims(leaf, stacked=stacked)
    assert rules.spec(*dims) == want
    assert any(dims) == (leaf in ("kernel", "table"))


def test_unknown_parameters_are_never_replicated_silently():
    with pytest.raises(KeyError, match="weight"):
        shardings.dims("weight", stacked=False)


def test_a_size_that_does_not_divide_is_an_error_naming_all_of_it():
    """known-bugs F1."""
    mesh = mesh_of("2x2x2")
    sharding = kernel_sharding(mesh, rest_axes=0)
    check("mlp.up_proj/kernel", (3, 16, 5), sharding)
    text = (
        "mlp.up_proj/kernel: dim 1 of size 12 can't be split over the 8 devices of "
        "mesh axes tier2, tier1, tier0; use a mesh whose size divides 12, or pad it"
    )
    with pytest.raises(ConfigError, match=text):
        check("mlp.up_proj/kernel", (3, 12, 5), sharding)
    sharding = kernel_sharding(mesh, rest_axes=1)
    check("mlp.up_proj/kernel", (3, 12, 5), sharding)


def test_axes_named_without_a_tuple_are_checked_too():
    sharding = jax.sharding.NamedSharding(mesh_of("8"), P("tier0"))
    with pytest.raises(
        ConfigError, match="x: dim 0 of size 9 can't be split over the 8 "
    ):
        check("x", (9, 4), sharding)


@pytest.mark.parametrize("rest_axes", range(4))
def test_a_share_is_1_over_the_devices_that_split_it(rest_axes):
    mesh = mesh_of("2x2x2")
    sharding = kernel_sharding(mesh, rest_axes=rest_axes)
    index_of = sharding.devices_indices_map((1, 16, 3))
    index_of = {device: index[1:] for device, index in index_of.items()}
    rows = {len(range(*index[0].indices(16))) for index in index_of.values()}
    assert rows == {16 * 2**rest_axes // 8}
    covered = np.concatenate([np.arange(16)[index[0]] for index in index_of.values()])
    assert np.all(np.bincount(covered) == 2**rest_axes)

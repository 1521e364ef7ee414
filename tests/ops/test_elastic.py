import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax import meshes, shardings
from mtuner_jax.ops import elastic

ROWS = 16
MESHES = ("2x2x2", "4x2", "8", "1")


def mesh_of(text):
    return meshes.make(meshes.parse(text), jax.devices())


def row_sharding(mesh, rest_axes):
    """How a weight is stored that is held over the `rest_axes` slowest axes."""
    rules = shardings.rules(mesh.axis_names, rest_axes=rest_axes)
    return NamedSharding(mesh, rules.spec("weight_rows", None))


def splits():
    found = []
    for text in MESHES:
        num_axes = max(1, len(meshes.parse(text).sizes))
        ends = range(num_axes + 1)
        found += [(text, rest, kept) for rest in ends for kept in ends[rest:]]
    return found


def gathered(mesh, weight, *, rest, kept):
    """Each device's part after raising its share, stacked over devices."""
    axes = mesh.axis_names

    def run(shard):
        part = elastic.gather(shard, axes=axes[rest:kept])
        part = part if rest < len(axes) else jax.lax.pcast(part, axes, to="varying")
        return part[None]

    before = row_sharding(mesh, rest)
    program = jax.shard_map(
        run, mesh=mesh, in_specs=before.spec, out_specs=P(axes, None, None)
    )
    return jax.jit(program), jax.device_put(weight, before)


@pytest.mark.parametrize(("mesh", "rest", "kept"), splits())
def test_gathered_rows_are_those_of_the_higher_ratio_in_order(mesh, rest, kept):
    mesh = mesh_of(mesh)
    weight = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
    program, placed = gathered(mesh, weight, rest=rest, kept=kept)
    parts = np.asarray(program(placed))
    index_of = row_sharding(mesh, kept).devices_indices_map(weight.shape)
    for device, part in zip(mesh.devices.flat, parts, strict=True):
        np.testing.assert_array_equal(part, weight[index_of[device]])


def test_the_slowest_axis_joins_neighbouring_rows():
    """1/8 -> 1/4 crosses the slowest link and gives one contiguous block."""
    mesh = mesh_of("2x2x2")
    index_of = row_sharding(mesh, 0).devices_indices_map((ROWS, 3))
    starts = np.vectorize(lambda device: index_of[device][0].start)(mesh.devices)
    np.testing.assert_array_equal(starts[1] - starts[0], np.full((2, 2), ROWS // 8))


@pytest.mark.parametrize(("rest", "kept"), [(0, 3), (0, 1), (1, 3), (2, 2), (3, 3)])
def test_gather_lowers_to_one_all_gather_or_none(rest, kept):
    weight = np.zeros((ROWS, 3), np.float32)
    program, placed = gathered(mesh_of("2x2x2"), weight, rest=rest, kept=kept)
    text = program.lower(placed).as_text()
    assert text.count('"stablehlo.all_gather"') == (rest < kept)
    assert "all_reduce" not in text
    assert "all_to_all" not in text

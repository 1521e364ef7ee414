import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.devices import meshes, shardings
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


LEVELS = [
    (text, held, want)
    for text, num_axes in (("2x2x2", 3), ("2x4", 2))
    for held in range(num_axes + 1)
    for want in range(num_axes + 1)
]


def parts_of(mesh, held):
    """A weight's block on each device when held over `held` axes, stacked."""
    weight = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
    index_of = row_sharding(mesh, held).devices_indices_map(weight.shape)
    return np.stack([weight[index_of[device]] for device in mesh.devices.flat])


def on_each_device(mesh, function):
    """`function` of a device's block, for blocks stacked over devices."""

    def run(stacked):
        return jax.tree.map(lambda block: block[None], function(stacked[0]))

    spec = P(mesh.axis_names, None, None)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))


def count(program, *args):
    """Collectives of a program, by what StableHLO calls them."""
    text = program.lower(*args).as_text()
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute")
    return {kind: n for kind in kinds if (n := text.count(f'{kind}"('))}


@pytest.mark.parametrize(("mesh", "held", "want"), LEVELS)
def test_change_gives_the_block_of_the_wanted_level(mesh, held, want):
    """By one gather if it rises, by no communication if it falls."""
    mesh = mesh_of(mesh)
    program = on_each_device(
        mesh,
        lambda block: elastic.change(block, axes=mesh.axis_names, held=held, want=want),
    )
    parts = parts_of(mesh, held)
    np.testing.assert_array_equal(program(parts), parts_of(mesh, want))
    assert count(program, parts) == ({"all_gather": 1} if want > held else {})


@pytest.mark.parametrize(
    ("mesh", "held", "want"), [level for level in LEVELS if level[1] <= level[2]]
)
def test_discard_undoes_gather(mesh, held, want):
    mesh = mesh_of(mesh)
    axes = mesh.axis_names[held:want]
    program = on_each_device(
        mesh,
        lambda block: elastic.discard(elastic.gather(block, axes=axes), axes=axes),
    )
    parts = parts_of(mesh, held)
    np.testing.assert_array_equal(program(parts), parts)


@pytest.mark.parametrize(("mesh", "held", "stop"), LEVELS)
def test_through_gives_the_whole_and_a_part_and_receives_each_byte_once(
    mesh, held, stop
):
    mesh = mesh_of(mesh)
    whole = len(mesh.axis_names)
    program = on_each_device(
        mesh,
        lambda block: elastic.through(
            block, axes=mesh.axis_names, held=held, stop=stop
        ),
    )
    parts = parts_of(mesh, held)
    full, part = program(parts)
    np.testing.assert_array_equal(full, parts_of(mesh, whole))
    np.testing.assert_array_equal(part, parts_of(mesh, stop))
    # Levels at which it rises: from `held`, and from `stop` if that is above.
    gathers = len({held, max(held, stop)} - {whole})
    assert count(program, parts) == ({"all_gather": gathers} if gathers else {})

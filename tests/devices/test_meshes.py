import jax
import numpy as np
import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("pcie8", (2, 2, 2)),
        ("nvlink8", (2, 2, 2)),
        ("nvlink32", (2, 2, 2, 2, 2)),
        ("h200x1", ()),
        ("h200x2", (2,)),
        ("h200x8", (2, 2, 2)),
        ("l40sx8", (2, 2, 2)),
        ("rtx4090x8", (2, 2, 2)),
    ],
)
def test_presets_factorise_their_devices_into_axes_of_size_2(name, sizes):
    spec = meshes.parse(name)
    assert spec.sizes == sizes
    assert len(spec.link_names) == len(sizes)
    assert spec.axes == meshes.AXES[: len(sizes)]
    first = {"pcie8", "nvlink8", "nvlink32", "h200x1", "h200x2"}
    assert meshes.PRESETS.keys() == first | {"h200x8", "l40sx8", "rtx4090x8"}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2x2x2", (2, 2, 2)),
        ("8", (8,)),
        ("1", ()),
        ("4x1x2", (4, 2)),
        ("3x2", (3, 2)),
    ],
)
def test_sizes_by_hand_drop_axes_of_size_1(text, sizes):
    spec = meshes.parse(text)
    assert (spec.sizes, spec.num_devices) == (sizes, int(np.prod(sizes)))


@pytest.mark.parametrize(
    ("num_devices", "sizes"),
    [(1, ()), (2, (2,)), (6, (3, 2)), (7, (7,)), (8, (2, 2, 2)), (12, (3, 2, 2))],
)
def test_auto_uses_all_accelerators(num_devices, sizes):
    assert meshes.parse("auto", num_devices=num_devices).sizes == sizes


@pytest.mark.parametrize("num_devices", [None, 0])
def test_auto_is_pcie8_without_accelerators(num_devices):
    assert meshes.parse("auto", num_devices=num_devices) == meshes.PRESETS["pcie8"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("pcie4", "mesh='pcie4' is unknown; use auto, pcie8, nvlink8, .*2x2x2"),
        ("2x", "is unknown"),
        ("-2", "is unknown"),
        ("", "is unknown"),
        ("2x0", "mesh='2x0': 1 to 8 sizes, each at least 1"),
        ("x".join("2" * 9), "1 to 8 sizes"),
        ("64x64x64", "mesh='64x64x64': 262,144 devices; up to 1,024 can be planned"),
    ],
)
def test_what_is_no_mesh_is_an_error(text, error):
    with pytest.raises(ConfigError, match=error):
        meshes.parse(text)


@pytest.mark.parametrize("text", ["2x2x2", "4x2", "8", "2"])
def test_devices_fill_the_mesh_in_the_order_given(text):
    spec = meshes.parse(text)
    devices = jax.devices()[::-1]
    mesh = meshes.make(spec, devices)
    assert mesh.axis_names == spec.axes
    assert mesh.devices.shape == spec.sizes
    assert list(mesh.devices.flat) == devices[: spec.num_devices]
    auto = jax.sharding.AxisType.Auto
    assert mesh.axis_types == (auto,) * len(spec.sizes)


def test_one_device_makes_an_axis_of_size_1():
    mesh = meshes.make(meshes.parse("h200x1"), jax.devices())
    assert dict(mesh.shape) == {"tier0": 1}


def test_too_few_devices_are_an_error_with_both_counts():
    text = "mesh nvlink32 needs 32 devices, 8 found; choose a smaller mesh"
    with pytest.raises(ConfigError, match=text):
        meshes.make(meshes.parse("nvlink32"), jax.devices())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "pcie8",
            "mesh pcie8: tier0=2 (between NUMA domains) x tier1=2 (between PCIe "
            "switches) x tier2=2 (within a PCIe switch), 8 x A100-PCIe-40GB",
        ),
        ("1", "mesh 1: 1 device, devices as found"),
    ],
)
def test_description_names_axes_links_and_machine(text, line):
    assert meshes.parse(text).describe() == line

import itertools
import logging

import jax
import pytest

from mtuner_jax.devices import orders


@pytest.fixture
def pcie8(tmp_path):
    """sysfs of a made-up server: 2 NUMA nodes x 2 switches x 2 GPUs.

    PCI addresses run across the switches, as on real boards, so that the order by
    address is not the order by switch.
    """
    folder = tmp_path / "bus/pci/devices"
    folder.mkdir(parents=True)
    addresses = []
    for index, (slot, switch, node) in enumerate(
        itertools.product((0, 1), (0, 1), (0, 1))
    ):
        bus = 0x10 + index
        address = f"0000:{bus:02x}:00.0"
        root = f"devices/pci0000:{node * 8:x}0/0000:{node * 8:x}0:0{switch + 1}.0"
        up = f"0000:{node * 8 + switch + 1:02x}:00.0"
        down = f"0000:{node * 8 + switch + 3:02x}:{slot * 8:02x}.0"
        real = tmp_path / root / up / down / address
        real.mkdir(parents=True)
        (real / "numa_node").write_text(f"{node}\n")
        (folder / address).symlink_to(real)
        addresses.append(f"0000{address.upper()}")
    return tmp_path, addresses


def test_a_place_is_read_from_sysfs(pcie8):
    sysfs, addresses = pcie8
    place = orders.pci_place(addresses[3], sysfs=sysfs)
    assert place.address == "0000:13:00.0"
    assert place.numa_node == 1
    assert place.bridges == (
        "pci0000:80",
        "0000:80:02.0",
        "0000:0a:00.0",
        "0000:0c:00.0",
    )
    assert place.switch == "0000:0a:00.0"


def test_devices_of_a_numa_node_and_of_a_switch_stand_together(pcie8):
    sysfs, addresses = pcie8
    places = [orders.pci_place(address, sysfs=sysfs) for address in addresses]
    order = sorted(range(8), key=places.__getitem__)
    assert sorted(order) == list(range(8))
    sorted_places = [places[index] for index in order]
    assert [place.numa_node for place in sorted_places] == [0] * 4 + [1] * 4
    switches = [place.switch for place in sorted_places]
    assert switches[0::2] == switches[1::2]
    assert len(set(switches)) == 4


def test_a_line_for_each_device_says_where_it_sits(pcie8):
    sysfs, addresses = pcie8
    places = [orders.pci_place(address, sysfs=sysfs) for address in addresses]
    lines = orders.lines(places, sorted(range(8), key=places.__getitem__))
    assert lines[1] == (
        "mesh device 1: CUDA device 4, 0000:14:00.0, NUMA node 0, below 0000:01:00.0"
    )
    assert len(lines) == 8


def test_a_device_sysfs_does_not_know_has_no_place(tmp_path):
    place = orders.pci_place("0000:99:00.0", sysfs=tmp_path)
    assert (place.numa_node, place.bridges, place.switch) == (-1, (), "")


def test_a_device_at_a_root_port_names_the_port():
    bridges = ("pci0000:00", "0000:00:05.0")
    place = orders.PciPlace(address="0000:01:00.0", numa_node=-1, bridges=bridges)
    assert place.switch == "0000:00:05.0"


UUIDS = ["GPU-1a2b", "GPU-1c3d", "GPU-9e8f"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-9, 1", [2, 1]),
        ("GPU-1", []),
        ("0,7,1", [0]),
        ("1,-1,0", [1]),
        ("", []),
    ],
)
def test_cuda_visible_devices_permutes_and_ends_as_in_cuda(visible, indices):
    assert orders.visible_indices(visible, UUIDS) == indices


def test_cpus_keep_their_order(caplog):
    caplog.set_level(logging.INFO)
    assert orders.neighbours_together(jax.devices("cpu")) == jax.devices("cpu")
    assert not caplog.records

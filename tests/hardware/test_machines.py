import dataclasses
import itertools
import json
import logging
import math
import pathlib

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import boxes, cards, machines

PRESETS = sorted(boxes.BOXES)
PCIE8 = machines.preset("pcie8")
to_json = machines.FORMAT.to_json


def from_json(text):
    return machines.FORMAT.from_json(text, machines.Hardware)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """No calibration of the user's own gets into a test."""
    monkeypatch.setenv(machines.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", PRESETS)
def test_each_figure_of_a_preset_has_a_source(name):
    assert machines.preset(name).sources.keys() == set(machines.FIGURES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reaches_less_than_the_data_sheet(name):
    preset = machines.preset(name)
    rates = [rate for _, rate in preset.matmul_flops_per_s]
    peak = cards.peak_flops_per_s(preset.device)
    assert peak is not None
    assert rates == sorted(rates) and rates[-1] < peak
    assert preset.attention_flops_per_s < rates[-1]


def test_presets_know_what_was_measured_on_h200():
    h200 = machines.preset("h200x1")
    assert h200.matmul_flops_per_s[-1] == (8192, 786e12)
    assert h200.attention_flops_per_s == 472e12
    assert machines.preset("h200x2-pcie").links[0].bytes_per_s == 25e9
    for field in ("matmul_flops_per_s", "attention_flops_per_s", "host_bytes_per_s"):
        assert h200.sources[field].startswith("measured")
        assert PCIE8.sources[field].startswith("assumed:")


def test_the_first_gather_of_pcie8_is_the_slowest():
    rates = [link.bytes_per_s for link in PCIE8.links]
    assert rates == sorted(rates) and rates[0] < rates[1]


@pytest.mark.parametrize("name", sorted(meshes.PRESETS))
def test_each_mesh_preset_has_its_machine(name):
    mesh = meshes.PRESETS[name]
    found = machines.find(mesh_sizes=mesh.sizes, mesh=name)
    assert (found.name, found.mesh_sizes) == (name, mesh.sizes)


@pytest.mark.parametrize("name", PRESETS)
def test_json_is_read_back_and_stable(name, folder):
    preset = machines.preset(name)
    text = to_json(preset)
    assert from_json(text) == preset
    assert to_json(from_json(text)) == text
    keys = list(json.loads(text))
    assert keys == sorted(keys)
    machines.write(folder / "deep" / "a.json", preset)
    path = str(folder / "deep" / "a.json")
    assert machines.find(path, mesh_sizes=preset.mesh_sizes) == preset


def changed_json(**changes):
    content = {**json.loads(to_json(PCIE8)), **changes}
    return json.dumps({key: value for key, value in content.items() if value != "gone"})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "hardware: not JSON"),
        ("[]", "a JSON object, not list"),
        (changed_json(version=0), "version 0 is not 1; run scripts/calibrate.py"),
        (changed_json(kernel_s="gone"), "misses the field kernel_s"),
        (changed_json(speed=1), "has the field speed; its fields are attention"),
        (changed_json(kernel_s="fast"), "hardware: kernel_s='fast' is not a number"),
        (changed_json(memory_bytes=True), "memory_bytes=True is not an integer"),
        (changed_json(memory_bytes=math.nan), "memory_bytes=nan is not an integer"),
        (changed_json(memory_bytes=0), "pcie8: memory_bytes=0 must be above 0"),
        (changed_json(kernel_s=math.nan), "pcie8: kernel_s=nan must be at least 0"),
        (changed_json(links=[{"bytes_per_s": 1.0}]), "misses the field latency_s"),
        (changed_json(links=[]), "0 links, mesh_sizes=.2, 2, 2.; one link per axis"),
        (changed_json(mesh_sizes=[2, 2, 0]), "one link per axis, sizes from 1 on"),
        (changed_json(matmul_flops_per_s=[[8, 1.0], [4, 1.0]]), "tokens ascending"),
        (changed_json(matmul_flops_per_s=[[8]]), "=.8. has not 2 entries"),
        (changed_json(matmul_flops_per_s=[]), "one pair or more"),
        (changed_json(sources=[]), r"hardware: sources=\[\] is not an object"),
        (changed_json(matmul_flops_per_s=[[8, 0.0]]), "rate at 8 tokens=0.0 must be"),
        (changed_json(overlap_slowdown=0.5), "overlap_slowdown=0.5 must be at least 1"),
        (changed_json(pool_fraction=1.5), "pool_fraction=1.5 of memory_bytes"),
        (changed_json(reserve_bytes=10**12), "and a smaller reserve"),
    ],
)
def test_what_is_no_machine_is_an_error(text, error):
    with pytest.raises(ConfigError, match=error):
        from_json(text)


def test_a_hosts_memory_is_shared_by_its_cards_and_may_be_unknown():
    assert PCIE8.host_budget_bytes == 0
    known = dataclasses.replace(PCIE8, host_memory_bytes=10 * 2**30)
    assert known.host_budget_bytes == 2**30
    assert machines.fitted(known, (2,)).host_budget_bytes == 4 * 2**30
    four_hosts = machines.preset("nvlink32")
    assert (four_hosts.num_devices, four_hosts.devices_per_host) == (32, 8)
    older = json.loads(to_json(PCIE8))
    del older["host_memory_bytes"]
    assert from_json(json.dumps(older)) == PCIE8


def test_errors_of_a_file_name_it(folder):
    with pytest.raises(ConfigError, match=r"no\.json'?: no such file"):
        machines.find(str(folder / "no.json"), mesh_sizes=(2,))
    (folder / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json: hardware version None is not 1"):
        machines.find(str(folder / "bad.json"), mesh_sizes=(2,))


def test_an_unknown_name_lists_the_known_and_the_near(folder):
    machines.write(folder / "mybox.json", PCIE8)
    (folder / "mybox.raw.json").write_text("{}")
    with pytest.raises(ConfigError, match="did you mean pcie8 or") as error:
        machines.find("pcie", mesh_sizes=(2,))
    text = str(error.value)
    assert all(name in text for name in [*PRESETS, "mybox"])
    assert "raw" not in text
    assert machines.find("mybox", mesh_sizes=(2, 2, 2)) == PCIE8


@pytest.mark.parametrize("sizes", [(), (1,), (2,), (8,), (2, 4), (4, 1, 2), (2, 2, 2)])
def test_another_mesh_takes_the_links_from_the_slowest_on(sizes):
    found = machines.find("pcie8", mesh_sizes=sizes)
    axes = [size for size in sizes if size > 1]
    assert found.links == PCIE8.links[: len(axes)]
    assert found.mesh_sizes == tuple(axes)
    same = dataclasses.replace(
        found, mesh_sizes=PCIE8.mesh_sizes, links=PCIE8.links, name="pcie8"
    )
    assert same == PCIE8


def test_too_few_links_are_an_error_that_says_so():
    text = (
        "hardware h200x2 describes 1 links, mesh 2x2x2 has 3 axes; choose another "
        "mesh or --hardware h200x8 or h200x8-pcie, or run"
    )
    with pytest.raises(ConfigError, match=text):
        machines.find("h200x2", mesh_sizes=(2, 2, 2))


@pytest.mark.parametrize(
    ("device", "sizes", "name"),
    [
        ("NVIDIA H200", (), "h200x1"),
        ("NVIDIA H200", (2,), "h200x2"),
        ("NVIDIA H200", (2, 2, 2), "h200x8"),
        ("NVIDIA H100 80GB HBM3", (2, 2, 2), "nvlink8"),
        ("NVIDIA A100-PCIE-40GB", (2, 2, 2), "pcie8"),
        ("NVIDIA L40S", (2, 2, 2), "l40sx8"),
        ("NVIDIA GeForce RTX 4090", (2, 2, 2), "rtx4090x8"),
        ("", (2, 2), "pcie8"),
        ("cpu", (2, 2, 2), "pcie8"),
    ],
)
def test_auto_goes_by_what_jax_found(device, sizes, name):
    found = machines.find(mesh_sizes=sizes, device_kind=device)
    assert (found.name, found.mesh_sizes) == (name, sizes)


def test_auto_prefers_the_cards_found_to_those_of_the_mesh():
    found = machines.find(
        mesh_sizes=(2, 2, 2), mesh="pcie8", device_kind="NVIDIA GeForce RTX 4090"
    )
    assert found.name == "rtx4090x8"


def test_auto_takes_a_larger_machine_of_the_card_and_says_so(caplog):
    found = machines.find(mesh_sizes=(2, 2), device_kind="NVIDIA H200")
    assert (found.name, found.mesh_sizes) == ("h200x8", (2, 2))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "4 x NVIDIA H200 is not known, figures are those of h200x8" in caplog.text


def test_auto_takes_the_mesh_for_an_unknown_card_or_is_an_error(caplog):
    found = machines.find(mesh_sizes=(2, 2, 2), mesh="pcie8", device_kind="NVIDIA B9")
    assert found == PCIE8
    assert "8 x NVIDIA B9 is not known" in caplog.text
    with pytest.raises(ConfigError, match="nothing is known of 2 x NVIDIA B9"):
        machines.find(mesh_sizes=(2,), mesh="2", device_kind="NVIDIA B9")


def test_two_h200_without_peer_to_peer_have_a_name_of_their_own(monkeypatch):
    slow = {"NCCL_P2P_DISABLE": "1"}
    assert machines.name_for("NVIDIA H200", 2, environ=slow) == "h200x2-pcie"
    assert machines.name_for("NVIDIA H200", 2, environ={}) == "h200x2"
    assert machines.name_for("NVIDIA L40S", 8, environ=slow) == "l40sx8"
    assert machines.name_for("NVIDIA B9", 3, environ={}) == "nvidia-b9x3"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = machines.find(mesh_sizes=(2,), mesh="h200x2", device_kind="NVIDIA H200")
    assert found.name == "h200x2-pcie"


def test_a_calibration_replaces_the_preset_of_its_name(folder, caplog):
    measured = dataclasses.replace(machines.preset("h200x2"), kernel_s=1e-6)
    machines.write(folder / "h200x2.json", measured)
    caplog.set_level(logging.INFO)
    assert machines.find("h200x2", mesh_sizes=(2,)) == measured
    auto = machines.find(mesh_sizes=(2,), device_kind="NVIDIA H200")
    assert auto == measured
    assert f"hardware h200x2: calibrated figures from {folder}" in caplog.text
    assert len(caplog.records) == 2  # one line for each look
    assert machines.find("h200x1", mesh_sizes=()) == machines.preset("h200x1")


def test_auto_finds_the_calibration_of_a_card_without_preset(folder):
    measured = dataclasses.replace(PCIE8, name="b9", device="NVIDIA B9")
    machines.write(folder / "nvidia-b9x8.json", measured)
    found = machines.find(mesh_sizes=(2, 2, 2), mesh="pcie8", device_kind="NVIDIA B9")
    assert found == measured


@pytest.mark.parametrize("device", ["cpu", "NVIDIA L40S"])
def test_a_calibration_of_other_devices_never_replaces_a_preset(device, folder, caplog):
    machines.write(folder / "pcie8.json", dataclasses.replace(PCIE8, device=device))
    assert machines.find("pcie8", mesh_sizes=(2, 2, 2)) == PCIE8
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"is ignored, it describes {device} and not NVIDIA A100" in caplog.text


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"MTUNER_HARDWARE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/mtuner-jax/hardware"),
        ({}, str(pathlib.Path.home() / ".cache/mtuner-jax/hardware")),
    ],
)
def test_calibrations_lie_in_the_cache_or_where_the_user_says(environ, folder):
    assert machines.default_directory(environ=environ) == pathlib.Path(folder)


def test_the_budget_is_the_pool_less_the_reserve():
    half = dataclasses.replace(
        PCIE8, memory_bytes=1001, pool_fraction=0.5, reserve_bytes=100
    )
    assert half.budget_bytes == 400
    assert half.num_devices == 8


def test_names_are_not_taken_twice():
    machines = [
        (box.card.device, box.mesh_sizes)
        for box in boxes.BOXES.values()
        if not box.p2p_disabled
    ]
    assert all(a != b for a, b in itertools.combinations(machines, 2))

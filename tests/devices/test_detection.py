import pathlib
import re

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import detection


@pytest.fixture
def machine(tmp_path):
    """A root folder with as many NVIDIA devices in dev/ and proc/ as asked for."""

    def make(in_dev, in_proc):
        (tmp_path / "dev").mkdir()
        for name in ["null", "nvidiactl", "nvidia-uvm", "nvidia-caps"]:
            (tmp_path / "dev" / name).touch()
        for index in range(in_dev):
            (tmp_path / "dev" / f"nvidia{index}").touch()
        for index in range(in_proc):
            path = tmp_path / f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0"
            path.mkdir(parents=True)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("in_dev", "in_proc", "visible", "present", "usable"),
    [
        (0, 0, None, 0, 0),
        (8, 8, None, 8, 8),
        (2, 8, None, 8, 2),
        (0, 8, None, 8, 0),
        (8, 8, "", 8, 0),
        (8, 8, "-1", 8, 0),
        (8, 8, "3", 8, 1),
        (8, 8, "3, 1", 8, 2),
        (8, 8, "0,1,-1,2", 8, 2),
        (8, 8, "0,9,1", 8, 1),
        (8, 8, "GPU-1a2b,GPU-3c4d", 8, 2),
        (8, 8, "NoDevFiles", 8, 0),
        (8, 8, "none", 8, 0),
        (8, 8, "0,0", 8, 0),
        (8, 8, "GPU-1a2b,GPU-1a2b", 8, 0),
        (8, 8, "MIG-1a2b", 8, 1),
        (8, 8, "MIG-1a2b,MIG-3c4d", 8, 1),
    ],
)
def test_devices_are_counted_as_cuda_counts_them(
    machine, in_dev, in_proc, visible, present, usable
):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = detection.look(root=machine(in_dev, in_proc), environ=environ)
    assert (found.num_present, found.num_visible) == (present, usable)
    assert found.cuda_visible_devices == visible


def test_present_is_singular_for_one_device():
    assert detection.Gpus(num_present=1).present == "1 NVIDIA device"
    assert detection.Gpus(num_present=2).present == "2 NVIDIA devices"


@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        ("NoDevFiles", r"hides them (Slurm gave this job no GPU; ask for them with"),
        ("0,0", "hides them (it names 0 twice)"),
        ("", "CUDA_VISIBLE_DEVICES='' hides them"),
    ],
)
def test_what_hides_all_devices_is_explained(visible, reason):
    assert reason in detection.hidden_by(visible, "them")


def test_a_mesh_of_unlike_cards_is_refused_with_the_choices():
    old, new = "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090"
    text = re.escape(
        f"unlike cards: 2 x {old}, 2 x {new}; choose with "
        f"CUDA_VISIBLE_DEVICES=0,3 ({old}) or CUDA_VISIBLE_DEVICES=1,2 ({new})"
    )
    with pytest.raises(ConfigError, match=text):
        detection.require_one_kind([old, new, new, old])
    detection.require_one_kind([old, old])


@pytest.mark.parametrize(
    ("driver_cuda", "text"),
    [
        ("12.4", r"pip install 'mtuner-jax[cuda12]'` (the driver supports CUDA 12.4)"),
        ("13.0", r"pip install 'mtuner-jax[cuda13]'` (the driver supports CUDA 13.0)"),
        (
            "",
            "or `pip install 'mtuner-jax[cuda13]'`, whichever CUDA version nvidia-smi",
        ),
    ],
)
def test_what_to_install_follows_the_driver(driver_cuda, text):
    found = detection.Gpus(num_present=2, num_visible=2, driver_cuda=driver_cuda)
    unusable = detection.unusable(found)
    assert text in unusable
    assert unusable.startswith("2 NVIDIA devices found, but JAX cannot use them")


def test_the_real_machine_can_be_looked_at():
    found = detection.look()
    assert found.num_visible <= found.num_present
    assert found.num_present == 0 or pathlib.Path("/dev/nvidiactl").exists()

import pathlib

import pytest

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

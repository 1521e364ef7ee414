import json
import os
import subprocess
import sys
import textwrap

import jax
import pytest

from mtuner_jax import configs
from mtuner_jax.devices import detection, platforms

AUTO, CPU, GPU = configs.Platform.AUTO, configs.Platform.CPU, configs.Platform.GPU
EIGHT = {"num_present": 8, "num_visible": 8, "cuda_plugins": ("xla_cuda13",)}


def decide(platform, num_devices, mesh="pcie8", **found):
    return platforms.decide(
        platform,
        num_devices,
        mesh=mesh,
        found=detection.Gpus(**found),
    )


@pytest.mark.parametrize(
    ("platform", "found", "line"),
    [
        (AUTO, {}, "no accelerator found: mesh pcie8 runs on 8 virtual CPU devices"),
        (CPU, EIGHT, "platform cpu was asked for: mesh pcie8 runs on 8 virtual CPU"),
        (AUTO, {**EIGHT, "jax_platforms": "cpu"}, "JAX_PLATFORMS=cpu: mesh pcie8 runs"),
        (
            AUTO,
            {"num_present": 8, "cuda_visible_devices": ""},
            "CUDA_VISIBLE_DEVICES='' hides 8 NVIDIA devices: mesh pcie8 runs on 8",
        ),
    ],
)
def test_cpus_are_used_by_wish_or_for_want_of_gpus_and_a_line_says_which(
    platform, found, line
):
    prepared = decide(platform, 8, **found)
    assert prepared.platform is CPU
    assert prepared.line.startswith(line)


@pytest.mark.parametrize("platform", [AUTO, GPU])
def test_gpus_are_used_where_jax_can(platform):
    prepared = decide(platform, 8, **EIGHT)
    assert prepared.platform is GPU
    assert prepared.line == "mesh pcie8 runs on 8 NVIDIA devices"


@pytest.mark.parametrize(
    ("platform", "num_devices", "found", "message"),
    [
        (GPU, 8, {}, "platform=gpu: no NVIDIA device"),
        (
            GPU,
            8,
            {**EIGHT, "jax_platforms": "cpu"},
            "platform=gpu, but JAX_PLATFORMS=cpu",
        ),
        (
            AUTO,
            8,
            {**EIGHT, "cuda_plugins": ()},
            "8 NVIDIA devices found, but JAX cannot",
        ),
        (
            AUTO,
            8,
            {"num_present": 8},
            "8 NVIDIA devices .* can open none .* `--gpus all`",
        ),
        (
            AUTO,
            8,
            {**EIGHT, "num_visible": 2},
            "needs 8 NVIDIA devices, 2 found; choose",
        ),
        (
            AUTO,
            8,
            {**EIGHT, "num_visible": 1, "cuda_visible_devices": "3"},
            r"mesh pcie8 needs 8 NVIDIA devices, 1 found \(CUDA_VISIBLE_DEVICES=3\)",
        ),
        (
            GPU,
            1,
            {**EIGHT, "num_visible": 0, "cuda_visible_devices": "-1"},
            "CUDA_VISIBLE_DEVICES='-1' hides them",
        ),
        (
            GPU,
            1,
            {**EIGHT, "num_visible": 0, "cuda_visible_devices": "NoDevFiles"},
            r"hides them \(Slurm gave this job no GPU; ask for them with --gres=gpu:N",
        ),
        (CPU, 1000, {}, "mesh pcie8 needs 1,000 devices, and no more than 64 virtual"),
    ],
)
def test_gpus_that_cannot_be_used_are_an_error(platform, num_devices, found, message):
    with pytest.raises(configs.ConfigError, match=message):
        decide(platform, num_devices, **found)


def test_the_cache_is_where_the_user_wants_it(tmp_path):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("processor: 0\nflags\t\t: fpu avx2\n")

    def directory(on_gpu, **environ):
        return platforms.cache_directory(
            on_gpu=on_gpu, environ=environ, cpu_info=cpu_info
        )

    gpu = directory(True, MTUNER_CACHE_DIR="/c", XDG_CACHE_HOME="/x")
    assert str(gpu) == "/c/gpu"
    cpu = directory(False, XDG_CACHE_HOME="/x")
    assert str(cpu).startswith("/x/mtuner-jax/xla/cpu-")
    cpu_info.write_text("flags\t\t: fpu avx512\n")
    assert directory(False, XDG_CACHE_HOME="/x") != cpu
    assert ".cache/mtuner-jax/xla/gpu" in str(directory(True))


def run(script, **environ):
    """Runs a script in a new process, where JAX has not started yet."""
    names = ("JAX_", "XLA_", "CUDA_", "MTUNER_")
    clean = {key: v for key, v in os.environ.items() if not key.startswith(names)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PREPARE_CPU = """
    import json, jax
    from mtuner_jax import configs
    from mtuner_jax.devices import platforms
    prepared = platforms.prepare(configs.Platform.CPU, 6, mesh="3x2")
    devices = platforms.start(prepared)
    cache = jax.config.jax_compilation_cache_dir
    print(json.dumps([len(devices), devices[0].platform, prepared.line, cache]))
"""


def test_prepare_makes_as_many_virtual_cpu_devices_as_the_mesh_needs():
    number, platform, line, cache = run(PREPARE_CPU, MTUNER_CACHE_DIR="/nowhere")
    assert (number, platform) == (6, "cpu")
    assert line.endswith("mesh 3x2 runs on 6 virtual CPU devices")
    assert cache.startswith("/nowhere/cpu-")


def test_an_existing_jax_cache_directory_wins():
    environ = {"JAX_COMPILATION_CACHE_DIR": "/mine", "MTUNER_CACHE_DIR": "/nowhere"}
    assert run(PREPARE_CPU, **environ)[-1] == "/mine"


PREPARE_GPU = """
    import json, os, jax
    from mtuner_jax import configs
    from mtuner_jax.devices import platforms
    fraction = platforms.prepare_gpu(deterministic=True)
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS", "CUDA_DEVICE_ORDER")
    given = [os.environ.get(name) for name in names]
    print(json.dumps([fraction, *given, jax.config.jax_platforms]))
"""


def test_gpu_settings_are_made_before_jax_starts():
    fraction, given, flags, order, jax_platforms = run(PREPARE_GPU)
    assert (fraction, given) == (0.75, "0.75")
    assert flags == "--xla_gpu_deterministic_ops=true"
    assert (order, jax_platforms) == ("PCI_BUS_ID", "cuda,cpu")


def test_the_users_gpu_settings_win():
    fraction, given, flags, order, jax_platforms = run(
        PREPARE_GPU,
        XLA_CLIENT_MEM_FRACTION="0.9",
        XLA_FLAGS="--xla_gpu_deterministic_ops=false --xla_foo=1",
        CUDA_DEVICE_ORDER="FASTEST_FIRST",
        JAX_PLATFORMS="cuda",
    )
    assert (fraction, given) == (0.9, None)
    assert flags == "--xla_gpu_deterministic_ops=false --xla_foo=1"
    assert (order, jax_platforms) == ("FASTEST_FIRST", "cuda")


def test_more_cpu_devices_than_a_running_jax_has_are_an_error():
    number = jax.local_device_count()
    platforms.prepare_cpu(number)
    with pytest.raises(configs.ConfigError, match=f"already started with {number}"):
        platforms.prepare_cpu(number + 1)


def test_start_on_cpus_keeps_the_order():
    prepared = decide(CPU, 4)
    assert platforms.start(prepared) == jax.devices("cpu")
    with pytest.raises(configs.ConfigError, match="60 devices are needed, JAX has"):
        platforms.start(decide(CPU, 60))
